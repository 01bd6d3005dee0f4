"""Plans of any number of pipelines, each device serving one stage of one of them, best clocks first."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import permutations

from cost_model.cluster import Device
from partition.column_generation.column_generation import ROUNDS, Columns, generate
from partition.column_generation.pipeline_pool import PipelinePool
from partition.column_generation.rounding import rounded
from partition.estimates.batch_split import share_out
from partition.estimates.class_pipeline import ClassPipeline
from partition.estimates.device_classes import DeviceClasses, equal_devices
from partition.estimates.network_cards import CardLoad
from partition.estimates.pipeline_costs import PipelineCosts
from partition.estimates.stage_tables import ProblemTables
from partition.estimates.timed_pipeline import TimedPipeline, TimingCache
from partition.exact.cluster_split import ClusterSplit
from partition.exact.cut_dp import CutOptimizer
from partition.local_search.moves import Found, Judge, LocalSearch, fitted
from partition.local_search.placement import place
from partition.local_search.threshold_accepting import HOPELESS, WORSE, settled, walked
from partition.plan import Plan
from partition.problem import Problem

MOST_COUNTS = 300  # count vectors up to which the exact programme is a start of the search
SMALL = 16  # devices up to which a search near the relaxed step is a short one
LARGE = 128  # devices beyond which nothing walks
FEW = 8  # devices up to which the simulator always has the last word on small changes
STARTS = 3
JUDGED_CHAINS = 4
ALL_ORDERS = 4  # devices up to which every order of every subset is tried
CHAIN_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 64)
TRIES, LEAST_TRIES = 30, 20
MUCH_SYNC = 0.1  # of the step: from here on fewer pipelines are tried too, and longer walks
CLOSE = 1.015  # to what the relaxed programme promises
WALK, MOST_WALKS, PATIENCE = 400, 30, 3  # tries of a walk, walks, and those in a row that may find nothing
LEAST_GAIN = 1e-3  # relative: less is nothing
SHORT_WALK, MUCH_GAIN = 120, 2e-2  # instead, of `SMALL` devices that are so close and sync little


class PipelineSearch:
    """Owns the arrays of a problem and the timings of the pipelines found so far."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.costs = PipelineCosts(problem)
        self.classes = equal_devices(problem.cluster)
        self.tables = ProblemTables(problem, self.classes)
        self.timings = TimingCache(self.costs)
        self.cut_optimizer = CutOptimizer(self.tables, self.timings)
        self.seen = PipelinePool(self.timings, self.classes.merged(), problem.global_batch_size)
        self.load = CardLoad(self.costs)
        self.columns: Columns | None = None
        self.best: float | None = None  # seconds of the best set of pipelines so far, without gradient sync

    def starts(self, known: Sequence[TimedPipeline] = ()) -> list[Found]:
        """Sets of pipelines from every source there is, least step first. known: pipelines from elsewhere."""
        found: list[tuple[str, Sequence[TimedPipeline]]] = [
            ("singles", self.singles()),
            ("chain", self.chain()),
        ]
        found += [("known", [pipeline]) for pipeline in known]
        found += [("columns", timed) for timed in self.from_columns()]
        sets = [(name, list(timed)) for name, timed in found if timed]
        batch = self.problem.global_batch_size
        judged = [Found(share_out(timed, batch)[0], tuple(timed), name) for name, timed in sets]
        if math.prod(count + 1 for count in self.classes.counts) <= MOST_COUNTS:
            ceiling_s = min((entry.step_s for entry in judged), default=math.inf)
            judged += self.from_counts(ceiling_s)
        judged = [entry for entry in judged if math.isfinite(entry.step_s)]
        self._note(entry.step_s for entry in judged)
        return sorted(judged, key=lambda entry: (entry.step_s, len(entry.timed), entry.start))

    def search(self, judge: Judge, known: Sequence[TimedPipeline] = ()) -> list[Found]:
        """The best starts, improved; least step first. Empty where none of them fits. known: see `starts`."""
        improved: list[Found] = []
        loaded = self._loaded(judge)
        starts = [(loaded(entry.timed, entry.step_s), entry) for entry in self.starts(known)]
        starts.sort(key=lambda pair: (pair[0], len(pair[1].timed), pair[1].start))
        for judged_s, entry in _distinct(starts)[:STARTS]:
            if improved and judged_s > HOPELESS * min(better.step_s for better in improved):
                continue
            step_s, timed = LocalSearch(self.cut_optimizer, loaded, self._tries).improve(entry.timed)
            improved.append(Found(step_s, tuple(timed), entry.start))
            self._note([self._unloaded_s(timed)])
        if improved:
            improved += self._fewer(min(improved, key=lambda entry: entry.step_s), loaded)
            improved += self._walked(min(improved, key=lambda entry: entry.step_s), loaded)
        improved += [replace(entry, step_s=judged_s) for judged_s, entry in starts[:STARTS]]
        return sorted(improved, key=lambda entry: (entry.step_s, len(entry.timed), entry.start))

    def settled(self, found: Sequence[Found], simulate: Callable[[Plan], float]) -> list[Found]:
        """Settle sets that this search found (`threshold_accepting`). simulate: seconds of a plan's step."""

        def judge(timed: Sequence[TimedPipeline], _: float) -> float:
            plan = self.plan("settled", timed)
            return simulate(plan) if plan is not None else math.inf

        devices = len(self.problem.cluster.devices)
        if devices > LARGE or not found:
            return []
        return settled(self.cut_optimizer, found, judge, always=devices <= FEW)

    def _walked(self, best: Found, judge: Judge) -> list[Found]:
        """Walk (`threshold_accepting`) and mix new sets out of all that was seen, in turn, while it pays."""
        devices = len(self.problem.cluster.devices)
        if devices > LARGE:
            return []
        columns_s = self.columns.step_s if self.columns else math.inf
        near = self.best is not None and self.best <= CLOSE * columns_s and not self._much_sync(best)
        if FEW < devices <= SMALL and near:
            tries, patience, least_gain = SHORT_WALK, 1, MUCH_GAIN
        else:
            tries, patience, least_gain = WALK, PATIENCE, LEAST_GAIN
        found, start, failed = [best], best, 0
        for turn in range(MOST_WALKS):
            before = best
            found += walked(self.cut_optimizer, start, judge, tries, seed=turn)
            best = min(found, key=lambda entry: entry.step_s)
            self._note([self._unloaded_s(best.timed)])
            mixed = self.mixed(best, judge)
            found += mixed
            start = min([best, *mixed], key=lambda entry: entry.step_s / (1 + WORSE * (entry is not best)))
            best = min([best, *mixed], key=lambda entry: entry.step_s)
            failed = 0 if best.step_s < before.step_s * (1 - least_gain) else failed + 1
            if failed == patience:
                break
        return found[1:]

    def mixed(self, best: Found, judge: Judge) -> list[Found]:
        """The best set of pipelines that were all looked at before, where it promises more."""
        step_s, pipelines = self.seen.pipelines(self._unloaded_s(best.timed))
        timed = self.realise(pipelines, step_s, self.seen.classes)
        seconds = self._unloaded_s(timed) if timed else math.inf
        if math.isinf(seconds):
            return []
        self._note([seconds])
        return [Found(judge(timed, seconds), tuple(timed), "mixed")]

    def _much_sync(self, best: Found) -> bool:
        seconds = self.load.step_s(best.timed, self._unloaded_s(best.timed))
        return best.step_s - seconds > MUCH_SYNC * best.step_s

    def _unloaded_s(self, timed: Sequence[TimedPipeline]) -> float:
        return share_out(timed, self.problem.global_batch_size)[0]

    def _loaded(self, judge: Judge) -> Judge:
        """The judge, told of a step in which the network cards are done too."""
        return lambda timed, seconds: judge(timed, self.load.step_s(timed, seconds))

    @property
    def _tries(self) -> int:
        """Of the local search, fewer for large clusters, where each takes longer."""
        return max(LEAST_TRIES, TRIES * SMALL // max(SMALL, len(self.problem.cluster.devices)))

    def _note(self, seconds: Iterable[float]) -> None:
        known = [*seconds, *([] if self.best is None else [self.best])]
        self.best = min(known, default=None)

    def _fewer(self, best: Found, judge: Judge) -> list[Found]:
        """The best sets of fewer pipelines, where gradient sync takes much of the step.

        A number of pipelines is left out where even without sync they are slower than the best.
        """
        batch, count, found = self.problem.global_batch_size, len(best.timed), []
        if count == 1 or not self._much_sync(best):
            return []
        for most in sorted({1, *(part for part in (count // 2, count // 5) if part > 1)}):
            sets = self.from_columns(most, best.step_s) if most > 1 else [self.chain()]
            judged = [(share_out(timed, batch)[0], timed) for timed in sets if timed]
            judged = [(judge(timed, seconds), timed) for seconds, timed in judged if seconds < math.inf]
            if judged:
                seconds, timed = min(judged, key=lambda entry: entry[0])
                if seconds > HOPELESS * best.step_s:
                    continue
                step_s, better = LocalSearch(self.cut_optimizer, judge, self._tries // 3).improve(timed)
                found.append(Found(step_s, tuple(better), "fewer"))
        return found

    def singles(self) -> list[TimedPipeline]:
        """Every device that the whole model fits on, each at its best microbatch size."""
        timed = []
        for group in self.classes.members:
            options = []
            for size in self.problem.microbatch_sizes:
                pipeline = self.cut_optimizer.recut(group[:1], size, size)
                if pipeline is not None:
                    options.append((pipeline.timing.time_s(16 * size) / size, size))
            if options:
                made = (
                    self.cut_optimizer.recut([device], min(options)[1], min(options)[1]) for device in group
                )
                timed += [pipeline for pipeline in made if pipeline is not None]
        return timed

    def chain(self) -> list[TimedPipeline]:
        return list(self._chain)

    @cached_property
    def _chain(self) -> tuple[TimedPipeline, ...]:
        """One pipeline over the devices with most memory or speed, however many of them are best."""
        batch = self.problem.global_batch_size
        found: list[tuple[float, TimedPipeline]] = []
        for order in self._orders():
            for size in self.problem.microbatch_sizes:
                pipeline = self.cut_optimizer.recut(order, size, batch)
                if pipeline is not None:
                    found.append((pipeline.timing.quick_s(-(-batch // size)), pipeline))
        found.sort(key=lambda entry: entry[0])
        best = min(found[:JUDGED_CHAINS], key=lambda entry: entry[1].timing.time_s(batch), default=None)
        return (best[1],) if best else ()

    def _orders(self) -> list[tuple[Device, ...]]:
        """All orders of all subsets of few devices; else those with most memory or speed, by memory."""
        devices, layers = self.problem.cluster.devices, self.problem.profile.num_layers
        speed = {
            name: float(self.tables.at(1).busy_s[entry, 0, -1])
            for name, entry in self.classes.entries().items()
        }
        by_memory = sorted(devices, key=lambda device: (-device.usable_bytes, device.name))
        by_speed = sorted(devices, key=lambda device: (speed[device.name], device.name))
        orders = [
            tuple(sorted(ranked[:count], key=lambda device: (-device.usable_bytes, device.name)))
            for ranked in (by_memory, by_speed)
            for count in sorted({min(len(devices), layers, size) for size in CHAIN_SIZES})
        ]
        if len(devices) <= ALL_ORDERS:
            orders += [
                order
                for count in range(1, min(len(devices), layers) + 1)
                for order in permutations(devices, count)
            ]
        kinds = {tuple(device.device_class for device in order): order for order in reversed(orders)}
        return list(kinds.values())

    def from_columns(
        self, most_pipelines: int | None = None, within_s: float = math.inf
    ) -> list[list[TimedPipeline]]:
        """The relaxed programme's pipelines, rounded to whole ones and put on devices.

        None where they do the batch, relaxed, in no less than so many seconds.
        """
        known = self.columns.pool if self.columns else None
        columns = generate(
            self.tables,
            self.timings,
            rounds=ROUNDS if known is None else ROUNDS // 3,
            most_pipelines=most_pipelines,
            pool=known,
        )
        if most_pipelines is None:
            self.columns = columns
        if not columns.pool.columns or columns.step_s >= within_s:
            return []
        batch = self.problem.global_batch_size
        return [
            self.realise(chosen, step_s)
            for step_s, chosen in rounded(columns, self.classes.counts, batch, most_pipelines)
        ]

    def from_counts(self, ceiling_s: float) -> list[Found]:
        """The exact programme over counts of devices, for small clusters."""
        if not math.isfinite(ceiling_s):
            return []
        split = ClusterSplit(self.tables, ceiling_s)
        least = split.least_step_s(upper=False, low_s=ceiling_s / 16)
        found = []
        for factor in (1.003, 1.04, 1.1, 1.2):
            pipelines = split.pipelines(factor * least)
            if pipelines:
                timed = self.realise(pipelines, factor * least)
                seconds = share_out(timed, self.problem.global_batch_size)[0] if timed else math.inf
                found.append(Found(seconds, tuple(timed), "counts"))
        return found

    def realise(
        self, pipelines: Sequence[ClassPipeline], step_s: float, classes: DeviceClasses | None = None
    ) -> list[TimedPipeline]:
        """Pipelines on named devices, cut anew for their links where that is faster.

        classes: those that the pipelines are of; None: those of the search.
        """
        timed = []
        sizes = sorted(self.problem.microbatch_sizes)
        for pipeline, stages in zip(pipelines, place(classes or self.classes, pipelines), strict=True):
            # a single smaller microbatch is the last of larger ones: several as small are not asked for
            size = next((size for size in sizes if size >= pipeline.microbatch_size), sizes[-1])
            raw = self.timings.pipeline(stages, size)
            cut = fitted(self.cut_optimizer, raw.devices, size, step_s)
            options = [
                timed_pipeline
                for timed_pipeline in (raw, cut)
                if timed_pipeline is not None and timed_pipeline.timing.fits
            ]
            if options:
                samples = max(1, pipeline.num_samples)
                timed.append(min(options, key=lambda timed_pipeline: timed_pipeline.timing.time_s(samples)))
        return timed

    def plan(self, strategy: str, timed: Sequence[TimedPipeline]) -> Plan | None:
        """The plan of a set of pipelines, samples shared out; None where they cannot do the batch."""
        batch = self.problem.global_batch_size
        seconds, samples = share_out(timed, batch)
        if not math.isfinite(seconds):
            return None
        pairs = zip(timed, samples, strict=True)
        pipelines = tuple(pipeline.pipeline(count) for pipeline, count in pairs if count)
        return Plan(strategy, self.problem.profile.model, batch, pipelines)


def _distinct(starts: Sequence[tuple[float, Found]]) -> list[tuple[float, Found]]:
    """Without those whose pipelines are alike but for the names of devices."""
    seen: dict[object, tuple[float, Found]] = {}
    for judged_s, entry in starts:
        key = (judged_s, tuple(sorted(id(pipeline.timing) for pipeline in entry.timed)))
        seen.setdefault(key, (judged_s, entry))
    return list(seen.values())
