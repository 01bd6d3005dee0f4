"""The families that a search begins with, likely ones first; those that cannot be likely are not cut."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from heapq import heapify, heappop, heappush
from itertools import chain, islice, zip_longest

from partition.estimates.device_classes import ClassOrder
from partition.estimates.family_effort import FamilyEffort
from partition.local_search.families import Counts, Family, FamilySet, FamilySpace, Outline
from partition.local_search.family_alignment import with_aligned_cuts
from partition.local_search.family_cuts import EstimatedSet, FamilyCutter
from partition.local_search.family_floors import FamilyFloors
from partition.local_search.starts import SearchSpace

WITH_REST = 0.8  # of what idle devices could do, as counted where families are ranked that leave some over
ROUGH, SHARP, MADE = range(3)  # what a group is in the queue with: a floor, a higher one, a set
BUSY = (
    0.25  # share of a step for which a card carries messages, from which on copies get into each other's way
)
NEAR = 1.1  # times the best estimate: a family of another microbatch size is kept too


@dataclass
class _Group:
    """Sets of families that are made together, once one of them may be next.

    rough_s, floor_s: no estimate of theirs is below; the second one is asked for where the first one is not
    enough. used: share of the cluster's speed in their devices. sums_s: what sums would take at least, as
    counted where families are ranked, were there other pipelines beside.
    """

    rough_s: float
    floor_s: Callable[[], float]
    make: Callable[[], Iterable[EstimatedSet]]
    used: float = 1.0
    sums_s: float = 0.0

    @cached_property
    def sets(self) -> list[EstimatedSet]:
        """Return what is made."""
        return list(self.make())

    def with_rest_s(self, made: EstimatedSet) -> float:
        """Return the step of a set if all other devices did their part in as long."""
        return self.used * (made.step_s - made.sums_s) + max(made.sums_s, self.sums_s)


def in_order(
    groups: Sequence[_Group], *, with_rest: bool = False, within_s: float = math.inf
) -> Iterator[EstimatedSet]:
    """Give the sets of groups by their estimates, as a stable sort does, up to within_s.

    with_rest: by their estimates if other devices did their part; within_s is for those without sums then.
    """
    shares = [group.used if with_rest else 1.0 for group in groups]
    queue = [
        (share * group.rough_s, ROUGH, at, 0)
        for at, (group, share) in enumerate(zip(groups, shares, strict=True))
    ]
    heapify(queue)
    while queue:
        floor_s, state, at, place = heappop(queue)
        if floor_s > within_s and not (with_rest and state == MADE):
            continue
        group, share = groups[at], shares[at]
        if state == MADE:
            yield group.sets[place]
        elif state == ROUGH:
            heappush(queue, (max(floor_s, share * group.floor_s()), SHARP, at, 0))
        else:
            for place, entry in enumerate(group.sets):
                step_s = group.with_rest_s(entry) if with_rest else entry.step_s
                heappush(queue, (step_s, MADE, at, place))


class FamilyStarts:
    """The families that a search begins with; owns what cuts them, and their floors.

    within_s: none is given of which an estimate above that is certain, and hardly any of them is cut.
    cutter: one that has cut families before.
    """

    def __init__(
        self,
        search: SearchSpace,
        effort: FamilyEffort,
        within_s: float = math.inf,
        cutter: FamilyCutter | None = None,
    ) -> None:
        self._effort, self._within_s = effort, within_s
        self.cutter = cutter or FamilyCutter(search, FamilySpace(search))
        self._space = self.cutter.space
        self.floors = FamilyFloors(search, self._space)

    def likely(self) -> Iterator[FamilySet]:
        """Give sets of families, likely ones first, by clocks on unshared links.

        And in turn by those on links that are shared, where the messages of the likeliest keep cards busy.
        """
        chosen = self._vectors()
        alone = self._ranked(chosen, shared=False)
        rankings = [alone]
        if (first := next(alone, None)) is not None:
            rankings = [chain([first], alone)]
            if self.cutter.cards_busy(first) >= BUSY:
                rankings.insert(0, self._ranked(chosen, shared=True))
        turns = (pair for pairs in zip_longest(*rankings) for pair in pairs if pair is not None)
        given = set[object]()
        for families in (estimated.families for estimated in turns):
            alike = self._space.pipelines(families)
            if alike not in given and self._space.as_many_as_wished(families):
                given.add(alike)
                yield families

    def _ranked(self, chosen: Sequence[tuple[Counts, int]], *, shared: bool) -> Iterator[EstimatedSet]:
        """Give the families of vectors, and the best with a second family beside, least estimate first."""
        none, within_s = (0,) * len(self._space.counts), self._within_s
        alone = [
            group
            for vector, copies in chosen
            for group in self._of(vector, copies, none, shared, within_s / self._used(vector, copies))
        ]
        first = list(islice(in_order(alone, with_rest=True, within_s=within_s), self._effort.second))
        both = [self._pair(*pair, shared) for pair in self._pairs(first)]
        return in_order([*alone, *both], within_s=within_s)

    def _used(self, vector: Counts, copies: int) -> float:
        """Return the share of the cluster's speed in so many copies of a chain."""
        return self._space.rate(tuple(copies * m for m in vector)) / self._space.rate(self._space.counts)

    def _vectors(self) -> list[tuple[Counts, int]]:
        """Return (devices of each class, copies) by closed forms: alone, and with others on what is left."""
        space, effort = self._space, self._effort
        alone: list[tuple[float, Counts, int]] = []
        mixed: list[tuple[float, Counts, int]] = []
        for vector in space.vectors(space.counts, effort.most_stages, effort.most_vectors):
            most = space.room(vector, space.counts)
            for copies in sorted(space.copies(vector, most, effort.parts_of_room)) if most else ():
                used = tuple(copies * m for m in vector)
                rest = space.rate([count - u for count, u in zip(space.counts, used, strict=True)])
                alone.append((space.quick_s(vector, copies), vector, copies))
                if rest > 0:
                    mixed.append((space.quick_s(vector, copies, WITH_REST * rest), vector, copies))
        ranked = sorted(alone)[: effort.kept] + sorted(mixed)[: effort.kept_with_rest]
        return list(dict.fromkeys((vector, copies) for _, vector, copies in ranked))

    def _of(self, vector: Counts, copies: int, taken: Counts, shared: bool, within_s: float) -> list[_Group]:
        """Return, for each of its runs, the best family of a vector, and a near one of another size.

        All sizes of microbatches are cut for the first order of classes, the two best for the others; none
        whose floor is above within_s.
        """
        problem = self._space.problem
        sizes = [s for s in problem.microbatch_sizes if s <= max(1, problem.global_batch_size // copies)]
        sizes = sizes or list(problem.microbatch_sizes[:1])
        orders, floors = self._space.orders(vector), self.floors
        runs = sorted(self._space.runs(vector, copies))
        rough_s = min(floors.rough_s(order, copies, size) for order in orders for size in sizes)
        used = self._used(vector, copies)

        def group(run: int) -> _Group:
            outlines = [Outline(order, copies, size, run) for order in orders for size in sizes]
            return _Group(
                rough_s,
                lambda: min(floors.floor_s(outline, taken) for outline in outlines),
                lambda: self._best(orders, sizes, outlines[0], taken, shared, within_s),
                used,
                self._space.sums_s(vector, copies, run, others=True),
            )

        # of runs that put a chain on the same nodes the longest charges sums in more ways
        layouts = {run: self._space.layout(Outline(orders[0], copies, 1, run), taken) for run in runs}
        nodes = {self._space.nodes_of(layout).tobytes(): run for run, layout in layouts.items()}
        return [group(run) for run in nodes.values()]

    def _best(
        self,
        orders: Sequence[ClassOrder],
        sizes: Sequence[int],
        outline: Outline,
        taken: Counts,
        shared: bool,
        most_s: float,
    ) -> list[EstimatedSet]:
        """Return the best family of some orders of classes and sizes, and a near one of another size.

        most_s: none is cut whose floor is above that.
        """
        of_size: dict[int, EstimatedSet] = {}

        def cut(order: ClassOrder, size: int, within_s: float) -> None:
            """Keep the best of each size: no other is given."""
            own = outline._replace(chain=order, microbatch_size=size)
            if self.floors.floor_s(own, taken) > min(within_s, most_s):
                return
            found = self.cutter.cut(own, taken, shared=shared, within_s=within_s)
            if found is not None and (size not in of_size or found.step_s < of_size[size].step_s):
                of_size[size] = found

        def floor_s(size: int) -> float:
            return self.floors.floor_s(outline._replace(microbatch_size=size), taken)

        rising = sorted(sizes, key=floor_s)
        for size in rising:
            known = sorted(map(_seconds, of_size.values()))
            cut(orders[0], size, known[1] if len(known) > 1 else math.inf)
        others = rising[:2] if math.isfinite(most_s) else sizes[:1]
        near = sorted(of_size, key=lambda size: (of_size[size].step_s, size))[:2] or others
        for order in orders[1:]:
            for size in near:
                best_s = min(map(_seconds, of_size.values()), default=math.inf)
                own_s = of_size[size].step_s if size in of_size else math.inf
                cut(order, size, min(own_s, NEAR * best_s))
        best = sorted(of_size.values(), key=lambda one: (one.step_s, _size(one)))[:2]
        return [one for one in best if one is best[0] or one.step_s < NEAR * best[0].step_s]

    def _pairs(self, first: Sequence[EstimatedSet]) -> list[tuple[Family, Counts, int]]:
        """Return families with a vector and copies on the devices that each leaves; those likely to be short.

        By the closed form of the second one, where the first does what its estimate says; the same devices
        twice count once. And the families of least estimate, each with the second one that does most.
        """
        space, batch = self._space, self._space.problem.global_batch_size
        pairs: dict[frozenset[tuple[Counts, int]], tuple[float, Family, Counts, int]] = {}
        beside = [self._beside(family) for one in first for family in one.families]
        for one, options in zip(first, beside, strict=True):
            (family,) = one.families
            copies = family.outline.copies
            own = tuple(used // copies for used in family.uses(len(space.counts)))
            rate = batch / (one.step_s - one.sums_s)
            sums_s = space.sums_s(own, copies, family.outline.run, others=True)
            for vector, others in options:
                step_s = space.quick_s(vector, others, rate, sums_s)
                devices = frozenset({(own, copies), (vector, others)})
                if devices not in pairs or step_s < pairs[devices][0]:
                    pairs[devices] = step_s, family, vector, others
        likely = sorted(pairs.values(), key=lambda pair: pair[0])[: self._effort.pairs]
        chosen = [(family, vector, copies) for _, family, vector, copies in likely]
        ranked = sorted(zip(first, beside, strict=True), key=lambda pair: pair[0].step_s)
        for one, options in ranked[: self._effort.filled]:
            chosen += [(family, *option) for family in one.families for option in options[:1]]
        return list(dict.fromkeys(chosen))

    def _beside(self, family: Family) -> list[tuple[Counts, int]]:
        """Return vectors and copies that would be fastest on the devices that a family leaves."""
        space, effort = self._space, self._effort
        used = family.uses(len(space.counts))
        left = tuple(count - u for count, u in zip(space.counts, used, strict=True))
        options = []
        for vector in space.vectors(left, effort.most_stages, effort.most_vectors):
            if copies := space.room(vector, left, (family,)):
                options.append((-copies * space.rate(vector) / (1 + 0.02 * sum(vector)), vector, copies))
        return [(vector, copies) for _, vector, copies in sorted(options)[: effort.second_options]]

    def _pair(self, family: Family, vector: Counts, copies: int, shared: bool) -> _Group:
        """Return a family with others of a vector beside it."""
        used = family.uses(len(self._space.counts))
        rough_s = self.floors.of_both_s(family.outline, vector, copies)
        floor_s = partial(self.floors.of_batch_s, family.outline, vector, copies)
        return _Group(rough_s, floor_s, partial(self._both, family, vector, copies, used, shared))

    def _both(
        self, family: Family, vector: Counts, copies: int, used: Counts, shared: bool
    ) -> Iterator[EstimatedSet]:
        """Give a family with the first two families of a vector on devices that it leaves."""
        most_s = self.floors.most_beside_s(family.outline, self._within_s)
        groups = self._of(vector, copies, used, shared, most_s)
        seconds = (second for group in groups for second in group.sets)
        for second in islice(seconds, 2):
            families = (family, *second.families)
            estimate_s = partial(self.cutter.estimate_s, shared=shared)
            made = EstimatedSet(estimate_s(families), families)
            if self._effort.aligned:
                made = with_aligned_cuts(made, estimate_s)
            if math.isfinite(made.step_s):
                yield made


def _seconds(estimated: EstimatedSet) -> float:
    return estimated.step_s


def _size(estimated: EstimatedSet) -> int:
    return estimated.families[0].outline.microbatch_size
