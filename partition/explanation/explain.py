"""Why a plan is as it is: what limits each stage, what is left out, and how the plain plans compare."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from cost_model.cluster import Cluster, Device
from cost_model.errors import InfeasibleError, InputError
from cost_model.layer_costs import Prices
from cost_model.network import Network
from cost_model.units import format_bytes, format_seconds
from partition.baselines.layer_splits import BASELINES
from partition.bounds.best_bound import fractional_bound_s
from partition.constraints.forced_plans import without
from partition.estimates.optimizer_sharding import fits, with_state_owners
from partition.estimates.plan_memory import plan_memory
from partition.plan import Pipeline, Plan, Stage
from partition.problem import Evaluate, Problem

BUSIEST = 0.97  # of the busiest device: as busy as this is limited by its own computation
MOST_TRIALS = 64  # stages beyond these are explained without moving a layer there
SAME = 1e-3  # relative: steps nearer than this are as long
WAITING = 0.02  # of a step: a shorter wait is no limit
PLAIN: Mapping[str, str] = {
    "single": "the fastest single device",
    "ddp": "plain data parallelism",
    "poplar": "data parallelism with unequal shares",
}


class Limit(StrEnum):
    """What keeps a stage from taking more work."""

    COMPUTE = "compute"
    WHOLE_LAYERS = "whole layers"
    MEMORY = "memory"
    LINK = "link"
    SYNC = "sync"


@dataclass(frozen=True, slots=True)
class StageReason:
    """Why a stage has its layers.

    busy: share of the step for which the device computes, in [0, 1]. link: the channel beside the stage that
    is occupied for the largest share of the step, link_busy. more_bytes: what the device would lack with a
    layer of a neighbour on top, 0 where that fits, None where there is none to take. more_step: the step
    with it, relative to the plan's; None where it does not fit or was not tried.
    """

    pipeline: int
    stage: int
    device: str
    layers: tuple[int, int]
    limit: Limit
    busy: float
    free_bytes: float
    more_bytes: float | None = None
    more_step: float | None = None
    link: str | None = None
    link_busy: float = 0.0
    waits_for: str | None = None


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A device that the plan does not use; at_most: the speed-up of the bound by it, 0.05 is 5 %."""

    device: str
    at_most: float


@dataclass(frozen=True, slots=True)
class Alternative:
    """A plain way to train; slower: its step over the plan's less 1, None where it does not fit."""

    name: str
    what: str
    slower: float | None
    device: str | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Explanation:
    step_s: float
    stages: tuple[StageReason, ...]
    left_out: tuple[LeftOut, ...]
    alternatives: tuple[Alternative, ...]

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


Waits = Mapping[str, Mapping[str, float]]
"""Seconds of each device by what it waited for, as the simulator tells."""


def explain(plan: Plan, problem: Problem, evaluate: Evaluate, waits: Waits | None = None) -> Explanation:
    """Why the plan is as it is; each "one more layer" is judged by `evaluate`.

    waits: tells which stages wait for gradient sync; without it links and computation are told apart only.
    """
    figures = evaluate(plan)
    explainer = _Explainer(plan, problem, evaluate, figures.step_s, waits or {})
    busy = {name: entry.busy for name, entry in figures.devices.items()}
    return Explanation(
        figures.step_s,
        tuple(explainer.stage_reasons(busy)),
        tuple(left_out(plan, problem)),
        tuple(alternatives(plan, problem, evaluate, figures.step_s)),
    )


class _Explainer:
    """The questions about one plan."""

    def __init__(self, plan: Plan, problem: Problem, evaluate: Evaluate, step_s: float, waits: Waits) -> None:
        self.plan, self.problem, self.evaluate = plan, problem, evaluate
        self.step_s, self.waits = step_s, waits
        self.profile = profile = problem.profile
        self.network = Network(problem.cluster, profile.links, profile.all_reduces)
        self.prices = Prices(profile)

    def stage_reasons(self, busy: Mapping[str, float]) -> Iterator[StageReason]:
        most, trials = max(busy.values()), 0
        for number, pipeline in enumerate(self.plan.pipelines):
            for index, stage in enumerate(pipeline.stages):
                trials += 1
                device = self.problem.cluster.device(stage.device)
                free = device.usable_bytes - self.memory(self.plan, device.name)
                lacks, slower = self.one_more(number, index, try_it=trials <= MOST_TRIALS)
                link, link_busy = self.busiest_link(pipeline, index)
                waits_for = self.longest_wait(device.name)
                mine = busy[device.name]
                limit = _limit(mine, most, lacks, link_busy, waits_for)
                yield StageReason(
                    number,
                    index,
                    device.name,
                    stage.layers,
                    limit,
                    mine,
                    free,
                    lacks,
                    slower,
                    link,
                    link_busy,
                    waits_for,
                )

    def memory(self, plan: Plan, name: str) -> float:
        return plan_memory(plan, self.profile, name).total_bytes

    def one_more(self, number: int, index: int, *, try_it: bool) -> tuple[float | None, float | None]:
        """(bytes that are missing for a layer more, step with it over the step), the better of both sides."""
        device = self.problem.cluster.device(self.plan.pipelines[number].stages[index].device)
        tries = list(self._moved(number, index))
        if not tries:
            return None, None
        lacks = [max(0.0, self.memory(plan, device.name) - device.usable_bytes) for plan in tries]
        able = [
            plan
            for plan, missing in zip(tries, lacks, strict=True)
            if missing == 0 and (not plan.zero or fits(plan, self.profile, self.problem.cluster))
        ]
        steps = [self.evaluate(plan).step_s for plan in able] if try_it and self.step_s else []
        return min(lacks), min(steps) / self.step_s if steps else None

    def _moved(self, number: int, index: int) -> Iterator[Plan]:
        """The plan with a layer of each neighbour given to a stage, where that keeps one.

        Sharded optimizer states are shared out anew: their owners may not hold the same layers any more.
        """
        pipeline = self.plan.pipelines[number]
        for side, other in ((-1, index - 1), (1, index + 1)):
            if not 0 <= other < len(pipeline.stages) or pipeline.stages[other].num_layers == 1:
                continue
            stages = list(pipeline.stages)
            mine, theirs = stages[index], stages[other]
            if side < 0:
                stages[index] = dataclasses.replace(mine, layers=(mine.start - 1, mine.stop))
                stages[other] = dataclasses.replace(theirs, layers=(theirs.start, theirs.stop - 1))
            else:
                stages[index] = dataclasses.replace(mine, layers=(mine.start, mine.stop + 1))
                stages[other] = dataclasses.replace(theirs, layers=(theirs.start + 1, theirs.stop))
            changed = dataclasses.replace(pipeline, stages=tuple(stages))
            pipelines = [*self.plan.pipelines[:number], changed, *self.plan.pipelines[number + 1 :]]
            moved = dataclasses.replace(self.plan, pipelines=tuple(pipelines), state_owners=None)
            yield with_state_owners(moved, self.profile, self.problem.cluster) if moved.zero else moved

    def busiest_link(self, pipeline: Pipeline, index: int) -> tuple[str | None, float]:
        """The channel beside a stage that is occupied longest, and for which share of the step."""
        found: tuple[str | None, float] = (None, 0.0)
        samples = pipeline.microbatch_size
        hops = [(index - 1, index), (index, index - 1), (index, index + 1), (index + 1, index)]
        for source, destination in hops:
            if min(source, destination) < 0 or max(source, destination) >= len(pipeline.stages):
                continue
            one, other = pipeline.stages[source].device, pipeline.stages[destination].device
            if one == other or not self.step_s:
                continue
            layer = pipeline.stages[max(source, destination)].start
            message_s = self.network.route(one, other).link.occupancy_s(
                self.prices.boundary_bytes(layer, samples)
            )
            share = pipeline.num_samples / samples * message_s / self.step_s
            if share > found[1]:
                found = (f"{one} to {other}", share)
        return found

    def longest_wait(self, name: str) -> str | None:
        """What a device waits for longest, if that is worth a word."""
        waits = {what: s for what, s in self.waits.get(name, {}).items() if s > WAITING * self.step_s}
        return max(waits, key=waits.__getitem__) if waits else None


def _limit(busy: float, most: float, lacks: float | None, link_busy: float, waits_for: str | None) -> Limit:
    if busy >= BUSIEST * most and busy >= link_busy:
        return Limit.COMPUTE
    if lacks:
        return Limit.MEMORY
    if link_busy > busy:
        return Limit.LINK
    if waits_for in ("sync", "norm"):
        return Limit.SYNC
    return Limit.COMPUTE if lacks is None else Limit.WHOLE_LAYERS


def left_out(plan: Plan, problem: Problem) -> Iterator[LeftOut]:
    """The devices that a plan does not use, each with the most that it could add.

    That is the ratio of the fractional bounds without and with it: no transfer, no wait, no sync.
    """
    unused = [device for device in problem.cluster.devices if device.name not in plan.device_names]
    if not unused:
        return
    whole_s, known = fractional_bound_s(problem), {}
    for device in unused:
        key = device.device_class
        if key not in known:
            known[key] = _bound_without(problem, device) / whole_s - 1 if whole_s > 0 else 0.0
        yield LeftOut(device.name, max(0.0, known[key]))


def _bound_without(problem: Problem, device: Device) -> float:
    smaller = without(problem.cluster, [device.name])
    try:
        return fractional_bound_s(dataclasses.replace(problem, cluster=smaller))
    except InfeasibleError:
        return float("inf")


def alternatives(plan: Plan, problem: Problem, evaluate: Evaluate, step_s: float) -> Iterator[Alternative]:
    """One device, and data parallelism, beside the plan."""
    for name, what in PLAIN.items():
        try:
            plain = BASELINES[name](problem, evaluate)
        except (InfeasibleError, InputError) as error:
            yield Alternative(name, what, None, reason=str(error))
            continue
        slower = evaluate(plain).step_s / step_s - 1 if step_s else 0.0
        alone = plain.device_names[0] if len(plain.device_names) == 1 else None
        yield Alternative(name, what, slower, alone)


def sentences(explanation: Explanation, plan: Plan, problem: Problem) -> list[str]:
    """The explanation as sentences: the stages, what is left out, the plain plans."""
    lines = [_stage_sentence(reason, plan, problem.cluster) for reason in explanation.stages]
    lines += _left_out_sentences(explanation.left_out)
    return lines + [
        _alternative_sentence(entry, plan, explanation.step_s) for entry in explanation.alternatives
    ]


def _stage_sentence(reason: StageReason, plan: Plan, cluster: Cluster) -> str:
    stage: Stage = plan.pipelines[reason.pipeline].stages[reason.stage]
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


def _left_out_sentences(entries: Sequence[LeftOut]) -> Iterator[str]:
    """Devices that would add the same in one sentence."""
    groups: dict[float, list[str]] = {}
    for entry in entries:
        groups.setdefault(entry.at_most, []).append(entry.device)
    for at_most, names in groups.items():
        each = " each" if len(names) > 1 else ""
        verb = "are" if len(names) > 1 else "is"
        yield (
            f"{', '.join(names)} {verb} left out: without transfers, waits and gradient sync "
            f"{'they' if each else 'it'} would add{each} {at_most:.1%} of speed at most"
        )


def _alternative_sentence(entry: Alternative, plan: Plan, step_s: float) -> str:
    what = f"{entry.what}, {entry.device}," if entry.device else entry.what
    if entry.slower is None:
        return f"{what} does not fit: {entry.reason}"
    if abs(entry.slower) <= SAME:
        best = entry.name == "single" and len(plan.device_names) == 1
        return f"{what} is {'the plan itself: it is best' if best else 'as fast'}"
    if entry.slower < 0:
        return f"{what} is {-entry.slower:.1%} faster than this plan: use it"
    step = format_seconds(step_s * (1 + entry.slower))
    return f"{what} would take {1 + entry.slower:.2f} times as long: {step} a step"
