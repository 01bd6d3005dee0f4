"""The best split of a cluster into pipelines, from the least makespan of one pipeline per count vector.

It gives the plan's pipelines and the integer bound together: no plan in which each device serves one stage of
one pipeline is faster than `bound_s`.
"""

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from partition.column_generation.master_problem import NO_LIMITS, Limits
from partition.estimates.amounts import Amount
from partition.estimates.arrays import Floats, Places
from partition.estimates.class_pipeline import ClassPipeline
from partition.estimates.stage_tables import ProblemTables
from partition.exact.cluster_split_lp import CompiledVectors, MixedVectors, WholeVectors, num_parts
from partition.exact.count_dp import CountProgramme
from partition.exact.count_vectors import CountVectors

MOST_PARTS, MOST_COMPILED = 6_000_000, 30_000_000  # pairs of a vector and one below it
SAFETY = 1e-7  # relative: a floating-point tie must not prove a false bound
ROUNDS = 100
GROWTH = 1.6  # of microbatches between amounts of the first grid
NEAR = 1.01  # times the step that is asked about: how long single amounts are followed
MOST_LAYERS = 400  # of its tables, whose memory grows as their square: 1 GiB there
SLIGHTLY = 1 + 3e-4  # times a bound: the step of whose pipelines more is asked
SIDE_BY_SIDE, MOST_STATES = 12, 12_000_000  # of amounts, and of vectors, classes and layers times those

Family = tuple[int, int, int]
"""(microbatch size, least and most samples of the last microbatch)."""


@dataclass(slots=True)
class ClusterSplit:
    """Owns the table of least makespans Z and refines it where the bound is decided.

    Within a family Z grows no faster than in proportion to the samples, and never falls: so what is known at
    two amounts bounds what a step can hold in between. ceiling_s: the time of a plan that is known.

    for_bound: only for `bound_s`, which takes amounts together that end in a smaller microbatch or not, and
    single microbatches, until it needs them one by one.
    growth: of microbatches between amounts of the first grid. limits: that a
    split has to keep, but for those of devices.
    """

    tables: ProblemTables
    ceiling_s: float
    for_bound: bool = False
    growth: float = GROWTH
    limits: Limits = NO_LIMITS
    vectors: CountVectors = field(init=False)
    parts: WholeVectors | CompiledVectors | MixedVectors = field(init=False)
    least: dict[Family, dict[int, Floats]] = field(default_factory=dict)
    exact: dict[tuple[int, int], Floats] = field(default_factory=dict)
    asked_s: dict[tuple[int, int], float] = field(default_factory=dict)  # up to which these are known
    programmes: dict[tuple[Family, int], tuple[CountProgramme, int]] = field(default_factory=dict)
    amount_s: float = 0.0  # that an amount took last time

    def __post_init__(self) -> None:
        self.vectors = CountVectors(self.tables.classes.counts)
        most, whole = (MOST_COMPILED, CompiledVectors) if self.for_bound else (MOST_PARTS, WholeVectors)
        many = num_parts(self.vectors.counts) > most
        self.parts = (MixedVectors if many else whole)(self.vectors, self.limits.most_pipelines)
        batch = self.tables.problem.global_batch_size
        sizes = [size for size in self.tables.problem.microbatch_sizes if size <= batch]
        wanted: dict[Family, Sequence[int]] = {family: [0] for family in self._singles(sizes)}
        for size in sizes:
            grid = _grid(batch // size, self.growth)
            if self.for_bound and size > 1:
                few = [0] if self.growth > GROWTH else grid  # as many amounts again where there is time
                wanted |= {(size, 1, size): grid, (size, size, size): few}
            else:
                wanted |= dict.fromkeys(families(size), grid)
        self.add(wanted)

    @staticmethod
    def work(tables: ProblemTables, growth: float = GROWTH) -> float:
        """Return about how many candidates the first grid for a bound looks at; inf for too many layers."""
        if tables.num_layers > MOST_LAYERS:
            return math.inf
        counts, problem = tables.classes.counts, tables.problem
        vectors = math.prod(count + 1 for count in counts)
        size = tables.at(min(problem.microbatch_sizes))
        stages = (size.caps(recompute=False) >= 1) | (size.caps(recompute=True) >= 1)
        each = sum(
            vectors * count / (count + 1) * int(stages[index].sum()) for index, count in enumerate(counts)
        )
        grids = sum(
            len(_grid(max(1, problem.global_batch_size // size), growth)) for size in problem.microbatch_sizes
        )
        return 2.0 * grids * each

    def _singles(self, sizes: Sequence[int]) -> list[Family]:
        """Return families of single microbatches of as many samples as no size of the problem has."""
        batch, largest = self.tables.problem.global_batch_size, max(self.tables.problem.microbatch_sizes)
        ends = (0, *sizes, *([batch + 1] if largest > batch else []))
        gaps = [(below + 1, above - 1) for below, above in pairwise(ends) if above - below > 1]
        if self.for_bound:
            return [(most, least, most) for least, most in gaps]
        return [(one, one, one) for least, most in gaps for one in range(least, most + 1)]

    def add(self, wanted: Mapping[Family, Iterable[int]]) -> None:
        """Work out the least makespans for more microbatches; 0 for a single one of least to most samples."""
        begin_s, new, asked = time.process_time(), [], []
        for family, counts in wanted.items():
            known = self.least.setdefault(family, {})
            every = sorted({*counts, *known})
            for below, count in pairwise([0, *every] if every[0] else [0, 0]):
                if count not in known:
                    new.append((family, count))
                    asked.append((family[0], _amount(family, count, below)))
        for index, programme, which in self._programmes(asked, self._most_s * GROWTH):
            family, count = new[index]
            self.least[family][count] = programme.least_s()[which]
            if not self.for_bound:
                self.programmes[family, count] = (programme, which)
        if asked:
            self.amount_s = (time.process_time() - begin_s) / len(asked)

    @property
    def _most_s(self) -> float:
        return self.ceiling_s * (1 + SAFETY)

    def add_exact(self, wanted: Sequence[tuple[int, int]], ceiling_s: float) -> None:
        """Work out single amounts, as (microbatch size, samples); longer ones are at least ceiling_s.

        The nearer the ceiling is, the fewer suffixes there are that take their round trip from others.
        """
        amounts = [
            (key, amount)
            for key in wanted
            for amount in (Amount.exact(key[1], key[0]), Amount.before_last(key[1], key[0]))
            if amount is not None
        ]
        asked = [(size, amount) for (size, _), amount in amounts]
        for index, programme, which in self._programmes(asked, ceiling_s):
            key, least_s = amounts[index][0], np.minimum(programme.least_s()[which], ceiling_s)
            self.exact[key] = np.maximum(least_s, self.exact.get(key, 0.0))
        self.asked_s |= dict.fromkeys(wanted, ceiling_s)

    def _programmes(
        self, asked: Sequence[tuple[int, Amount]], ceiling_s: float
    ) -> Iterator[tuple[int, CountProgramme, int]]:
        """Yield (index, programme, which of its amounts); makespans up to a ceiling are kept."""
        states = self.vectors.size * len(self.vectors.counts) * (self.tables.num_layers + 1)
        side_by_side = max(1, min(SIDE_BY_SIDE, MOST_STATES // states))
        for first in range(0, len(asked), side_by_side):
            part = asked[first : first + side_by_side]
            programme = CountProgramme(
                self.tables,
                self.vectors,
                part,
                ceiling_s,
                compiled=self.for_bound,
            )
            yield from ((first + which, programme, which) for which in range(len(part)))

    def _done(self, step_s: float, *, upper: bool) -> dict[Family, Places]:
        """Return by family and vector the samples that one pipeline does in a step.

        upper: no less than any can do, else the amounts that were worked out.
        """
        limit = step_s * (1 + SAFETY)
        done = {
            family: self._family_done(family, rows, limit, upper=upper) for family, rows in self.least.items()
        }
        if upper:  # the full microbatches in front of a smaller one take as long without it
            for family in [one for one in done if one[1] < one[0] and 0 not in self.least[one]]:
                size, _, most = family
                if not self._all_full(size):
                    continue
                top = np.minimum(done[family], done[size, size, size] + min(most, size - 1))
                done[family] = self._ruled_out(_ending(top, family), family, limit)
        return done

    def _all_full(self, size: int) -> bool:
        """Return whether amounts of full microbatches are known, not a single one alone."""
        return 0 not in self.least.get((size, size, size), (0,))

    def _family_done(self, family: Family, rows: dict[int, Floats], step_s: float, *, upper: bool) -> Places:
        batch, (size, least, most) = self.tables.problem.global_batch_size, family
        counts = sorted(rows)
        table = np.stack([rows[count] for count in counts])
        fits = table <= step_s
        reach = np.where(fits.any(axis=0), len(counts) - 1 - fits[::-1].argmax(axis=0), -1)
        if counts == [0]:
            return np.where(reach >= 0, most, 0)
        samples = np.array([size * count for count in counts])
        if not upper:
            return np.append(samples, 0)[reach]
        after = np.minimum(reach + 1, len(counts) - 1)
        beyond = np.where(np.isfinite(table), table, self.ceiling_s * GROWTH)
        next_s = np.take_along_axis(beyond, after[None], axis=0)[0]
        scaled = samples[after] * np.minimum(1.0, step_s / np.maximum(next_s, 1e-300))
        top = np.where(reach == len(counts) - 1, batch, np.floor(scaled + 1e-6))
        top = np.where(reach < 0, 0, np.maximum(top, np.append(samples, 0)[reach]))
        top = np.minimum(top, batch).astype(np.int64)
        if least == size:
            return self._ruled_out(top // size * size, family, step_s)
        return self._ruled_out(_ending(top, family), family, step_s)

    def _ruled_out(self, top: Places, family: Family, step_s: float) -> Places:
        """Return the amounts lowered past those that are known, exactly, to take longer than the step."""
        known = {samples: least_s for (size, samples), least_s in self.exact.items() if size == family[0]}
        changed = bool(known)
        while changed:
            changed = False
            for samples in np.unique(top):
                if samples in known:
                    late = (top == samples) & (known[samples] > step_s)
                    if late.any():
                        top = np.where(late, _ending(top - 1, family), top)
                        changed = True
        return top

    def split(self, step_s: float, *, upper: bool) -> tuple[float, list[tuple[int, Family, int]]]:
        """Return (samples done, pipelines as (vector, family, samples)) of the best split of all devices.

        With too many vectors for whole pipelines parts of them count too: no fewer samples are done.
        """
        by_family = self._done(step_s, upper=upper)
        one = np.max(list(by_family.values()), axis=0)
        done, used = self._best(one)
        pipelines = []
        for vector in used:
            family = max(by_family, key=lambda one: (by_family[one][vector], -one[0]))
            if one[vector]:
                pipelines.append((vector, family, int(one[vector])))
        return done, pipelines

    def _best(self, one: Places) -> tuple[float, list[int]]:
        """Return (samples, vectors) of the best split, none where it cannot meet what limits demand."""
        if not self.limits.demanding:
            return self.parts.best(one)
        needed = list(self.limits.needed)
        demands = self.vectors.digits[:, needed].sum(axis=1) + (self.limits.fewest_pipelines > 0)
        much = (self.tables.problem.global_batch_size + 1) * sum(self.vectors.counts)
        done, used = self.parts.best(np.where(one > 0, one + much * demands, 0))
        met = sum(int(demands[vector]) for vector in used)
        if met < len(needed) + self.limits.fewest_pipelines:
            return 0.0, []
        return done - much * met, used

    def least_step_s(self, *, upper: bool, low_s: float, tolerance: float = 2e-4) -> float:
        """Return the least step in which a split does the batch, from below; at most the ceiling."""
        batch = self.tables.problem.global_batch_size
        low, high = low_s, self.ceiling_s
        if self.split(low, upper=upper)[0] >= batch:
            return low
        reach = tolerance
        while low > 0 and low * (1 + reach) < high:  # most often it is near
            trial, reach = low * (1 + reach), 2 * reach
            if self.split(trial, upper=upper)[0] >= batch:
                high = trial
            else:
                low = trial
        while high > low * (1 + tolerance):
            middle = (low * high) ** 0.5 if low > 0 else high / 2
            if self.split(middle, upper=upper)[0] >= batch:
                high = middle
            else:
                low = middle
        return low

    def bound_s(self, low_s: float, end_s: float = math.inf) -> float:
        """Return a step that no plan of disjoint pipelines beats, amounts refined where the bound is decided.

        end_s: on the clock of CPU seconds; no round but the first begins after it, nor one that would take
        longer with its amounts, at the pace of others.
        """
        bound = low_s
        for turn in range(ROUNDS):
            if turn and time.process_time() > end_s:
                break
            bound = max(bound, self.least_step_s(upper=True, low_s=bound))
            if bound >= self.ceiling_s * (1 - 2e-3):
                break
            trial = bound * SLIGHTLY
            _, pipelines = self.split(trial, upper=True)
            if not self._refine(pipelines, trial, end_s):
                break
        return bound

    def _refine(
        self, pipelines: Sequence[tuple[int, Family, int]], step_s: float, end_s: float = math.inf
    ) -> bool:
        """Work out the amounts that a bound's pipelines claim; return False if all are known or time's up."""
        wanted: dict[Family, set[int]] = {}
        exact: list[tuple[int, int]] = []
        divided: dict[Family, list[Family]] = {}
        for family, samples in dict.fromkeys((family, samples) for _, family, samples in pipelines):
            (size, least, most), known = family, self.least[family]
            if 0 in known:
                if least < most:
                    divided[family] = [(one, one, one) for one in range(least, most + 1)]
                continue
            count = -(-samples // size)
            near = {count, samples // size} - {0}
            below = max([0, *(k for k in known if k < count)])
            near |= {(below + count + 1) // 2} if count - below > 2 else set()
            full = {samples // size} - {0}
            if least < size and self._all_full(size) and full - self.least[size, size, size].keys():
                wanted.setdefault((size, size, size), set()).update(full)
            if near - known.keys():
                wanted.setdefault(family, set()).update(near)
            elif least == 1 and most == size > 1:
                divided[family] = families(size)
                wanted.setdefault(family, set()).update(near)
            elif self.asked_s.get((size, samples), 0.0) < min(self._most_s, step_s * SLIGHTLY):
                exact.append((size, samples))
        for family, parts in divided.items():
            counts = wanted.pop(family, {0})
            if 0 not in counts:
                counts |= {*_grid(self.tables.problem.global_batch_size // family[0], self.growth)}
            for part in parts:
                wanted[part] = set(counts)
        many = sum(map(len, wanted.values())) + sum(2 if samples % size else 1 for size, samples in exact)
        if time.process_time() + many * self.amount_s > end_s:
            return False
        for family in divided:
            del self.least[family]
            if not self._all_full(family[0]):
                self.least.pop((family[0],) * 3, None)  # a single microbatch as large as the others
        self.add(wanted)
        self.add_exact(exact, min(self._most_s, step_s * NEAR))
        return bool(wanted or exact)

    def pipelines(self, step_s: float) -> list[ClassPipeline]:
        """Return the pipelines of the best split in a step, on classes of devices."""
        found = []
        for vector, family, samples in self.split(step_s, upper=False)[1]:
            count = 0 if 0 in self.least[family] else samples // family[0]
            programme, which = self.programmes[family, count]
            stages = programme.stages(which, vector)
            if stages:
                found.append(ClassPipeline(min(family[0], samples), samples, stages))
        return found


def families(size: int) -> list[Family]:
    """Return how the last microbatch may end: as large as the others, or smaller, in two groups."""
    found = [(size, size, size)]
    if size > 1:
        half = max(1, size // 2)
        found += [(size, half, size - 1)] + ([(size, 1, half - 1)] if half > 1 else [])
    return found


def _ending(samples: Places, family: Family) -> Places:
    """Return the largest amounts, not above these, whose last microbatch is as small as the family's."""
    size, least, most = family
    rest = samples % size
    lowered = np.where(rest < least, samples - rest - size + most, samples - np.maximum(rest - most, 0))
    return np.where(lowered > size - (least == size), lowered, 0)


def _amount(family: Family, count: int, below: int) -> Amount:
    """Return an amount of a family's microbatches, 0 for a single one of least to most.

    below: the next smaller number known.

    With a smaller last microbatch only floor(samples / size) of them are full. To hold in proportion for all
    amounts since the one below, Little's law counts what is full there, in proportion.
    """
    size, least, most = family
    if not count:
        return Amount(0, least, most, 1.0)
    since = max(1, below)
    passes = float(count) if least == size else count * since / (since + most / size)
    return Amount(count, least, most, passes, below=below)


def _grid(most: int, growth: float) -> list[int]:
    """Return numbers of microbatches, ever further apart."""
    counts, count = [], 1
    while count < most:
        counts.append(count)
        count = max(count + 1, int(count * growth))
    return [*counts, max(1, most)]
