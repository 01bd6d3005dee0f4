"""Changes of families: each changes all copies of a chain at once."""

import math
import random
from collections.abc import Callable
from dataclasses import replace

from partition.estimates.effort import FamilyEffort
from partition.local_search.families import Family, FamilySet, Outline
from partition.local_search.family_cuts import FamilyCutter
from partition.local_search.moves import GAIN

MOVES = ("shift", "shift", "shift", "size", "place", "order", "drop", "add", "class", "fewer", "recut")
"""A layer from one stage to another; microbatch size; runs, grouped or nested; two stages swapped; a stage
less, more, or of another class; fewer copies; new cuts. As often as named."""
EvaluateFamilies = Callable[[FamilySet, float], float]
"""Seconds of a step of families; inf where they are no plan, and maybe where it is above so many seconds."""


class FamilyClimb:
    """Hill climbing over sets of families, with a fixed number of tries and a fixed seed."""

    def __init__(self, cutter: FamilyCutter, evaluate: EvaluateFamilies, effort: FamilyEffort) -> None:
        self._cutter, self._space, self._effort = cutter, cutter.space, effort
        self._evaluate = evaluate

    def improve(self, families: FamilySet, goes_on: Callable[[], bool], seed: int = 0) -> FamilySet:
        """Return families that are no worse. goes_on: whether another set may be evaluated."""
        rng, best, best_s = random.Random(seed), families, self._evaluate(families, math.inf)
        seen, in_vain, tries = {families}, 0, 0
        for _ in range(self._effort.most_changes):
            if tries == self._effort.climb_tries or in_vain == self._effort.most_in_vain or not goes_on():
                break
            trial = self._changed(best, rng)
            if trial is None or trial in seen:
                continue
            seen.add(trial)
            tries += 1
            in_vain += 1
            most_s = best_s * (1 - GAIN)
            step_s = self._evaluate(trial, most_s)
            if step_s < most_s:
                best, best_s, in_vain = trial, step_s, 0
        return best

    def _changed(self, families: FamilySet, rng: random.Random) -> FamilySet | None:
        """Return the families with one of them changed; None where the change leads nowhere."""
        at, shared, move = rng.randrange(len(families)), rng.random() < 0.5, rng.choice(MOVES)
        if move == "shift":
            changed = _shifted(families[at], rng)
        else:
            outline = self._outline(families, at, move, rng)
            before = (0,) * len(self._space.counts)
            for family in families[:at]:
                before = self._space.after(before, family)
            cut = self._cutter.cut(outline, before, shared=shared) if outline is not None else None
            changed = cut.families[0] if cut is not None else None
        return (*families[:at], changed, *families[at + 1 :]) if changed is not None else None

    def _outline(self, families: FamilySet, at: int, move: str, rng: random.Random) -> Outline | None:
        """Return a family's outline after a move; with as many copies as possible if its classes change."""
        old = families[at].outline
        outline = self._moved(old, move, rng)
        problem = self._space.problem
        if outline is None or not 0 < len(outline.chain) <= problem.profile.num_layers:
            return None
        others, taken = (*families[:at], *families[at + 1 :]), (0,) * len(self._space.counts)
        for family in others:
            taken = self._space.after(taken, family)
        free = [count - used for count, used in zip(self._space.counts, taken, strict=True)]
        room = self._space.room(tuple(map(outline.chain.count, range(len(free)))), free, others)
        if len(outline.chain) != len(old.chain) or sorted(outline.chain) != sorted(old.chain):
            outline = replace(outline, copies=room)
        return outline if 0 < outline.copies <= room else None

    def _moved(self, old: Outline, move: str, rng: random.Random) -> Outline | None:
        chain, copies = old.chain, old.copies
        place, c = rng.randrange(len(chain)), rng.randrange(len(self._space.counts))
        if move == "size":
            return replace(old, microbatch_size=rng.choice(self._space.problem.microbatch_sizes))
        if move == "place":
            longest = max(map(chain.count, chain))
            return replace(old, run=rng.choice([run for run in (1, 2, 4, longest) if run != old.run]))
        if move == "order" and len(set(chain)) > 1:
            swapped, other = list(chain), rng.randrange(len(chain))
            swapped[place], swapped[other] = swapped[other], swapped[place]
            return replace(old, chain=tuple(swapped))
        if move == "drop" and len(chain) > 1:
            return replace(old, chain=chain[:place] + chain[place + 1 :])
        if move == "add":
            return replace(old, chain=(*chain[:place], c, *chain[place:]))
        if move == "class":
            return replace(old, chain=(*chain[:place], c, *chain[place + 1 :]))
        if move == "fewer" and copies > 1:
            return replace(old, copies=rng.choice((copies - 1, copies - 1, max(1, copies // 2))))
        return old if move == "recut" else None


def _shifted(family: Family, rng: random.Random) -> Family | None:
    """Return a family with a layer more in one stage and one less in another; None where that is empty.

    All cuts between the two move by one layer: where stages are as busy, no single cut that moves helps.
    """
    if len(family.cuts) == 1:
        return None
    less, more = rng.sample(range(len(family.cuts)), 2)
    by = 1 if more < less else -1
    starts = [
        start + by * (min(less, more) < place <= max(less, more))
        for place, (start, *_) in enumerate(family.cuts)
    ]
    stops = [*starts[1:], family.cuts[-1][1]]
    if stops[less] <= starts[less]:
        return None
    again = (recompute for *_, recompute in family.cuts)
    return replace(family, cuts=tuple(zip(starts, stops, again, strict=True)))
