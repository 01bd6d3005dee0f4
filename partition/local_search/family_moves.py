"""Changes of families: each changes all copies of a chain at once."""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, combinations, permutations

from partition.estimates.device_classes import swapped
from partition.estimates.family_effort import FamilyEffort
from partition.local_search.families import Counts, Family, FamilySet, Outline
from partition.local_search.family_alignment import aligned, cut_at, cuts_near, descended
from partition.local_search.family_cuts import EstimatedSet, FamilyCutter
from partition.local_search.family_floors import FamilyFloors
from partition.local_search.family_starts import BUSY
from partition.local_search.moves import GAIN

MOVES = ("shift", "shift", "shift", "size", "place", "order", "drop", "add", "class", "fewer", "recut")
"""A layer from one stage to another; microbatch size; runs, grouped or nested; two stages swapped; a stage
less, more, or of another class; fewer copies; new cuts. As often as named."""
MORE_MOVES = (*MOVES, "align", "align", "double", "halve", "reverse", "beside", "without")
"""And: a cut to where another family has one; each stage twice, or half as often, in half or twice as many
copies; stages in reverse order; another family beside, or one less."""
MOST_FAMILIES = 3  # side by side
MOST_BESIDE = 4  # stages of another one, at first
NEAR = 1.05  # times the estimate of the best: families above it are not simulated in the end
FOLLOWED = 2  # changes that gain as much may follow one another
MOST_CUTS, CUTS_TRIED = 729, 12  # cuts near those of a set: estimated, and of these evaluated, at a time
EvaluateFamilies = Callable[[FamilySet, float], float]
"""Seconds of a step of families; inf where they are no plan, and maybe where it is above so many seconds."""


class FamilyClimb:
    """Hill climbing over sets of families, with a fixed number of tries and a fixed seed."""

    def __init__(
        self,
        cutter: FamilyCutter,
        evaluate: EvaluateFamilies,
        effort: FamilyEffort,
        floors: FamilyFloors | None = None,
    ) -> None:
        self._cutter, self._space, self._effort = cutter, cutter.space, effort
        self._evaluate, self._floors = evaluate, floors or FamilyFloors(cutter.search, cutter.space)

    def improve(self, families: FamilySet, goes_on: Callable[[], bool], seed: int = 0) -> FamilySet:
        """Return families that are no worse. goes_on: whether another set may be evaluated."""
        changed, seen = self.changed(families, goes_on, seed)
        return self.settled(changed, seen, goes_on)

    def changed(
        self, families: FamilySet, goes_on: Callable[[], bool], seed: int = 0
    ) -> tuple[FamilySet, set[FamilySet]]:
        """Return families after random changes, no worse, and all that were evaluated."""
        rng, best, best_s = random.Random(seed), families, self._evaluate(families, math.inf)
        seen, in_vain, tries = {families}, 0, 0
        for _ in range(self._effort.most_changes):
            if tries == self._effort.climb_tries or in_vain == self._effort.most_in_vain or not goes_on():
                break
            trial = self.at_random(best, rng, MOVES)
            if trial is None or trial in seen:
                continue
            seen.add(trial)
            tries += 1
            in_vain += 1
            most_s = best_s * (1 - GAIN)
            step_s = self._evaluate(trial, most_s)
            if step_s < most_s:
                best, best_s, in_vain = trial, step_s, 0
        return best, seen

    def estimate_s(self, families: FamilySet, within_s: float = math.inf) -> float:
        """Return the estimated step on unshared links; inf where it is sure to be above within_s."""
        return self._cutter.estimate_s(families, shared=False, within_s=within_s)

    def smoothed(self, families: FamilySet) -> FamilySet:
        """Return families with layers moved between stages, one by one, while their estimate gets shorter."""
        begin = EstimatedSet(self.estimate_s(families), families)
        return descended(begin, _shifted_by_one, self.estimate_s).families

    def at_random(self, families: FamilySet, rng: random.Random, moves: Sequence[str]) -> FamilySet | None:
        """Return the families with one of them changed; None where the change leads nowhere."""
        at, shared, move = rng.randrange(len(families)), rng.random() < 0.5, rng.choice(moves)
        if move == "without":
            return (*families[:at], *families[at + 1 :]) or None
        if move in ("shift", "align"):
            changed = _cut_at_random(families, at, move, rng)
        else:
            if move == "beside":
                at = len(families)
                outline = self._another(families, rng)
            else:
                moved = self._moved(families[at].outline, move, rng)
                outline = self._fitted(families, at, moved) if moved is not None else None
            before = self._before(families, at)
            cut = self._cutter.cut(outline, before, shared=shared) if outline is not None else None
            changed = cut.families[0] if cut is not None else None
        return (*families[:at], changed, *families[at + 1 :]) if changed is not None else None

    def settled(
        self,
        best: FamilySet,
        seen: set[FamilySet],
        goes_on: Callable[[], bool],
        least_s: float = math.inf,
    ) -> FamilySet:
        """Return families that none one change away betters, of those that are estimated as near.

        Those that keep their cuts are tried where no other is better: sooner they lead astray.

        least_s: of the best step that is known; families above it are left as they are where none that is
        near seems to be better than that: by its estimate, or by what that gains of their own, FOLLOWED
        times.
        """
        best_s, own_s = self._evaluate(best, math.inf), self.estimate_s(best)
        trials, last = self._near(best, seen), False
        if best_s > least_s and trials:
            near_s = self.estimate_s(trials[0])
            if min(near_s, best_s * min(1.0, near_s / own_s) ** FOLLOWED) >= least_s:
                return best
        while goes_on() and (trials or not last):
            if not trials:
                trials, last = self._near(best, seen, cut_alike=True), True
                continue
            trial, most_s = trials.pop(0), best_s * (1 - GAIN)
            seen.add(trial)
            step_s = self._evaluate(trial, most_s)
            if step_s < most_s:
                best, best_s, trials, last = trial, step_s, self._near(trial, seen), False
        return best

    def cut_anew(self, families: FamilySet, goes_on: Callable[[], bool]) -> FamilySet:
        """Return families that no cuts near theirs better, of the few of least estimate.

        Several cuts move at once: where stages sum on cards that send activations, too, moving any one of
        them makes another card the busiest.
        """
        best, best_s, seen, changed = families, self._evaluate(families, math.inf), {families}, True
        while changed and goes_on():
            most_s, found, changed = NEAR * self.estimate_s(best), dict[FamilySet, float](), False
            for at in range(len(best)):
                for family in cuts_near(best[at], MOST_CUTS // len(best)):
                    trial = (*best[:at], family, *best[at + 1 :])
                    if trial not in seen and (step_s := self.estimate_s(trial, most_s)) <= most_s:
                        found[trial] = step_s
            for trial in sorted(found, key=lambda it: found[it])[:CUTS_TRIED]:
                least_s = best_s * (1 - GAIN)
                seen.add(trial)
                if goes_on() and (step_s := self._evaluate(trial, least_s)) < least_s:
                    best, best_s, changed = trial, step_s, True
        return best

    def _near(self, families: FamilySet, seen: set[FamilySet], *, cut_alike: bool = False) -> list[FamilySet]:
        """Return families one change away that were not seen, least estimate first, as far as it is near."""
        own_s = self.estimate_s(families)
        most_s, busy = NEAR * own_s, self._cutter.cards_busy(EstimatedSet(own_s, families)) >= BUSY
        found = dict[FamilySet, float]()
        for at in range(len(families)):
            new = chain(_all_shifted(families[at]), self._recut(families, at, most_s, busy))
            for changed in self._cut_alike(families[at]) if cut_alike else new:
                trial = (*families[:at], changed, *families[at + 1 :])
                if trial not in seen and trial not in found:
                    found[trial] = self.estimate_s(trial, most_s)
        return [trial for trial in sorted(found, key=lambda it: found[it]) if found[trial] <= most_s]

    def _cut_alike(self, family: Family) -> Iterator[Family]:
        """Give a family with its cuts in microbatches of another size, or with two of its stages swapped.

        New cuts for these may be others, and worse: they are charged sums as if no stage waited for another.
        """
        old = family.outline
        for size in self._space.problem.microbatch_sizes:
            if size != old.microbatch_size:
                yield family._replace(outline=old._replace(microbatch_size=size))
        swaps = (swapped(old.chain, *pair) for pair in combinations(range(len(old.chain)), 2))
        for swap in dict.fromkeys(swaps):
            if swap != old.chain:
                yield family._replace(outline=old._replace(chain=swap))

    def _recut(self, families: FamilySet, at: int, most_s: float, busy: bool) -> Iterator[Family]:
        """Give what each other outline of one of the families leads to, unless it is sure to be too long.

        busy: whether messages keep a card so busy that cuts for shared links are asked for, too.
        """
        before, share = self._before(families, at), self._cutter.least_share(families, at, most_s)
        alone_s = most_s if len(families) == 1 else math.inf
        for outline in self._outlines_near(families[at].outline):
            fitted = self._fitted(families, at, outline)
            if fitted is None or share * self._floors.floor_s(fitted, before) > most_s:
                continue
            for shared in (False, True) if busy else (False,):
                cut = self._cutter.cut(
                    fitted, before, shared=shared, within_s=math.inf if shared else alone_s
                )
                if cut is not None:
                    yield cut.families[0]

    def _outlines_near(self, old: Outline) -> Iterator[Outline]:
        """Give outlines one change away: all that `MOVES` speaks of but new cuts."""
        places, classes = range(len(old.chain)), range(len(self._space.counts))
        sizes = self._space.problem.microbatch_sizes
        yield from (old._replace(microbatch_size=size) for size in sizes if size != old.microbatch_size)
        runs = {1, 2, 4, max(map(old.chain.count, old.chain))} - {old.run}
        yield from (old._replace(run=run) for run in sorted(runs))
        yield from (old._replace(copies=copies) for copies in sorted({old.copies - 1, old.copies // 2} - {0}))
        chains = [swapped(old.chain, *pair) for pair in combinations(places, 2)]
        for place in places:
            before, after = old.chain[:place], old.chain[place + 1 :]
            chains += [(*before, *after), *((*before, c, *after) for c in classes)]
            chains += [(*before, c, *old.chain[place:]) for c in classes]
        chains += [(*old.chain, c) for c in classes]
        yield from (old._replace(chain=chain) for chain in dict.fromkeys(chains) if chain != old.chain)

    def _before(self, families: FamilySet, at: int) -> Counts:
        """Return the devices of each class that the families before one have."""
        before = (0,) * len(self._space.counts)
        for family in families[:at]:
            before = self._space.after(before, family)
        return before

    def _another(self, families: FamilySet, rng: random.Random) -> Outline | None:
        """Return the outline of another family on devices that are left; None where there are none."""
        counts, taken = self._space.counts, self._before(families, len(families))
        free = [count - used for count, used in zip(counts, taken, strict=True)]
        left = [c for c, number in enumerate(free) if number]
        if not left or len(families) == MOST_FAMILIES:
            return None
        most = min(MOST_BESIDE, self._space.problem.profile.num_layers)
        order = tuple(sorted(rng.choices(left, k=rng.randint(1, most)), reverse=rng.random() < 0.5))
        room = self._space.room(tuple(map(order.count, range(len(free)))), free, families)
        size = rng.choice(self._space.problem.microbatch_sizes)
        return Outline(order, room, size, rng.choice((1, 2))) if room else None

    def _fitted(self, families: FamilySet, at: int, outline: Outline) -> Outline | None:
        """Return the outline for one of the families; with most copies where its classes change."""
        old, problem = families[at].outline, self._space.problem
        if not 0 < len(outline.chain) <= problem.profile.num_layers:
            return None
        others, taken = (*families[:at], *families[at + 1 :]), (0,) * len(self._space.counts)
        for family in others:
            taken = self._space.after(taken, family)
        free = [count - used for count, used in zip(self._space.counts, taken, strict=True)]
        room = self._space.room(tuple(map(outline.chain.count, range(len(free)))), free, others)
        if len(outline.chain) != len(old.chain) or sorted(outline.chain) != sorted(old.chain):
            outline = outline._replace(copies=room)
        return outline if 0 < outline.copies <= room else None

    def _moved(self, old: Outline, move: str, rng: random.Random) -> Outline | None:
        chain, copies = old.chain, old.copies
        place, c = rng.randrange(len(chain)), rng.randrange(len(self._space.counts))
        if move == "size":
            return old._replace(microbatch_size=rng.choice(self._space.problem.microbatch_sizes))
        if move == "place":
            longest = max(map(chain.count, chain))
            return old._replace(run=rng.choice([run for run in (1, 2, 4, longest) if run != old.run]))
        if move == "order" and len(set(chain)) > 1:
            return old._replace(chain=swapped(chain, place, rng.randrange(len(chain))))
        if move == "drop" and len(chain) > 1:
            return old._replace(chain=chain[:place] + chain[place + 1 :])
        if move == "add":
            return old._replace(chain=(*chain[:place], c, *chain[place:]))
        if move == "class":
            return old._replace(chain=(*chain[:place], c, *chain[place + 1 :]))
        if move == "double":
            return old._replace(chain=tuple(c for c in chain for _ in range(2)))
        if move == "halve" and chain[::2] == chain[1::2]:
            return old._replace(chain=chain[::2])
        if move == "reverse":
            return old._replace(chain=chain[::-1])
        if move == "fewer" and copies > 1:
            return old._replace(copies=rng.choice((copies - 1, copies - 1, max(1, copies // 2))))
        return old if move == "recut" else None


def _cut_at_random(families: FamilySet, at: int, move: str, rng: random.Random) -> Family | None:
    """Return one of families with a cut moved, to where another family has one if asked to ("align")."""
    family = families[at]
    if move == "align":
        options = list(aligned(families, at))
        return rng.choice(options) if options else None
    stages = range(len(family.cuts))
    return _shifted(family, *rng.sample(stages, 2)) if len(stages) > 1 else None


def _shifted_by_one(families: FamilySet, at: int) -> Iterator[Family]:
    """Give one of families with one layer in a stage next to its own."""
    return _all_shifted(families[at], most_apart=1)


def _all_shifted(family: Family, most_apart: int | None = None) -> Iterator[Family]:
    """Give a family with one layer in another stage, in all ways. most_apart: of the two stages."""
    for less, more in permutations(range(len(family.cuts)), 2):
        if most_apart is not None and abs(less - more) > most_apart:
            continue
        if (changed := _shifted(family, less, more)) is not None:
            yield changed


def _shifted(family: Family, less: int, more: int) -> Family | None:
    """Return a family with a layer less in one stage and one more in another; None where that is empty.

    All cuts between the two move by one layer: where stages are as busy, no single cut that moves helps.
    """
    by = 1 if more < less else -1
    first, last = min(less, more), max(less, more)
    starts = [start + by * (first < place <= last) for place, (start, *_) in enumerate(family.cuts)]
    changed = cut_at(family, starts)
    start, stop, _ = changed.cuts[less]
    return changed if start < stop else None
