"""Why a plan is as it is, as values: what limits each stage, what is left out, how plain plans compare."""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from cost_model.cluster import Device
from cost_model.errors import InfeasibleError, InputError
from cost_model.layer_costs import Prices
from cost_model.network import Network
from cost_model.other_clusters import without
from partition.baselines.catalogue import BASELINES
from partition.bounds.best_bound import fractional_bound_s
from partition.estimates.optimizer_sharding import fits, with_state_owners
from partition.estimates.plan_memory import memory_on
from partition.plan import Pipeline, Plan
from partition.problem import Evaluate, Problem

BUSIEST = 0.97  # of the busiest device: as busy as this is limited by its own computation
MOST_TRIALS = 64  # stages beyond these are explained without moving a layer there
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
    """The reason why a stage has its layers.

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
    """The reasons for a plan, and the plain ways to train beside it."""

    step_s: float
    stages: tuple[StageReason, ...]
    left_out: tuple[LeftOut, ...]
    alternatives: tuple[Alternative, ...]

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


Waits = Mapping[str, Mapping[str, float]]
"""Seconds of each device by what it waited for, as the simulator tells."""


def explain(plan: Plan, problem: Problem, evaluate: Evaluate, waits: Waits | None = None) -> Explanation:
    """Explain why a plan is as it is; each "one more layer" is judged by `evaluate`.

    waits: tells which stages wait for gradient sync; without it links and computation are told apart only.
    """
    figures = evaluate(plan)
    explainer = _Explainer(plan, problem, evaluate, figures.step_s, waits or {})
    busy = {name: device.busy for name, device in figures.devices.items()}
    return Explanation(
        figures.step_s,
        tuple(explainer.stage_reasons(busy)),
        tuple(left_out(plan, problem)),
        tuple(alternatives(plan, problem, evaluate, figures.step_s)),
    )


class _Explainer:
    """The answers to questions about one plan."""

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
        return memory_on(plan, self.profile, self.problem.cluster.device(name)).total_bytes

    def one_more(self, number: int, index: int, *, try_it: bool) -> tuple[float | None, float | None]:
        """Return (bytes missing for a layer more, step with it over the step), the better of both sides."""
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
        """Yield the plan with a layer of each neighbour given to a stage, where that keeps one.

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
            moved = dataclasses.replace(
                self.plan, pipelines=tuple(pipelines), state_owners=None, owner_ranges=()
            )
            yield with_state_owners(moved, self.profile, self.problem.cluster) if moved.zero else moved

    def busiest_link(self, pipeline: Pipeline, index: int) -> tuple[str | None, float]:
        """Return the channel beside a stage that is occupied longest, and for which share of the step."""
        found: tuple[str | None, float] = (None, 0.0)
        samples = pipeline.microbatch_size
        neighbours = [(index - 1, index), (index, index - 1), (index, index + 1), (index + 1, index)]
        for source, destination in neighbours:
            if min(source, destination) < 0 or max(source, destination) >= len(pipeline.stages):
                continue
            one, other = pipeline.stages[source].device, pipeline.stages[destination].device
            if one == other or not self.step_s:
                continue
            layer = pipeline.stages[max(source, destination)].start
            if source > destination and not self.prices.takes_gradient(layer):
                continue
            num_bytes = self.prices.boundary_bytes(
                layer, samples, *map(self.problem.cluster.device, (one, other))
            )
            message_s = self.network.route(one, other).link.occupancy_s(num_bytes)
            share = pipeline.num_samples / samples * message_s / self.step_s
            if share > found[1]:
                found = (f"{one} to {other}", share)
        return found

    def longest_wait(self, name: str) -> str | None:
        """Return what a device waits for longest, if that is worth a word."""
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
    """Yield the devices that a plan does not use, each with the most that it could add.

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
    """Compare one device, and data parallelism, with the plan."""
    for name, what in PLAIN.items():
        try:
            plain = BASELINES[name](problem, evaluate)
        except (InfeasibleError, InputError) as error:
            yield Alternative(name, what, None, reason=str(error))
            continue
        slower = evaluate(plain).step_s / step_s - 1 if step_s else 0.0
        alone = plain.device_names[0] if len(plain.device_names) == 1 else None
        yield Alternative(name, what, slower, alone)
