"""Price every pipeline over classes of devices by brute force."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache, cached_property
from itertools import combinations, pairwise, permutations, product

from cost_model.memory import StageShape, device_memory, segment_choices
from partition.estimates.class_pipeline import ColumnStage
from partition.estimates.device_classes import equal_devices
from partition.estimates.stage_tables import ProblemTables
from partition.problem import Problem
from random_plans import tight_case
from random_problems import random_problem

MOST = 40  # in flight that brute force tries


def small_problem(seed: int) -> Problem:
    """At most three devices and five layers, with a backward through all of them."""
    while True:
        problem = random_problem(seed) if seed % 2 else tight_case(seed, num_plans=4)[0]
        profile = problem.profile
        if len(problem.cluster.devices) <= 3 and profile.num_layers <= 5 and profile.first_trained == 0:
            return problem
        seed += 10_000


class BruteForce:
    """Z of every pipeline over classes of devices, from the prices and bytes of single stages.

    Z = max over stages of (the way of the first forward there and of the last backward back, and then all
    samples of the stage with its optimizer step and the time it must wait, or the round trips that memory
    asks for one after the other).
    """

    def __init__(self, problem: Problem, size: int, num_samples: int) -> None:
        self.problem, self.size = problem, size
        self.tables = ProblemTables(problem, equal_devices(problem.cluster))
        self.full, self.rest = divmod(num_samples, size)
        self.last = self.rest or size
        self.first = size if self.full else self.last
        self.num_microbatches = self.full + (self.rest > 0)
        self.seconds, self.cap, self.hop = (cache(f) for f in (self._seconds, self._cap, self._hop))

    def _seconds(self, stage: ColumnStage, samples: int) -> tuple[float, float]:
        device, prices = self.tables.classes.members[stage.class_index][0], self.tables.prices
        layers = stage.start, stage.stop
        return (
            prices.forward_s(device, *layers, samples),
            prices.backward_s(device, *layers, samples, recompute=stage.recompute),
        )

    def _cap(self, stage: ColumnStage) -> int:
        """Return the most in flight that memory takes; all may fit where as many would not."""
        usable = self.tables.classes.members[stage.class_index][0].usable_bytes

        def fits(in_flight: int, num_microbatches: int | None) -> bool:
            shape = StageShape(
                stage.start, stage.stop, in_flight, self.first, stage.recompute, num_microbatches
            )
            choices = segment_choices(stage.stop - stage.start) if stage.recompute else (0,)
            shapes = [shape._replace(segment_layers=each) for each in choices]
            profile = self.problem.profile.on(self.tables.classes.members[stage.class_index][0].kind)
            needs = [device_memory(profile, [shape]).total_bytes for shape in shapes]
            return min(needs) <= usable * (1 + 1e-9)

        most = max((flight for flight in range(1, MOST) if fits(flight, None)), default=0)
        return max(most, self.num_microbatches if fits(self.num_microbatches, self.num_microbatches) else 0)

    def _hop(self, one: int, other: int, layer: int, there: int, back: int) -> float:
        """Return the seconds of the best channel each way; inf where there is none."""
        ends = (self.tables.classes.members[index][0] for index in (one, other))
        giver, taker = ends
        num_bytes = [
            self.tables.prices.boundary_bytes(layer, samples, giver, taker) for samples in (there, back)
        ]
        pairs, route = self.tables.classes.channels(one, other), self.tables.network.route
        out = (route(a.name, b.name).link.transfer_s(num_bytes[0]) for a, b in pairs)
        home = (route(b.name, a.name).link.transfer_s(num_bytes[1]) for a, b in pairs)
        return min(out, default=math.inf) + min(home, default=math.inf)

    def z_s(self, stages: Sequence[ColumnStage]) -> float:
        z = trip = 0.0
        for index in reversed(range(len(stages))):
            stage, after = stages[index], stages[index + 1 :][:1]
            if self.cap(stage) < 1:
                return math.inf
            link = [self.hop(stage.class_index, s.class_index, s.start, self.first, self.last) for s in after]
            hop = [self.hop(stage.class_index, s.class_index, s.start, self.first, self.first) for s in after]
            z, trip = self._with(stage, sum(link) + z, sum(hop) + trip)
        return z

    def step_s(self, stages: Sequence[ColumnStage]) -> float:
        """Return Z or, if longer, that of the full microbatches and a smaller one's backward behind them."""
        if not (self.full and self.rest):
            return self.z_s(stages)
        first, device = stages[0], self.tables.classes.members[stages[0].class_index][0]
        behind_s = self.tables.prices.backward_s(device, first.start, first.stop, self.rest)
        return max(self.z_s(stages), self.without_last.z_s(stages) + behind_s)

    @cached_property
    def without_last(self) -> "BruteForce":
        return BruteForce(self.problem, self.size, self.full * self.size)

    def gaps(self, stage: ColumnStage) -> list[float]:
        """Return round trips from which on a stage waits for its first backward; if all full, its last."""
        first, last, count = (
            self.seconds(stage, self.first),
            self.seconds(stage, self.last),
            self.num_microbatches,
        )
        if count == 1:
            return [sum(first)]
        warm = first[1] + min(self.cap(stage), count) * max(first[0], last[0])
        cool = first[0] + self.cap(stage) * first[1]
        return [warm, cool] if self.cap(stage) < count and not self.rest else [warm]

    def turns(self, stage: ColumnStage) -> tuple[float, float]:
        """Return round trips one after the other, and what comes on top: more passes, the optimizer."""
        optimizer_s = float(self.tables.optimizer_s[stage.class_index, stage.start, stage.stop])
        if not self.full:
            return 1 / self.cap(stage), optimizer_s
        at_once = min(self.cap(stage), self.full)
        turns = math.ceil(self.full / at_once)
        more = self.full - (turns - 1) * at_once - 1
        return turns, more * max(self.seconds(stage, self.first)) + optimizer_s

    def pipelines(self, counts: Sequence[int]) -> Iterator[tuple[ColumnStage, ...]]:
        """Yield all pipelines on exactly so many devices of each class."""
        entries = [entry for entry, count in enumerate(counts) for _ in range(count)]
        layers = self.tables.num_layers
        if not 0 < len(entries) <= layers:
            return
        for order in set(permutations(entries)):
            for cuts in combinations(range(1, layers), len(order) - 1):
                spans = list(pairwise((0, *cuts, layers)))
                for flags in product((False, True), repeat=len(order)):
                    stages = zip(order, spans, flags, strict=True)
                    yield tuple(ColumnStage(entry, *span, flag) for entry, span, flag in stages)

    def least_s(self, counts: Sequence[int]) -> float:
        """Return the least Z of all pipelines on exactly so many devices of each class."""
        return min(map(self.z_s, self.pipelines(counts)), default=math.inf)

    def least_step_s(self, counts: Sequence[int]) -> float:
        """Return the least `step_s` of all pipelines on exactly so many devices of each class."""
        return min(map(self.step_s, self.pipelines(counts)), default=math.inf)

    def merged_s(self, counts: Sequence[int]) -> float:
        """Return the least Z of so many devices with one label per state, as `count_dp` has it.

        A recursion over single stages, of double precision and from nothing else than `z_s` is from: label
        (Z, W) of a suffix by its devices, the class of its first stage and its first layer, the least of each
        on its own.
        """
        layers = self.tables.num_layers

        @cache
        def label(left: tuple[int, ...], entry: int, start: int) -> tuple[float, float]:
            after = (*left[:entry], left[entry] - 1, *left[entry + 1 :])
            z = trip = math.inf
            for stop, recompute in product(range(start + 1, layers + 1), (False, True)):
                stage = ColumnStage(entry, start, stop, recompute)
                beyond = self._after(label, after, stage) if self.cap(stage) >= 1 else (math.inf, 0.0)
                if beyond[0] < math.inf:
                    one = self._with(stage, *beyond)
                    z, trip = min(z, one[0]), min(trip, one[1])
            return z, trip

        firsts = [entry for entry, count in enumerate(counts) if count]
        return min((label(tuple(counts), entry, 0)[0] for entry in firsts), default=math.inf)

    def _after(
        self, label: Callable[..., tuple[float, float]], left: tuple[int, ...], stage: ColumnStage
    ) -> tuple[float, float]:
        """Return the least Z and round trip of what may follow a stage, its link included."""
        if not any(left) or stage.stop == self.tables.num_layers:
            done = not any(left) and stage.stop == self.tables.num_layers
            return (0.0 if done else math.inf), 0.0
        z = trip = math.inf
        for entry, count in enumerate(left):
            if count:
                seconds, around = label(left, entry, stage.stop)
                seconds += self.hop(stage.class_index, entry, stage.stop, self.first, self.last)
                if seconds < math.inf:
                    z = min(z, seconds)
                    trip = min(
                        trip, around + self.hop(stage.class_index, entry, stage.stop, self.first, self.first)
                    )
        return z, trip

    def _with(self, stage: ColumnStage, z: float, trip: float) -> tuple[float, float]:
        """Return Z and round trip with a stage in front."""
        first, last = self.seconds(stage, self.first), self.seconds(stage, self.last)
        total = self.full * sum(first) + (sum(last) if self.rest else 0.0)
        total += float(self.tables.optimizer_s[stage.class_index, stage.start, stage.stop])
        trip += sum(first)
        stall = sum(max(0.0, trip - least) for least in self.gaps(stage))
        turns, beyond_s = self.turns(stage)
        return max(total + stall, turns * trip + beyond_s, first[0] + last[1] + z), trip
