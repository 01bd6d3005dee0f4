"""Walks among families by their estimates, of which ten to two hundred take as long as one simulation.

Threshold accepting (Dueck and Scheuer, Journal of Computational Physics, 1990): a change is taken where it is
worse by less than a threshold that falls to nothing. Families that no single change leads to without a longer
step on the way are found so, and others at which a climb would end are left again.
"""

import random
from collections.abc import Iterable, Iterator, Sequence

from partition.estimates.family_effort import FamilyWalk
from partition.local_search.families import FamilySet
from partition.local_search.family_moves import MORE_MOVES, MOVES, FamilyClimb

LEAD_NOWHERE = 4  # times the tries: changes at most, of which some are none


def walked(climb: FamilyClimb, begun: Sequence[FamilySet], walk: FamilyWalk) -> dict[FamilySet, float]:
    """Return the families that walks from some others came to, with their estimates."""
    seen = {families: climb.estimate_s(families) for families in begun}
    for seed, families in enumerate(begun):
        rng, tries = random.Random(seed), 0
        for _ in range(LEAD_NOWHERE * walk.tries):
            if tries == walk.tries:
                break
            trial = climb.at_random(families, rng, MORE_MOVES if walk.more_moves else MOVES)
            if trial is None:
                continue
            within_s = seen[families] * (1 + walk.threshold * (1 - tries / walk.tries))
            tries += 1
            step_s = seen[trial] if trial in seen else climb.estimate_s(trial, within_s)
            if step_s < within_s:
                families, seen[trial] = trial, step_s
    return seen


def unlike(ranked: Iterable[FamilySet]) -> Iterator[FamilySet]:
    """Give families, but for those with the chains and copies of one before."""
    given = set[object]()
    for families in ranked:
        outlines = sorted((family.outline.chain, family.outline.copies) for family in families)
        if tuple(outlines) not in given:
            given.add(tuple(outlines))
            yield families
