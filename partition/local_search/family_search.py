"""The best families of a problem: ranked by estimates, decided by the simulator, then changed whole."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from partition.estimates.effort import FamilyEffort
from partition.local_search.families import Counts, FamilySet, FamilySpace, Outline
from partition.local_search.family_cuts import EstimatedSet, FamilyCutter
from partition.local_search.family_moves import FamilyClimb
from partition.local_search.moves import PipelineSet
from partition.local_search.pipeline_search import PipelineSearch
from partition.plan import Plan

WITH_REST = 0.8  # of what idle devices could do, as counted where families are ranked that leave some over
FIRST = 2  # starts, of which one is the best by each of the two rankings
NEAR = 1.1  # times the best estimate: a family of another microbatch size is kept too


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
    effort, columns = search.effort, search.columns
    if search.best is None or columns is None or not 0.0 < step_s < math.inf:
        return False
    if effort.search.walks is None:
        return step_s > effort.families.near * columns.step_s
    share = sync_share(search, step_s)
    if share >= effort.search.much_sync:
        return True
    return share >= effort.families.least_sync and step_s > (1 + effort.families.least_gap) * search.best


def best_families(
    search: PipelineSearch, simulate: Callable[[Plan], float], step_s: float
) -> list[PipelineSet]:
    """Return sets of families by the simulator, best first.

    step_s: of the best plan that is known; families far above it by their estimates are not simulated, and
    those that are so by the simulator not changed further. simulate: seconds of a plan's step.
    """
    effort = search.effort.families
    starts = FamilyStarts(search, effort)
    simulated = _Simulated(search, starts.cutter, simulate)
    likely, best_s, in_vain = starts.all()[: effort.simulated], math.inf, 0
    estimates = [starts.cutter.estimate_s(families, shared=False) for families in likely[:FIRST]]
    if min(estimates, default=math.inf) > effort.estimated_hopeless * step_s:
        return []
    for index, families in enumerate(likely):
        late = index >= effort.always_simulated and simulated.ticks > effort.most_start_ticks
        if late or in_vain == effort.most_starts_in_vain:
            break
        in_vain = 0 if simulated.step_s(families) < best_s else in_vain + 1
        best_s = min(best_s, simulated.step_s(families))
    if best_s < effort.hopeless * step_s:
        simulated.ticks = 0.0
        climb = FamilyClimb(starts.cutter, simulated.step_s, effort)
        for families in sorted(simulated.known, key=lambda it: simulated.known[it])[: effort.climbed]:
            if simulated.known[families] <= effort.climb_hopeless * best_s:
                climb.improve(families, lambda: simulated.ticks < effort.most_climb_ticks)
    return simulated.sets()


class FamilyStarts:
    """The families that a search begins with; owns what cuts them."""

    def __init__(self, search: PipelineSearch, effort: FamilyEffort) -> None:
        self._space, self._effort = FamilySpace(search), effort
        self.cutter = FamilyCutter(search, self._space)

    def all(self) -> list[FamilySet]:
        """Return sets of families, likely ones first, by clocks on shared and on unshared links in turn."""
        chosen = self._vectors()
        rankings = [self._ranked(chosen, shared) for shared in (True, False)]
        turns = (pair for pairs in zip_longest(*rankings) for pair in pairs if pair is not None)
        found = dict.fromkeys(estimated.families for estimated in turns)
        return [families for families in found if self._space.as_many_as_wished(families)]

    def _vectors(self) -> list[tuple[Counts, int]]:
        """Return (devices of each class, copies) by closed forms: alone, and with others on what is left."""
        space, effort = self._space, self._effort
        alone: list[tuple[float, Counts, int]] = []
        mixed: list[tuple[float, Counts, int]] = []
        for vector in space.vectors(space.counts, effort.most_stages, effort.most_vectors):
            most = space.room(vector, space.counts)
            for copies in sorted({most, max(1, most // 2)}) if most else ():
                used = tuple(copies * m for m in vector)
                rest = space.rate([count - u for count, u in zip(space.counts, used, strict=True)])
                alone.append((space.quick_s(vector, copies), vector, copies))
                if rest > 0:
                    mixed.append((space.quick_s(vector, copies, WITH_REST * rest), vector, copies))
        ranked = sorted(alone)[: effort.kept] + sorted(mixed)[: effort.kept_with_rest]
        return list(dict.fromkeys((vector, copies) for _, vector, copies in ranked))

    def _ranked(self, chosen: Sequence[tuple[Counts, int]], shared: bool) -> list[EstimatedSet]:
        """Return the families of vectors, and the best with a second family beside, least estimate first."""
        none = (0,) * len(self._space.counts)
        alone = [best for vector, copies in chosen for best in self._of(vector, copies, none, shared)]
        alone.sort(key=_order)
        first = sorted(alone, key=self._with_rest_s)[: self._effort.second]
        both = [two for one in first for two in self._with_second(one, shared)]
        return sorted([*alone, *both], key=_order)

    def _of(self, vector: Counts, copies: int, taken: Counts, shared: bool) -> Iterator[EstimatedSet]:
        """Give the best family of a vector in each of its runs, and a near one of another microbatch size.

        All sizes are cut for the first order of classes, the two best for the others.
        """
        problem = self._space.problem
        sizes = [s for s in problem.microbatch_sizes if s <= max(1, problem.global_batch_size // copies)]
        first, *others = self._space.orders(vector)
        for run in self._space.runs(vector, copies):
            outlines = [Outline(first, copies, size, run) for size in sizes or problem.microbatch_sizes[:1]]
            options = self._cut(outlines, taken, shared)
            near = [_size(option) for option in sorted(options, key=_order)[:2]] or sizes[:1]
            outlines = [Outline(order, copies, size, run) for order in others for size in near]
            options = sorted([*options, *self._cut(outlines, taken, shared)], key=_order)
            if options:
                best = options[0]
                yield best
                yield from [
                    option
                    for option in options
                    if _size(option) != _size(best) and option.step_s < NEAR * best.step_s
                ][:1]

    def _cut(self, outlines: Sequence[Outline], taken: Counts, shared: bool) -> list[EstimatedSet]:
        cut = (self.cutter.cut(outline, taken, shared=shared) for outline in outlines)
        return [estimated for estimated in cut if estimated is not None]

    def _with_rest_s(self, estimated: EstimatedSet) -> float:
        """Return the estimate as if devices that are left over took their part of the samples."""
        space = self._space
        rate = space.rate(estimated.families[0].uses(len(space.counts)))
        return estimated.step_s * rate / space.rate(space.counts)

    def _with_second(self, first: EstimatedSet, shared: bool) -> Iterator[EstimatedSet]:
        """Give a family with a second one on the devices that it leaves."""
        space, effort = self._space, self._effort
        (family,) = first.families
        used = family.uses(len(space.counts))
        left = tuple(count - u for count, u in zip(space.counts, used, strict=True))
        if not any(left):
            return
        options = []
        for vector in space.vectors(left, effort.most_stages, effort.most_vectors):
            copies = space.room(vector, left, first.families)
            if not copies:
                continue
            options.append((-copies * space.rate(vector) / (1 + 0.02 * sum(vector)), vector, copies))
        for _, vector, copies in sorted(options)[: effort.second_options]:
            for second in list(self._of(vector, copies, used, shared))[:2]:
                families = (family, *second.families)
                step_s = self.cutter.estimate_s(families, shared=shared)
                if math.isfinite(step_s):
                    yield EstimatedSet(step_s, families)


@dataclass
class _Simulated:
    """Families and their simulated steps; counts the microbatches x stages that were simulated."""

    search: PipelineSearch
    cutter: FamilyCutter
    simulate: Callable[[Plan], float]

    def __post_init__(self) -> None:
        self.known: dict[FamilySet, float] = {}
        self.ticks = 0.0

    def step_s(self, families: FamilySet) -> float:
        """Return the step of families; inf where they are no plan."""
        if families not in self.known:
            timed = self.cutter.timed(families)
            plan = self.search.plan("families", timed) if timed is not None else None
            if plan is not None:
                self.ticks += sum(
                    pipeline.num_microbatches * len(pipeline.stages) for pipeline in plan.pipelines
                )
            self.known[families] = self.simulate(plan) if plan is not None else math.inf
        return self.known[families]

    def sets(self) -> list[PipelineSet]:
        """Return the sets that are plans, best first."""
        found = []
        for families, step_s in sorted(self.known.items(), key=lambda item: item[1]):
            timed = self.cutter.timed(families)
            if timed is not None and math.isfinite(step_s):
                found.append(PipelineSet(step_s, tuple(timed), "families"))
        return found


def _order(estimated: EstimatedSet) -> float:
    return estimated.step_s


def _size(estimated: EstimatedSet) -> int:
    return estimated.families[0].outline.microbatch_size
