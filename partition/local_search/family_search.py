"""The best families of a problem: ranked by estimates, decided by the simulator, then changed whole."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice

from partition.estimates.batch_split import share_out
from partition.estimates.family_effort import NEAR, NEARER, FamilyEffort, FamilyWalk
from partition.estimates.timed_pipeline import PipelineTiming, TimedPipeline
from partition.local_search.families import FamilySet, FamilySpace
from partition.local_search.family_cuts import FamilyCutter
from partition.local_search.family_moves import FamilyClimb
from partition.local_search.family_starts import FamilyStarts
from partition.local_search.family_walk import unlike, walked
from partition.local_search.moves import PipelineSet
from partition.local_search.pipeline_search import PipelineSearch
from partition.local_search.tuned_plans import more_in_flight
from partition.plan import Plan

MANY = 20  # unlike families, best first, of which walks begin at those of least estimate
FIRST = 2  # starts, of which one is the best by each of the two rankings
IN_FLIGHT_LEAD = 1.15  # times the best step: of none that is above it


def sync_share(search: PipelineSearch, step_s: float) -> float:
    """Return the seconds that a card takes to sum the whole model, as a share of a step.

    Not those of the sets that were found, which may be slow since they avoid sums.
    """
    space = FamilySpace(search)
    return space.model_bytes * max(space.card_s_per_byte.values()) / step_s


def families_may_win(search: PipelineSearch, step_s: float) -> bool:
    """Return whether sync takes much of the best step of single pipelines, so that families may win.

    Or some of it where that step is far above its clock. On clusters so large that no set walks, whether it
    is above the relaxed step. False before the search has found anything.
    """
    effort = search.effort
    if search.best is None or search.columns is None or not 0.0 < step_s < math.inf:
        return False
    if effort.search.walks is None:
        return step_s > effort.families.near * search.relaxed_s
    share = sync_share(search, step_s)
    if share >= effort.search.much_sync:
        return True
    return share >= effort.families.least_sync and step_s > (1 + effort.families.least_gap) * search.best


def best_families(
    search: PipelineSearch, simulate: Callable[[Plan], float], step_s: float
) -> list[PipelineSet]:
    """Return sets of families by the simulator, best first.

    step_s: of the best plan that is known; families far above it by their estimates are not simulated, those
    sure to be so not even cut, and those that are so by the simulator not changed further. Less is looked
    for where it is near the relaxed step, more where the best families are far from that. simulate: seconds
    of a plan's step.
    """
    effort = search.effort.families
    simulated = _Simulated(search, FamilyCutter(search, FamilySpace(search)), simulate)
    relaxed_s = search.relaxed_s if search.columns is not None else 0.0
    efforts = (effort, *effort.then)
    if effort.where_near is not None and step_s <= NEAR * relaxed_s:
        efforts = (effort.where_near, replace(effort, far=NEARER, more_in_flight=()), *effort.then)
    for turn, wider in enumerate(efforts):
        simulated.in_flight = wider.more_in_flight
        if min(step_s, simulated.least_s) <= wider.far * relaxed_s:
            continue
        if wider.uncharged:
            simulated.cutter.also_uncharged()
        starts = FamilyStarts(search, wider, wider.hopeless * step_s, simulated.cutter)
        if _simulate_starts(simulated, starts, wider, step_s) < wider.hopeless * step_s:
            _change_best(simulated, starts, wider, turn)
    return simulated.sets()


def _simulate_starts(
    simulated: "_Simulated", starts: FamilyStarts, effort: FamilyEffort, step_s: float
) -> float:
    """Simulate likely families, unless no estimate is near a step; return the best step that is known."""
    likely, best_s, in_vain = islice(starts.likely(), effort.simulated), simulated.least_s, 0
    first = list(islice(likely, FIRST))
    estimates = [starts.cutter.estimate_s(families, shared=False) for families in first]
    if min(estimates, default=math.inf) > effort.estimated_hopeless * step_s:
        return best_s
    simulated.ticks = 0.0
    for index, families in enumerate(chain(first, likely)):
        late = index >= effort.always_simulated and simulated.ticks > effort.most_start_ticks
        if late or in_vain == effort.most_starts_in_vain:
            break
        found_s = simulated.step_s(families, simulated.worth_s(effort))
        in_vain = 0 if found_s < best_s else in_vain + 1
        best_s = min(best_s, found_s)
    return best_s


def _change_best(
    simulated: "_Simulated", starts: FamilyStarts, effort: FamilyEffort, first_seed: int
) -> None:
    """Change the best families, at first unlike ones; each round has other random numbers."""
    simulated.ticks = 0.0
    climb = FamilyClimb(starts.cutter, simulated.step_s, effort, starts.floors)

    def goes_on() -> bool:
        return simulated.ticks < effort.most_climb_ticks

    for families in list(islice(simulated.unlike(), effort.smoothed)):
        simulated.step_s(climb.smoothed(families), simulated.worth_s(effort))
    for seed in range(first_seed, first_seed + effort.rounds):
        begun: Iterable[FamilySet] = simulated.unlike() if seed == first_seed else simulated.ranked()
        changed = [
            climb.changed(families, goes_on, seed)
            for families in list(islice(begun, effort.climbed))
            if simulated.known[families] <= effort.climb_hopeless * simulated.least_s
        ]
        for families, seen in sorted(changed, key=lambda one: simulated.step_s(one[0])):
            climb.settled(families, seen, goes_on, simulated.least_s)
    for walk in effort.walks:
        _walk(simulated, climb, walk, goes_on)
    simulated.ticks = 0.0
    for families in list(islice(simulated.unlike(), effort.cut_anew)):
        least_s = simulated.least_s
        if simulated.known[families] <= effort.climb_hopeless * least_s:
            again = climb.cut_anew(families, goes_on)
            if simulated.step_s(again) < least_s:
                climb.settled(again, {again}, goes_on)


def _walk(simulated: "_Simulated", climb: FamilyClimb, walk: FamilyWalk, goes_on: Callable[[], bool]) -> None:
    """Walk by estimates, and simulate what is best by these; the best of that is changed further.

    Walks begin at the families of least estimate: where these are best, the simulator has led there.
    """
    simulated.ticks = 0.0
    begun = sorted(islice(simulated.unlike(), MANY), key=climb.estimate_s)[: walk.starts]
    seen = walked(climb, begun, walk)
    likely = map(climb.smoothed, islice(unlike(sorted(seen, key=lambda one: seen[one])), walk.simulated))
    for families in sorted(likely, key=simulated.step_s)[: walk.settled]:
        climb.settled(families, {families}, goes_on)


@dataclass
class _Simulated:
    """Families and their simulated steps; counts the microbatches x stages of those that were asked for."""

    search: PipelineSearch
    cutter: FamilyCutter
    simulate: Callable[[Plan], float]

    def __post_init__(self) -> None:
        self.known: dict[FamilySet, float] = {}
        self.ticks = 0.0
        self.in_flight: tuple[int, ...] = ()  # more, of what is near the best
        self._alike: dict[object, float] = {}
        self._asked: dict[FamilySet, tuple[Sequence[TimedPipeline], Sequence[int]]] = {}

    @property
    def least_s(self) -> float:
        """The best step that is known; inf where none is."""
        return min(self.known.values(), default=math.inf)

    def step_s(self, families: FamilySet, within_s: float = math.inf) -> float:
        """Return the step of families; inf where they are no plan, or where it is sure to be longer."""
        if families in self.known:
            return self.known[families]
        pipelines = self.cutter.space.pipelines(families)
        if pipelines in self._alike:
            return self._alike[pipelines]
        if families not in self._asked:
            self._asked[families] = self._timed(families)
        timed, samples = self._asked[families]
        alike = dict.fromkeys((one.timing, count) for one, count in zip(timed, samples, strict=True))
        if any(_by_z_s(timing, count) > within_s for timing, count in alike):
            return math.inf
        plan = self.search.plan("families", timed) if timed else None
        if plan is not None and any(timing.least_s(count) > within_s for timing, count in alike if count):
            return math.inf
        self.known[families] = self._simulated_s(plan, timed) if plan is not None else math.inf
        self._alike[pipelines] = self.known[families]
        return self.known[families]

    def _simulated_s(self, plan: Plan, timed: Sequence[TimedPipeline]) -> float:
        """Return the step of a plan, or that with more in flight in front of messages between nodes.

        Clocks do not know that these wait for those of other copies. Where a few more are no better, still
        more hardly ever are.
        """
        best_s = self.simulate(plan)
        for number in self.in_flight if best_s <= IN_FLIGHT_LEAD * self.least_s else ():
            trial = more_in_flight(plan, timed, number)
            step_s = self.simulate(trial) if trial != plan else best_s
            if step_s >= best_s:
                break
            best_s = step_s
        return best_s

    def _timed(self, families: FamilySet) -> tuple[Sequence[TimedPipeline], Sequence[int]]:
        """Return the pipelines of families, with the samples of each; counts them as simulated."""
        timed = self.cutter.timed(families) or []
        seconds, samples = (
            share_out(timed, self.search.problem.global_batch_size) if timed else (math.inf, [])
        )
        if math.isinf(seconds):
            return [], []
        samples = self.search.wishes.samples(timed, samples)
        pairs = zip(timed, samples, strict=True)
        self.ticks += sum(-(-count // one.microbatch_size) * len(one.stages) for one, count in pairs)
        return timed, samples

    def worth_s(self, effort: FamilyEffort) -> float:
        """Return the step from which on another start would neither be best nor changed further."""
        best = sorted(self.known.values())[: effort.climbed]
        return min(best[-1], effort.climb_hopeless * best[0]) if len(best) == effort.climbed else math.inf

    def ranked(self) -> list[FamilySet]:
        """Return the families that are known, best first."""
        return sorted(self.known, key=lambda families: self.known[families])

    def unlike(self) -> Iterator[FamilySet]:
        """Give the starts, best first, but for those with copies of a chain that a better one has, too.

        One family and two are unlike in any case: what may be changed in the one is not in the other.
        """
        given = set[object]()
        for families in self.ranked():
            number = len(families)
            copies = {(number, family.outline.chain, family.outline.copies) for family in families}
            if not copies & given:
                given |= copies
                yield families

    def sets(self) -> list[PipelineSet]:
        """Return the sets that are plans, best first."""
        found = []
        for families, step_s in sorted(self.known.items(), key=lambda item: item[1]):
            timed = self.cutter.timed(families)
            if timed is not None and math.isfinite(step_s):
                found.append(PipelineSet(step_s, tuple(timed), "families"))
        return found


def _by_z_s(timing: PipelineTiming, num_samples: int) -> float:
    """Return seconds that no schedule of a pipeline's full microbatches undercuts."""
    whole = num_samples // timing.microbatch_size
    return timing.quick_s(whole) if whole else 0.0
