"""What of a plan the simulator alone can judge: in_flight, and who does which samples and layers.

Clocks choose these, as if pipelines had the network for themselves and nothing were summed. Where more is in
flight in front, stages behind end sooner, and their sums hide behind the backwards that are left in front;
where messages wait for those of others, a pipeline with slower cards should do a little less.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, permutations, product

from partition.estimates.effort import TuningEffort
from partition.estimates.step_estimate import shares_devices
from partition.estimates.timed_pipeline import TimedPipeline
from partition.local_search.moves import GAIN
from partition.local_search.pipeline_search import PipelineSearch
from partition.plan import Pipeline, Plan

Change = tuple[Sequence[TimedPipeline], tuple[Pipeline, ...]]
"""Pipelines, timed and as they are planned."""
StepSeconds = Callable[[Plan], float]
"""The simulated step of a plan."""
MORE_IN_FLIGHT = (1, 2, 4, 8, -1)
MOST_KINDS = 4  # of pipelines that are changed apart
MOST_MOVED = 3  # cuts at a time
SEED = 0


def tuned(search: PipelineSearch, plans: Iterable[Plan], step_s: StepSeconds) -> list[Plan]:
    """Return what plans become, best first: other in_flight, and then of a few shares of the batch, and cuts.

    Those are left out that shard or offload anything, in which devices have several stages or no pipeline has
    two, and of which the step is hardly above the clocks of their pipelines, which know better then.
    """
    tunings = [made for plan in plans if (made := _tuning(search, plan, step_s)) is not None]
    for tuning in tunings:
        tuning.with_flights()
    tunings.sort(key=lambda tuning: step_s(tuning.plan))
    for tuning in tunings[: search.effort.tuning.changed_further]:
        tuning.with_all()
    return sorted((tuning.plan for tuning in tunings), key=step_s)


def _tuning(search: PipelineSearch, plan: Plan, step_s: StepSeconds) -> "_Tuning | None":
    """Return what changes a plan; None where there is nothing to change."""
    effort = search.effort.tuning
    if all(len(entry.stages) == 1 for entry in plan.pipelines):
        return None
    if plan.zero or plan.offloads or plan.layer_zero or shares_devices(plan):
        return None
    timed = search.timed(plan)
    if not all(pipeline.timing.fits for pipeline in timed):
        return None
    pairs = zip(timed, plan.pipelines, strict=True)
    clock_s = max(one.timing.time_s(entry.num_samples) for one, entry in pairs)
    if step_s(plan) <= (1 + effort.least_gap) * clock_s:
        return None
    return _Tuning(search, timed, plan, step_s, effort)


def more_in_flight(plan: Plan, timed: Sequence[TimedPipeline], more: int) -> Plan:
    """Return a plan with so many more in flight, within memory, in front of messages between nodes.

    timed: its pipelines, and maybe some without samples.
    """
    of_first = {one.stages[0].device.name: one for one in timed}
    pipelines = []
    for entry in plan.pipelines:
        one = of_first[entry.stages[0].device]
        nodes = [device.node for device in one.devices]
        front = max((place for place, pair in enumerate(pairwise(nodes), 1) if pair[0] != pair[1]), default=0)
        wanted = [flight + more * (place < front) for place, flight in enumerate(_flights_of(entry))]
        pipelines.append(_within_memory(one, entry.num_samples, wanted) if front else entry)
    return replace(plan, pipelines=tuple(pipelines))


@dataclass
class _Tuning:
    """The best plan so far of some pipelines, timed; counts what was simulated."""

    search: PipelineSearch
    timed: Sequence[TimedPipeline]
    plan: Plan
    step_s: StepSeconds
    effort: TuningEffort

    def __post_init__(self) -> None:
        ticks = sum(entry.num_microbatches * len(entry.stages) for entry in self.plan.pipelines)
        self._left = min(self.effort.most_plans, self.effort.most_ticks // ticks)

    def with_flights(self) -> None:
        """Change in_flight as long as that shortens the step."""
        self._climbed(self._flights)

    def with_all(self) -> None:
        """Change anything, one by one, as long as that shortens the step."""
        rng, goes_on = random.Random(SEED), True
        while goes_on and self._left > 0:
            climbed = [self._climbed(changes) for changes in (self._flights, self._shares, self._cuts)]
            goes_on = any([*climbed, self._climbed(lambda: self._moved_at_random(rng))])

    def _climbed(self, changes: Callable[[], Iterator[Change]]) -> bool:
        """Take what shortens the step, then what shortens that, until nothing does; whether any did."""
        any_did, goes_on = False, True
        while goes_on:
            goes_on = False
            for timed, pipelines in changes():
                if self._left <= 0:
                    return any_did
                trial = replace(self.plan, pipelines=pipelines)
                if trial == self.plan or not self.search.problem.forced.allows(trial):
                    continue
                self._left -= 1
                if self.step_s(trial) < self.step_s(self.plan) * (1 - GAIN):
                    self.timed, self.plan, any_did, goes_on = timed, trial, True, True
                    break
        return any_did

    def _kinds(self) -> list[list[int]]:
        """Return the places of pipelines that are timed alike, for as many kinds as are changed apart."""
        kinds: dict[int, list[int]] = {}
        for at, one in enumerate(self.timed):
            kinds.setdefault(id(one.timing), []).append(at)
        return list(kinds.values())[:MOST_KINDS]

    def _flights(self) -> Iterator[Change]:
        """Give more or less in flight at the first stages, of all pipelines or of a kind."""
        entries = list(enumerate(self.plan.pipelines))
        for places in dict.fromkeys(map(tuple, [range(len(entries)), *self._kinds()])):
            most = max(len(self.timed[at].stages) for at in places)
            for stages, more in product(range(1, most), MORE_IN_FLIGHT):
                changed = (
                    self._with_flights(at, entry.num_samples, stages, more) if at in places else entry
                    for at, entry in entries
                )
                yield self.timed, tuple(changed)

    def _shares(self) -> Iterator[Change]:
        """Give a few samples of each pipeline of a kind to those of another one, in equal parts."""
        for givers, takers in permutations(self._kinds(), 2):
            for each in (1, self.timed[givers[0]].microbatch_size):
                samples = [entry.num_samples for entry in self.plan.pipelines]
                for at in givers:
                    samples[at] -= each
                for place in range(each * len(givers)):
                    samples[takers[place % len(takers)]] += 1
                if min(samples) > 0:
                    yield self._with_samples(samples)

    def _moved_at_random(self, rng: random.Random) -> Iterator[Change]:
        """Give a few samples of a pipeline to another one, at random."""
        number = len(self.timed)
        for _ in range(self.effort.most_in_vain if number > 1 else 0):
            giver, taker = rng.sample(range(number), 2)
            each = rng.choice((1, 1, 2)) * rng.choice((1, self.timed[giver].microbatch_size))
            samples = [entry.num_samples for entry in self.plan.pipelines]
            if samples[giver] > each:
                samples[giver] -= each
                samples[taker] += each
                yield self._with_samples(samples)

    def _cuts(self) -> Iterator[Change]:
        """Give a layer of a stage of all pipelines of a kind to another one, as far as memory takes it."""
        for places in self._kinds():
            first = self.timed[places[0]].stages
            for starts in _starts_near([stage.start for stage in first]):
                bounds = list(pairwise([*starts, first[-1].stop]))
                if any(start >= stop for start, stop in bounds):
                    continue
                timed, pipelines = list(self.timed), list(self.plan.pipelines)
                for at in places:
                    timed[at] = self._recut(at, bounds)
                if all(timed[at].timing.fits for at in places):
                    for at in places:
                        entry = pipelines[at]
                        pipelines[at] = _within_memory(timed[at], entry.num_samples, _flights_of(entry))
                    yield timed, tuple(pipelines)

    def _recut(self, at: int, bounds: Sequence[tuple[int, int]]) -> TimedPipeline:
        """Return a pipeline with other layers at its stages."""
        pairs = zip(self.timed[at].stages, bounds, strict=True)
        stages = [stage._replace(start=start, stop=stop) for stage, (start, stop) in pairs]
        return self.search.timings.pipeline(stages, self.timed[at].microbatch_size)

    def _with_samples(self, samples: Sequence[int]) -> Change:
        return self.timed, tuple(
            entry if entry.num_samples == count else self._with_flights(at, count, 0, 0)
            for at, (entry, count) in enumerate(zip(self.plan.pipelines, samples, strict=True))
        )

    def _with_flights(self, at: int, num_samples: int, stages: int, more: int) -> Pipeline:
        """Return a pipeline of so many samples, with so many more in flight at its first stages."""
        one, entry = self.timed[at], self.plan.pipelines[at]
        last = min(stages, len(entry.stages) - 1)
        wanted = [max(1, flight + more * (place < last)) for place, flight in enumerate(_flights_of(entry))]
        return _within_memory(one, num_samples, wanted)


def _flights_of(entry: Pipeline) -> list[int]:
    return [stage.in_flight for stage in entry.stages]


def _within_memory(timed: TimedPipeline, num_samples: int, wanted: Sequence[int]) -> Pipeline:
    """Return a pipeline of so many samples with in_flight as near to what is wanted as memory allows."""
    num_microbatches = -(-num_samples // min(timed.microbatch_size, num_samples))
    return timed.pipeline(num_samples, timed.timing.within_memory(num_microbatches, wanted))


def _starts_near(starts: Sequence[int]) -> Iterator[list[int]]:
    """Give first layers of stages of which up to MOST_MOVED neighbours begin a layer sooner or later."""
    for first in range(1, len(starts)):
        for last in range(first, min(first + MOST_MOVED, len(starts))):
            for by in (-1, 1):
                yield [start + by * (first <= place <= last) for place, start in enumerate(starts)]
