"""Sentences about why a plan is as it is."""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import groupby

from cost_model.cluster import Cluster
from cost_model.layer_costs import Prices
from cost_model.units import format_bytes, format_seconds
from hetpipe.reporting.tables import describe_layers, in_units
from partition.estimates.host_moves import moves_added_s
from partition.estimates.plan_memory import host_uses
from partition.explanation.explain import Alternative, Explanation, LeftOut, Limit, StageReason
from partition.plan import FROZEN_WEIGHTS, OPTIMIZER_STATES, SAVED_ACTIVATIONS, Plan
from partition.problem import Problem

SAME = 1e-3  # relative: steps nearer than this are as long


def explanation_sentences(explanation: Explanation, plan: Plan, problem: Problem) -> list[str]:
    """Return an explanation as sentences: the stages, what is left out, the plain plans.

    Pipelines of the same stages on the same kinds of devices are told of together.
    """
    lines = [
        _stage_sentence(alike, plan, problem.cluster) for alike in _alike(explanation.stages, plan, problem)
    ]
    lines += _range_sentences(plan, problem)
    lines += _host_sentences(plan, problem, explanation.step_s)
    lines += _left_out_sentences(explanation.left_out)
    return lines + [
        _alternative_sentence(plain, plan, explanation.step_s) for plain in explanation.alternatives
    ]


def _range_sentences(plan: Plan, problem: Problem) -> Iterator[str]:
    """Say of each layer that several devices own how much each has."""
    for layer, ranges in groupby(plan.owner_ranges, lambda each: each.layer):
        shares = ", ".join(f"{each.device} {each.share:.0%}" for each in ranges)
        name, words = problem.profile.layers[layer].name, plan.sharding_of(layer).words
        yield f"layer {layer} ({name}) is cut between owners of its {words}: {shares}"


def _alike(reasons: Sequence[StageReason], plan: Plan, problem: Problem) -> Iterable[Sequence[StageReason]]:
    """Return the stages, those in one place of pipelines alike and limited by the same together."""

    def shape(number: int) -> Hashable:
        pipeline = plan.pipelines[number]
        devices = (problem.cluster.device(stage.device) for stage in pipeline.stages)
        stages = zip((stage.layers for stage in pipeline.stages), devices, strict=True)
        return tuple((layers, device.kind, device.speed, device.usable_bytes) for layers, device in stages)

    shapes = [shape(number) for number in range(len(plan.pipelines))]
    groups: dict[Hashable, list[StageReason]] = {}
    for reason in reasons:
        key = shapes.index(shapes[reason.pipeline]), reason.stage, reason.limit
        groups.setdefault(key, []).append(reason)
    return groups.values()


def _stage_sentence(alike: Sequence[StageReason], plan: Plan, cluster: Cluster) -> str:
    reason = min(alike, key=lambda each: each.more_step or 0.0)  # the one that gains most by a layer more
    stage = plan.pipelines[reason.pipeline].stages[reason.stage]
    start, stop = reason.layers
    layers = f"layer {start}" if stop - start == 1 else f"layers {start}-{stop - 1}"
    if stage.num_layers == plan.num_layers:
        layers = "all layers"
    busy = f"busy {_range([each.busy for each in alike])} of the step"
    usable = format_bytes(cluster.device(stage.device).usable_bytes)
    least = min(each.free_bytes for each in alike)
    free = f"{format_bytes(max(0.0, least))} of {usable} free"
    match reason.limit:
        case Limit.COMPUTE | Limit.WHOLE_LAYERS:
            why = f"limited by {reason.limit}: {busy}, {free}{_one_more(reason)}"
        case Limit.MEMORY:
            why = (
                f"limited by memory: {free}, one more layer would need "
                f"{format_bytes(reason.more_bytes or 0.0)} more than that; {busy}"
            )
        case Limit.LINK if len(alike) > 1:
            links = _range([each.link_busy for each in alike])
            why = f"limited by links: they are busy {links}, the devices {busy}"
        case Limit.LINK:
            why = f"limited by the link {reason.link}: it is busy {reason.link_busy:.0%}, the device {busy}"
        case Limit.SYNC:
            why = f"limited by the {reason.waits_for} of gradients: {busy}"
    waits = {each.waits_for for each in alike}
    if reason.limit in (Limit.COMPUTE, Limit.WHOLE_LAYERS) and reason.busy < 0.9 and len(waits) == 1:
        why += f"; waits longest for {reason.waits_for}" if reason.waits_for else ""
    return f"{_who(alike, plan)} {layers}, {why}"


def _host_sentences(plan: Plan, problem: Problem, step_s: float) -> Iterator[str]:
    """Say what hosts keep, and how much longer passes are for what moves."""
    uses = host_uses(plan, problem.profile, problem.cluster)
    for node, use in uses.items():
        kept = {
            OPTIMIZER_STATES: use.state_bytes,
            FROZEN_WEIGHTS: use.frozen_bytes,
            SAVED_ACTIVATIONS: use.saved_bytes,
            "weights to fetch": use.fetched_bytes,
        }
        words = ", ".join(f"{format_bytes(size)} of {what}" for what, size in kept.items() if size)
        yield f"the host of {node} keeps {words}; it lends {format_bytes(use.capacity_bytes)}"
    if any(use.frozen_bytes or use.saved_bytes for use in uses.values()):
        added_s = moves_added_s(plan, Prices(problem.profile), problem.cluster)
        if added_s > SAME * step_s:
            yield f"for what moves, passes of a device are {format_seconds(added_s)} of a step longer"
        else:
            yield "what moves hides behind computation"


def _who(alike: Sequence[StageReason], plan: Plan) -> str:
    """Name pipelines and devices, and say "has" or "have"."""
    names = describe_layers([reason.device for reason in alike])
    if len(alike) == 1:
        several = f"pipeline {alike[0].pipeline}, " if len(plan.pipelines) > 1 else ""
        return f"{several}{names} has"
    numbers = describe_layers([str(reason.pipeline) for reason in alike])
    return f"{len(alike)} pipelines ({numbers}), {names} have"


def _range(shares: Sequence[float]) -> str:
    least, most = f"{min(shares):.0%}", f"{max(shares):.0%}"
    return least if least == most else f"{least} to {most}"


def _one_more(reason: StageReason) -> str:
    if reason.more_bytes:
        return f"; one more layer would need {format_bytes(reason.more_bytes)} more than that"
    if reason.more_step is None:
        return ""
    if reason.more_step > 1 + SAME:
        return f"; with one more layer the step would be {reason.more_step - 1:.1%} longer"
    if reason.more_step < 1 - SAME:
        return f"; with one more layer the step would be {1 - reason.more_step:.1%} shorter: plan again"
    return "; with one more layer the step would be as long"


def _left_out_sentences(left_out: Sequence[LeftOut]) -> Iterator[str]:
    """Name devices that would add the same in one sentence."""
    groups: dict[float, list[str]] = {}
    for device in left_out:
        groups.setdefault(device.at_most, []).append(device.device)
    for at_most, names in groups.items():
        each = " each" if len(names) > 1 else ""
        verb = "are" if len(names) > 1 else "is"
        yield (
            f"{describe_layers(names)} {verb} left out: without transfers, waits and gradient sync "
            f"{'they' if each else 'it'} would add{each} {at_most:.1%} of speed at most"
        )


def _short(plain: Alternative) -> str:
    """Return why a plan does not fit, without its name and the advice to let us choose."""
    reason = in_units(str(plain.reason)).removeprefix(f"{plain.name}: ")
    return reason.partition("; let `auto`")[0]


def _alternative_sentence(plain: Alternative, plan: Plan, step_s: float) -> str:
    what = f"{plain.what}, {plain.device}," if plain.device else plain.what
    if plain.slower is None:
        return f"{what} does not fit: {_short(plain)}"
    if abs(plain.slower) <= SAME:
        best = plain.name == "single" and len(plan.device_names) == 1
        return f"{what} is {'the plan itself: it is best' if best else 'as fast'}"
    if plain.slower < 0:
        return f"{what} is {-plain.slower:.1%} faster than this plan: use it"
    step = format_seconds(step_s * (1 + plain.slower))
    return f"{what} would take {1 + plain.slower:.2f} times as long: {step} a step"
