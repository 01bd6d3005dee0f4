"""Cuts of families at the same layers: sums of those on either side then keep none of the others waiting.

And how changes by estimates follow one another until none is shorter.
"""

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import combinations_with_replacement, pairwise, product
from typing import Protocol

from partition.local_search.families import Family, FamilySet
from partition.local_search.family_cuts import EstimatedSet
from partition.local_search.moves import GAIN

MOST_APART = 6  # layers by which a cut moves at most


class EstimateSeconds(Protocol):
    """Gives the estimated step of families; inf where that is sure to be above within_s."""

    def __call__(self, families: FamilySet, /, *, within_s: float) -> float: ...


def with_aligned_cuts(begin: EstimatedSet, estimate_s: EstimateSeconds) -> EstimatedSet:
    """Return families with cuts moved to where others have one, while that shortens their estimate."""
    return descended(begin, aligned, estimate_s)


def descended(
    begin: EstimatedSet, changes: Callable[[FamilySet, int], Iterator[Family]], estimate_s: EstimateSeconds
) -> EstimatedSet:
    """Return families after the change that shortens their estimate most, and the next, while one does.

    changes: gives one of families (by its place) as it may become.
    """
    best, best_s = begin.families, begin.step_s
    while True:
        least_s, least = best_s * (1 - GAIN), best
        for at in range(len(best)):
            for changed in changes(best, at):
                trial = (*best[:at], changed, *best[at + 1 :])
                step_s = estimate_s(trial, within_s=least_s)
                if step_s < least_s:
                    least_s, least = step_s, trial
        if least is best:
            return EstimatedSet(best_s, best)
        best, best_s = least, least_s


def aligned(families: FamilySet, at: int) -> Iterator[Family]:
    """Give one of families with one cut moved to where another has one, so that no layer is between them.

    Nodes with a layer of both sides sum them one after another, and keep the others waiting.
    """
    family = families[at]
    own = [start for start, *_ in family.cuts[1:]]
    others = {start for place, other in enumerate(families) if place != at for start, *_ in other.cuts[1:]}
    for wanted in sorted(others - set(own)):
        below = [place for place, start in enumerate(own) if start < wanted][-1:]
        above = [place for place, start in enumerate(own) if start > wanted][:1]
        for place in (*below, *above):
            yield cut_at(family, [0, *own[:place], wanted, *own[place + 1 :]])


def cut_at(family: Family, starts: Sequence[int]) -> Family:
    """Return a family whose stages begin with other layers, and recompute as before."""
    stops = [*starts[1:], family.cuts[-1][1]]
    again = (recompute for *_, recompute in family.cuts)
    return family._replace(cuts=tuple(zip(starts, stops, again, strict=True)))


def cuts_near(family: Family, most: int) -> Iterator[Family]:
    """Give a family with other cuts near its own: all that are as near as so many allow.

    Of so many stages that they do not allow one layer either way for each cut, two cuts move at most.
    """
    own, end = [start for start, *_ in family.cuts[1:]], family.cuts[-1][1]
    by = next((by for by in range(MOST_APART, 0, -1) if (2 * by + 1) ** len(own) <= most), 0)
    moves: Iterable[tuple[int, ...]] = product(range(-by, by + 1), repeat=len(own))
    if by == 0:
        moves = dict.fromkeys(_pairs_moved(len(own)))
    for moved in moves:
        starts = [0, *map(operator.add, own, moved)]
        if starts[1:] != own and all(one < other for one, other in pairwise([*starts, end])):
            yield cut_at(family, starts)


def _pairs_moved(number: int) -> Iterator[tuple[int, ...]]:
    """Give by how much each of so many cuts moves where two of them move by one, or one alone."""
    for places in combinations_with_replacement(range(number), 2):
        for signs in product((-1, 1), repeat=2):
            moved = [0] * number
            for place, sign in zip(places, signs, strict=True):
                moved[place] = sign
            yield tuple(moved)
