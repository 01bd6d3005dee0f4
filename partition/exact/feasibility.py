"""The pipelines that fit memory and respect what is forced, or why none do, where a search found nothing."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cost_model.errors import InfeasibleError
from cost_model.memory import StageShape, leanest_segments
from partition.constraints.wishes import describe
from partition.estimates.pipeline_costs import missing_error
from partition.estimates.timed_pipeline import TimedStage
from partition.exact.memory_packing import MemoryPacking
from partition.exact.memory_programme import Cut, MemoryProgramme
from partition.plan import Pipeline, Plan
from partition.problem import Problem


@dataclass(frozen=True, slots=True)
class LeastPipelines:
    """The pipelines, mostly a single one, whose fullest device lacks fewest bytes; at most 0 where they fit.

    proven: no order, subset or cut of the devices lacks less.
    """

    stages: tuple[tuple[TimedStage, ...], ...]
    microbatch_size: int
    missing_bytes: float
    proven: bool

    def plan(self, strategy: str, problem: Problem) -> Plan:
        """Return the plan with one microbatch in flight, samples shared out evenly."""
        batch, number = problem.global_batch_size, len(self.stages)
        pipelines = []
        for place, chain in enumerate(self.stages):
            samples = batch // number + (place < batch % number)
            stages = (stage.planned(1, self._segment_layers(stage, problem)) for stage in chain)
            pipelines.append(Pipeline(min(self.microbatch_size, samples), samples, tuple(stages)))
        return problem.plan(strategy, tuple(pipelines))

    def _segment_layers(self, stage: TimedStage, problem: Problem) -> int:
        shape = StageShape(stage.start, stage.stop, 1, self.microbatch_size, recompute=True)
        profile = problem.profile.on(stage.device.kind)
        return leanest_segments(profile, shape, whole=False) if stage.recompute else 0

    def error(self, problem: Problem, programme: MemoryProgramme) -> InfeasibleError:
        """Return why none fits, of pipelines that lack something."""
        stages = [stage for chain in self.stages for stage in chain]
        whys = [
            missing_error(
                s.device, s.start, s.stop, min(programme.stage_needs(s.start, s.stop, s.device.kind))
            )
            for s in stages
        ]
        why = max(whys, key=lambda error: error.missing_bytes)
        what = "no plan fits" if programme.several else "no pipeline fits"
        what += ", whatever the order" if self.proven else ""
        what += f", with {describe(problem.forced)}" if describe(problem.forced) else ""
        scope = "of all devices, orders and cuts" if self.proven else "of the orders tried"
        less = "force less, " if describe(problem.forced) else ""
        return InfeasibleError(
            f"{what}: even in the best {scope}, each device serving one stage, with one microbatch of "
            f"{self.microbatch_size} in flight, {why}; {less}add a device or memory, or lower `reserve`",
            device=why.device,
            missing_bytes=why.missing_bytes,
        )


def least_pipelines(problem: Problem) -> LeastPipelines:
    """Return pipelines of few stages that fit and respect what is forced: one, unless several are asked for.

    Raises: InfeasibleError with the least that is missing.
    """
    number, batch = problem.forced.num_pipelines, problem.global_batch_size
    kinds: list[type[MemoryProgramme]] = [MemoryProgramme] if number in (None, 1) else []
    if number != 1 and (number or len(problem.forced.pins) > 1):
        kinds.append(MemoryPacking)
    most = -(-batch // (number or 1))
    sizes = sorted({min(size, most) for size in problem.microbatch_sizes})
    programmes = [kind(problem, size) for kind in kinds for size in sizes]
    for programme in programmes:
        if cuts := programme.solve(0.0):
            return _named(programme, cuts)
    best: LeastPipelines | None = None
    of_best = programmes[0]
    for programme in programmes:
        if cuts := programme.leanest(best.missing_bytes if best else math.inf):
            best, of_best = _named(programme, cuts), programme
            best = replace(best, proven=best.proven and len(kinds) == 1)
    if best is None:
        if kinds == [MemoryProgramme]:
            raise InfeasibleError("no single pipeline respects what is forced; force less")
        raise InfeasibleError(
            f"no plan with {describe(problem.forced)} was found in which no device is shared; force less"
        )
    if best.missing_bytes > 0:
        raise best.error(problem, of_best)
    return best


def _named(programme: MemoryProgramme, pipelines: Sequence[Sequence[Cut]]) -> LeastPipelines:
    """Return the pipelines on devices: of a class the one with most memory, of these the fastest."""
    unused = [sorted(group, key=lambda d: (-d.usable_bytes, -d.speed)) for group in programme.members]
    chains, missing = [], -math.inf
    for cuts in pipelines:
        stages = []
        for place, start, stop in cuts:
            device = unused[place].pop(0)
            plain, again = programme.stage_needs(start, stop, device.kind)
            missing = max(missing, min(plain, again) - device.usable_bytes)
            recompute = again < plain and plain > device.usable_bytes
            stages.append(TimedStage(device, start, stop, recompute))
        chains.append(tuple(stages))
    return LeastPipelines(tuple(chains), programme.samples, missing, programme.proven)
