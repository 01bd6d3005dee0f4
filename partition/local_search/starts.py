"""Sets of pipelines that a search begins with: single devices, one pipeline, columns, exact counts."""

import math
from collections.abc import Iterator, Sequence
from itertools import permutations

import numpy as np

from cost_model.cluster import Device
from partition.column_generation.column_generation import ROUNDS, Columns, generate
from partition.column_generation.master_problem import Limits
from partition.column_generation.rounding import rounded
from partition.constraints.dealt_devices import EACH, NUMBERS, dealt
from partition.constraints.wished_sets import WishedSets
from partition.estimates.batch_split import share_out
from partition.estimates.class_pipeline import ClassPipeline
from partition.estimates.device_classes import DeviceClasses, equal_devices
from partition.estimates.effort import effort_for
from partition.estimates.pipeline_costs import PipelineCosts
from partition.estimates.stage_tables import ProblemTables
from partition.estimates.timed_pipeline import TimedPipeline, TimingCache
from partition.exact.cluster_split import MOST_LAYERS, ClusterSplit
from partition.exact.cut_dp import CutOptimizer
from partition.local_search.moves import PipelineSet, fitted
from partition.local_search.placement import place
from partition.problem import Forced, Problem


class SearchSpace:
    """The arrays of a problem and the timings of the pipelines made so far.

    like: a space of the same problem, of which other numbers are forced; arrays, timings and cuts are shared.
    """

    def __init__(self, problem: Problem, like: "SearchSpace | None" = None) -> None:
        self.problem = problem
        self.effort = effort_for(
            len(problem.cluster.devices), forced=problem.forced != Forced(), thorough=problem.thorough
        )
        self.wishes = WishedSets(problem)
        if like is None:
            classes = equal_devices(problem.cluster, [pin.device for pin in problem.forced.pins])
            tables = ProblemTables(problem, classes)
            self.cut_optimizer = CutOptimizer(tables, TimingCache(PipelineCosts(problem)))
        else:
            self.cut_optimizer = like.cut_optimizer.of(problem)
        self.tables, self.timings = self.cut_optimizer.tables, self.cut_optimizer.timings
        self.classes, self.costs = self.tables.classes, self.timings.costs
        self.limits = self.wishes.limits(self.classes)

    def clock_s(self, timed: Sequence[TimedPipeline]) -> float:
        """Return the seconds in which pipelines do the batch, by their clocks; inf where they cannot.

        Or where they do not respect what is forced.
        """
        return self.wishes.step_s(timed, share_out(timed, self.problem.global_batch_size)[0])


def singles(space: SearchSpace) -> list[TimedPipeline]:
    """Return every device that the whole model fits on, each at its best microbatch size.

    The fastest of them, where no more are wished for.
    """
    timed = []
    for group in space.classes.members:
        options = []
        for size in space.problem.microbatch_sizes:
            pipeline = space.cut_optimizer.recut(group[:1], size, size)
            if pipeline is not None:
                options.append((pipeline.timing.time_s(16 * size) / size, size))
        if options:
            best = min(options)[1]
            made = (space.cut_optimizer.recut([device], best, best) for device in group)
            timed += [pipeline for pipeline in made if pipeline is not None]
    limits = (space.limits.most_pipelines, space.limits.most_devices)
    most = min((limit for limit in limits if limit is not None), default=len(timed))
    if most < len(timed):
        timed.sort(key=lambda one: one.timing.time_s(16 * one.microbatch_size) / one.microbatch_size)
    return timed[:most]


def chain(space: SearchSpace) -> list[TimedPipeline]:
    """Return one pipeline over the devices with most memory or speed, however many of them are best."""
    batch = space.problem.global_batch_size
    found: list[tuple[float, TimedPipeline]] = []
    for order in _orders(space):
        for size in space.problem.microbatch_sizes:
            pipeline = space.cut_optimizer.recut(order, size, batch)
            if pipeline is not None:
                found.append((pipeline.timing.quick_s(-(-batch // size)), pipeline))
    found.sort(key=lambda pair: pair[0])
    timed = [pipeline for _, pipeline in found[: space.effort.starts.timed_chains]]
    return [min(timed, key=lambda pipeline: pipeline.timing.time_s(batch))] if timed else []


def _orders(space: SearchSpace) -> list[tuple[Device, ...]]:
    """Return orders of the devices with most memory or speed; of few devices all. Those alike come once."""
    devices, layers = space.problem.cluster.devices, space.problem.profile.num_layers
    whole_s = _whole_s(space)
    by_memory = sorted(devices, key=lambda device: (-device.usable_bytes, device.name))
    by_speed = sorted(devices, key=lambda device: (whole_s[device.name], device.name))
    most = min(len(devices), layers, space.limits.most_devices or layers)
    lengths = sorted({min(most, length) for length in space.effort.starts.chain_lengths})
    orders = [
        tuple(sorted(ranked[:length], key=lambda device: (-device.usable_bytes, device.name)))
        for ranked in (by_memory, by_speed)
        for length in lengths
    ]
    if space.effort.starts.every_order:
        orders += [order for count in range(1, most + 1) for order in permutations(devices, count)]
    kinds = {tuple(device.device_class for device in order): order for order in reversed(orders)}
    return list(kinds.values())


def _whole_s(space: SearchSpace) -> dict[str, float]:
    """Return the seconds of one sample of the whole model on each device, by its name."""
    return {
        name: float(space.tables.at(1).busy_s[class_index, 0, -1])
        for name, class_index in space.classes.class_indices().items()
    }


def wished(space: SearchSpace) -> list[list[TimedPipeline]]:
    """Return sets of devices dealt out to pipelines, where something is forced; best closed forms first."""
    forced = space.problem.forced
    if forced == Forced():
        return []
    numbers = [forced.num_pipelines] if forced.num_pipelines else NUMBERS
    found = [
        pair for number in numbers for pair in dealt_sets(space, number, space.problem.microbatch_sizes, EACH)
    ]
    found.sort(key=lambda pair: pair[0])
    return [timed for _, timed in found[: space.effort.starts.dealt]]


def dealt_sets(
    space: SearchSpace, number: int, sizes: Sequence[int], each: Sequence[int] = ()
) -> Iterator[tuple[float, list[TimedPipeline]]]:
    """Give (closed form of a step in which all are busy, set) of devices dealt out to so many pipelines.

    each: see `dealt`.
    """
    problem, batch = space.problem, space.problem.global_batch_size
    if number > min(len(problem.cluster.devices), batch, problem.forced.max_devices or batch):
        return
    for arrangement in dealt(problem, number, _whole_s(space), each):
        for size in sizes:
            count = max(1, batch // number // size)
            cuts = [space.cut_optimizer.recut(devices, size, count * size) for devices in arrangement]
            timed = [pipeline for pipeline in cuts if pipeline is not None and pipeline.timing.fits]
            if len(timed) == number:
                pace = sum(count * size / max(pipeline.timing.quick_s(count), 1e-300) for pipeline in timed)
                yield batch / pace, timed


def least_dealt_s(space: SearchSpace, number: int, size: int) -> float:
    """Return the step of so many pipelines of the fastest devices if all stages were equal, without messages.

    A pipeline of S stages is filled and emptied while S - 1 microbatches pass.
    """
    problem = space.problem
    busy_s = space.tables.at(size).busy_s[:, 0, -1]
    paces = np.repeat(size / np.maximum(busy_s, 1e-300), space.classes.counts)
    used = min(len(paces), number * problem.profile.num_layers)
    passed = max(1, problem.global_batch_size // number // size) + used / number - 1
    return float(passed * size * number / np.sort(paces)[-used:].sum())


def relaxed(space: SearchSpace, known: Columns | None, limits: Limits) -> Columns:
    """Return the relaxed programme over columns; known: columns of an earlier one, which are added to."""
    return generate(
        space.tables,
        space.timings,
        rounds=ROUNDS if known is None else ROUNDS // 3,
        limits=limits,
        pool=None if known is None else known.pool,
    )


def from_columns(space: SearchSpace, columns: Columns, limits: Limits) -> Iterator[list[TimedPipeline]]:
    """Give sets of the relaxed programme's pipelines, rounded to whole ones and put on devices."""
    if columns.pool.columns and math.isfinite(columns.step_s):
        batch, counts = space.problem.global_batch_size, space.classes.counts
        for step_s, chosen in rounded(columns, counts, batch, limits):
            yield realise(space, chosen, step_s)


def from_counts(space: SearchSpace, ceiling_s: float) -> Iterator[PipelineSet]:
    """Give sets of the exact programme over counts of devices, for small clusters.

    ceiling_s: a step in which a set is known to do the batch; nothing is given where it is inf.
    """
    vectors = math.prod(count + 1 for count in space.classes.counts)
    if vectors > space.effort.starts.most_count_vectors or not math.isfinite(ceiling_s):
        return
    if space.tables.num_layers > MOST_LAYERS:
        return
    split = ClusterSplit(space.tables, ceiling_s, limits=space.limits)
    least_s = split.least_step_s(upper=False, low_s=ceiling_s / 16)
    for slack in space.effort.starts.count_slack:
        pipelines = split.pipelines(slack * least_s)
        if pipelines:
            timed = realise(space, pipelines, slack * least_s)
            yield PipelineSet(space.clock_s(timed) if timed else math.inf, tuple(timed), "counts")


def realise(
    space: SearchSpace,
    pipelines: Sequence[ClassPipeline],
    step_s: float,
    classes: DeviceClasses | None = None,
) -> list[TimedPipeline]:
    """Return pipelines on named devices, cut anew for their links where that is faster.

    classes: those that the pipelines are of; None: those of the search.
    """
    timed: list[TimedPipeline] = []
    sizes = sorted(space.problem.microbatch_sizes)
    for pipeline, stages in zip(pipelines, place(classes or space.classes, pipelines), strict=True):
        # a single smaller microbatch is the last of larger ones: several as small are not asked for
        size = next((size for size in sizes if size >= pipeline.microbatch_size), sizes[-1])
        raw = space.timings.pipeline(stages, size)
        cut = fitted(space.cut_optimizer, raw.devices, size, step_s)
        options = [option for option in (raw, cut) if option is not None and option.timing.fits]
        if options:
            samples = max(1, pipeline.num_samples)
            seconds = [option.timing.time_s(samples) for option in options]
            timed.append(options[seconds.index(min(seconds))])
    return timed
