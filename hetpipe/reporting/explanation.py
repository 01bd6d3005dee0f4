"""Sentences about why a plan is as it is."""

from collections.abc import Iterator, Sequence

from cost_model.cluster import Cluster
from cost_model.units import format_bytes, format_seconds
from partition.explanation.explain import Alternative, Explanation, LeftOut, Limit, StageReason
from partition.plan import Plan
from partition.problem import Problem

SAME = 1e-3  # relative: steps nearer than this are as long


def explanation_sentences(explanation: Explanation, plan: Plan, problem: Problem) -> list[str]:
    """Return an explanation as sentences: the stages, what is left out, the plain plans."""
    lines = [_stage_sentence(reason, plan, problem.cluster) for reason in explanation.stages]
    lines += _left_out_sentences(explanation.left_out)
    return lines + [
        _alternative_sentence(plain, plan, explanation.step_s) for plain in explanation.alternatives
    ]


def _stage_sentence(reason: StageReason, plan: Plan, cluster: Cluster) -> str:
    stage = plan.pipelines[reason.pipeline].stages[reason.stage]
    start, stop = reason.layers
    several = f"pipeline {reason.pipeline}, " if len(plan.pipelines) > 1 else ""
    layers = f"layer {start}" if stop - start == 1 else f"layers {start}-{stop - 1}"
    if stage.num_layers == plan.num_layers:
        layers = "all layers"
    busy = f"busy {reason.busy:.0%} of the step"
    usable = format_bytes(cluster.device(stage.device).usable_bytes)
    free = f"{format_bytes(max(0.0, reason.free_bytes))} of {usable} free"
    match reason.limit:
        case Limit.COMPUTE | Limit.WHOLE_LAYERS:
            why = f"limited by {reason.limit}: {busy}, {free}{_one_more(reason)}"
        case Limit.MEMORY:
            why = (
                f"limited by memory: {free}, one more layer would need "
                f"{format_bytes(reason.more_bytes or 0.0)} more than that; {busy}"
            )
        case Limit.LINK:
            why = f"limited by the link {reason.link}: it is busy {reason.link_busy:.0%}, the device {busy}"
        case Limit.SYNC:
            why = f"limited by the {reason.waits_for} of gradients: {busy}"
    if reason.limit in (Limit.COMPUTE, Limit.WHOLE_LAYERS) and reason.waits_for and reason.busy < 0.9:
        why += f"; waits longest for {reason.waits_for}"
    return f"{several}{reason.device} has {layers}, {why}"


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
            f"{', '.join(names)} {verb} left out: without transfers, waits and gradient sync "
            f"{'they' if each else 'it'} would add{each} {at_most:.1%} of speed at most"
        )


def _alternative_sentence(plain: Alternative, plan: Plan, step_s: float) -> str:
    what = f"{plain.what}, {plain.device}," if plain.device else plain.what
    if plain.slower is None:
        return f"{what} does not fit: {plain.reason}"
    if abs(plain.slower) <= SAME:
        best = plain.name == "single" and len(plan.device_names) == 1
        return f"{what} is {'the plan itself: it is best' if best else 'as fast'}"
    if plain.slower < 0:
        return f"{what} is {-plain.slower:.1%} faster than this plan: use it"
    step = format_seconds(step_s * (1 + plain.slower))
    return f"{what} would take {1 + plain.slower:.2f} times as long: {step} a step"
