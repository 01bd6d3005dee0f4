"""Candidate plans in which pipelines share devices, for where memory binds."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product

import numpy as np

from partition.estimates.arrays import Floats
from partition.estimates.batch_split import in_proportion
from partition.estimates.effort import LARGE
from partition.estimates.optimizer_sharding import fits
from partition.estimates.pipeline_costs import PipelineCosts
from partition.estimates.shared_pipelines import Draft, SharedPipeline, SharedPipelineCosts
from partition.estimates.stage_tables import ProblemTables
from partition.estimates.timed_pipeline import TimingCache, timed_stages
from partition.exact.cut_dp import CutOptimizer
from partition.plan import Plan
from partition.problem import Problem
from partition.shared_devices.replicated_stages import ReplicatedStages

MOST_SHIFTED = 64  # pipelines of a plan that are cut a second time
ALL_SHIFTS = 5  # cuts up to which every combination of shifts is tried
SPLITS = 64
TRIES = 4
GAIN = 0.005  # relative: less is not worth a second pipeline
ALWAYS = 12  # devices up to which plans that share them are always tried where memory binds
COARSE = 2  # layers of a stage, as a mean, below which they are tried on more devices too


def memory_binds(problem: Problem, costs: PipelineCosts) -> bool:
    """Return whether some device cannot hold the whole model without recompute."""
    layers, size = problem.profile.num_layers, min(problem.microbatch_sizes)
    return any(costs.cap(device, 0, layers, size, recompute=False) < 1 for device in problem.cluster.devices)


def sharing_may_win(problem: Problem, costs: PipelineCosts, best: Plan | None) -> bool:
    """Return whether pipelines that share devices may be faster than the best plan without.

    They are where memory binds and layers are coarse: of more than a few devices none was that had twice as
    many layers as the longest pipeline has stages.
    """
    if best is None:
        return True
    longest = max(len(pipeline.stages) for pipeline in best.pipelines)
    coarse = len(problem.cluster.devices) <= ALWAYS or problem.profile.num_layers < COARSE * longest
    return coarse and memory_binds(problem, costs)


def shared_plans(
    tables: ProblemTables,
    costs: PipelineCosts,
    best: Plan | None,
    ceiling_s: float = math.inf,
    *,
    limit: int = 12,
) -> list[Plan]:
    """Return at most `limit` plans that fit memory and in which some device serves several pipelines.

    ceiling_s: the step of a plan that is known; slower ones are of no interest.
    Best estimates first; the simulator has the last word. Two families: stages replicated on groups of
    devices of any size (`partition.shared_devices.replicated_stages`), and pipelines of `best`, and single
    ones, next to a second one over the same devices whose cuts are a layer away.
    """
    if len(tables.problem.cluster.devices) > LARGE:
        return []
    problem, draft_costs = tables.problem, SharedPipelineCosts(costs)
    drafts = dict.fromkeys(ReplicatedStages(tables, costs).drafts(ceiling_s))
    drafts.update(dict.fromkeys(ShiftedCuts(tables, draft_costs).drafts(best)))
    judged = [pair for draft in drafts if _shares(draft) for pair in draft_costs.plans(draft)]
    plans: list[Plan] = []
    for _, plan in sorted(judged, key=lambda pair: (pair[0], len(pair[1].pipelines))):
        if len(plans) == limit:
            break
        if problem.forced.allows(plan) and fits(plan, problem.profile, problem.cluster):
            plans.append(plan)
    return plans


def _shares(draft: Draft) -> bool:
    names = [stage.device.name for pipeline in draft for stage in pipeline.stages]
    return len(set(names)) < len(names)


@dataclass(frozen=True, slots=True)
class _Shift:
    """Second cuts of a pipeline, and the share of the samples that keep the first.

    gain: the largest load of a device, as a share of the one without.
    """

    edges: tuple[int, ...]
    kept: float
    gain: float


class ShiftedCuts:
    """Two pipelines over the same devices in the same order, whose cuts are at most a layer apart.

    Where layers are coarse, no single cut balances the devices: the samples split so that the busiest device
    is busy least.
    """

    def __init__(self, tables: ProblemTables, draft_costs: SharedPipelineCosts) -> None:
        self.tables, self.draft_costs = tables, draft_costs
        self._class_of = tables.classes.class_indices()
        self._found: dict[object, list[_Shift]] = {}

    def drafts(self, best: Plan | None) -> Iterator[Draft]:
        """Yield each pipeline of a plan cut a second time, one at a time and all of them; and chains so."""
        bases = [*([self._draft(best)] if best is not None else []), *self._chains()]
        for base in bases:
            if len(base) > MOST_SHIFTED:
                continue
            options = [list(self._options(pipeline)) for pipeline in base]
            for rank in range(TRIES):
                chosen = [row[min(rank, len(row) - 1)] if row else None for row in options]
                if any(chosen):
                    yield self._replaced(base, chosen)
            if 1 < len(base) <= TRIES:
                for index, row in enumerate(options):
                    for option in row[:1]:
                        yield self._replaced(base, [option if k == index else None for k in range(len(base))])

    def _draft(self, plan: Plan) -> Draft:
        cluster = self.tables.problem.cluster
        return tuple(
            SharedPipeline(timed_stages(cluster, pipeline), pipeline.microbatch_size, pipeline.num_samples)
            for pipeline in plan.pipelines
        )

    def _chains(self) -> Iterator[Draft]:
        """Yield single pipelines over the devices with most memory."""
        problem = self.tables.problem
        cut_optimizer = CutOptimizer(self.tables, TimingCache(self.draft_costs.costs))
        order = sorted(problem.cluster.devices, key=lambda device: -device.usable_bytes)
        most = min(len(order), problem.profile.num_layers, 8)
        for count in sorted({max(2, most // 2), most}):
            for size in problem.microbatch_sizes[:2]:
                pipeline = (
                    cut_optimizer.recut(order[:count], size, problem.global_batch_size) if most > 1 else None
                )
                if pipeline is not None:
                    yield (SharedPipeline(pipeline.stages, size, problem.global_batch_size),)

    def _options(self, pipeline: SharedPipeline) -> Iterator[tuple[float, Draft]]:
        """Yield (gain, two pipelines) that fit, largest gains first, in the same microbatches and smaller."""
        names = [stage.device.name for stage in pipeline.stages]
        if len(names) < 2 or len(set(names)) < len(names):
            return
        allowed = [size for size in self.tables.problem.microbatch_sizes if size < pipeline.microbatch_size]
        found = []
        for size in (pipeline.microbatch_size, *allowed[-1:]):
            resized = replace(pipeline, microbatch_size=size)
            found += [(shift.gain, -size, resized, shift) for shift in self._shifts(resized)]
        found.sort(key=lambda option: option[:2])
        tried = 0
        for gain, _, resized, shift in found[: 4 * TRIES]:
            pair = _pair(resized, shift)
            if pair and self.draft_costs.fits(pair):
                tried += 1
                yield gain, pair
            if tried == TRIES:
                return

    def _shifts(self, pipeline: SharedPipeline) -> list[_Shift]:
        """Return the shifts that are worth while, best first."""
        class_indices = [self._class_of[stage.device.name] for stage in pipeline.stages]
        edges = (0, *(stage.stop for stage in pipeline.stages))
        flags = tuple(stage.recompute for stage in pipeline.stages)
        key = (tuple(class_indices), edges, flags, pipeline.microbatch_size, pipeline.num_samples)
        if key not in self._found:
            self._found[key] = self._find(class_indices, edges, flags, pipeline)
        return self._found[key]

    def _find(
        self,
        class_indices: Sequence[int],
        edges: Sequence[int],
        flags: Sequence[bool],
        pipeline: SharedPipeline,
    ) -> list[_Shift]:
        at = self.tables.at(pipeline.microbatch_size)
        count = pipeline.num_microbatches
        steps = _steps(len(edges) - 2)
        others = np.array(edges)[None, :] + np.pad(steps, ((0, 0), (1, 1)))
        others = others[(np.diff(others, axis=1) > 0).all(axis=1)]
        again = np.where(np.array(flags)[:, None, None], at.forward_s[class_indices], 0.0)
        table = at.busy_s[class_indices] + again
        place = np.arange(len(class_indices))
        first: Floats = table[place, edges[:-1], edges[1:]]
        second = table[place[None, :], others[:, :-1], others[:, 1:]]
        splits = np.unique(np.round(np.linspace(0, count, min(count, SPLITS) + 1)))[1:-1]
        if not len(splits) or not len(others):
            return []
        kept = splits[None, :, None]
        loads = (kept * first[None, None, :] + (count - kept) * second[:, None, :]).max(axis=2)
        pick = loads.argmin(axis=1)
        gains = loads[np.arange(len(others)), pick] / max(count * float(first.max()), 1e-300)
        shifts = [
            _Shift(tuple(map(int, row)), float(splits[index]) / count, float(gain))
            for row, index, gain in zip(others, pick, gains, strict=True)
            if gain < 1 - GAIN
        ]
        return sorted(shifts, key=lambda shift: (shift.gain, shift.edges))

    def _replaced(self, base: Draft, chosen: Sequence[tuple[float, Draft] | None]) -> Draft:
        """Return the base with pairs in place of pipelines, its samples shared out by how fast they are."""
        batch = sum(pipeline.num_samples for pipeline in base)
        rates = [
            pipeline.num_samples / (option[0] if option else 1.0)
            for pipeline, option in zip(base, chosen, strict=True)
        ]
        samples = in_proportion(rates, batch)
        made: list[SharedPipeline] = []
        for pipeline, option, num_samples in zip(base, chosen, samples, strict=True):
            if not num_samples:
                continue
            if option is None or num_samples == 1:
                made.append(replace(pipeline, num_samples=num_samples))
                continue
            one, other = option[1]
            share = one.num_samples / (one.num_samples + other.num_samples)
            size = one.microbatch_size
            kept = size * round(share * num_samples / size)
            kept = min(max(kept, 1), num_samples - 1)
            made += [replace(one, num_samples=kept), replace(other, num_samples=num_samples - kept)]
        return tuple(made)


def _steps(num_cuts: int) -> Floats:
    """Return steps of -1, 0 and 1 for the cuts, not all 0: of many cuts the same for runs of neighbours."""
    if num_cuts <= ALL_SHIFTS:
        rows: Iterable[Sequence[int]] = product((-1, 0, 1), repeat=num_cuts)
    else:
        runs = list(combinations(range(num_cuts + 1), 2))
        rows = [
            [step if start <= cut < stop else 0 for cut in range(num_cuts)]
            for start, stop in runs
            for step in (-1, 1)
        ]
        # a busy stage gives to both sides: the cuts before it move on, those after it back
        rows += [
            [1 if start <= cut < middle else -1 if middle <= cut < stop else 0 for cut in range(num_cuts)]
            for start, stop in runs
            for middle in range(start + 1, stop)
        ]
    return np.array([row for row in rows if any(row)], dtype=int)


def _pair(pipeline: SharedPipeline, shift: _Shift) -> Draft | None:
    """Return a pipeline and its shifted twin; None where one of them gets no samples."""
    size = pipeline.microbatch_size
    kept = min(pipeline.num_samples - 1, size * round(shift.kept * pipeline.num_microbatches))
    if kept < 1:
        return None
    stages = tuple(
        stage._replace(start=start, stop=stop)
        for stage, start, stop in zip(pipeline.stages, shift.edges, shift.edges[1:], strict=False)
    )
    return (
        replace(pipeline, num_samples=kept),
        SharedPipeline(stages, size, pipeline.num_samples - kept),
    )
