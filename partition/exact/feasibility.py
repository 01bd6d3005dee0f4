"""The one pipeline that fits memory, or why none does, where the search has found nothing."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cost_model.errors import InfeasibleError
from cost_model.memory import StageShape, leanest_segments
from partition.estimates.pipeline_costs import missing_error
from partition.estimates.timed_pipeline import TimedStage
from partition.exact.memory_programme import Cut, MemoryProgramme, stage_needs
from partition.plan import Pipeline, Plan, Stage
from partition.problem import Problem


@dataclass(frozen=True, slots=True)
class LeastPipeline:
    """The one pipeline of the whole batch whose fullest device lacks fewest bytes; at most 0 where it fits.

    proven: no order, subset or cut of the devices lacks less.
    """

    stages: tuple[TimedStage, ...]
    microbatch_size: int
    missing_bytes: float
    proven: bool

    def plan(self, strategy: str, problem: Problem) -> Plan:
        """Return the plan with one microbatch in flight."""
        batch = problem.global_batch_size
        stages = tuple(
            Stage((s.device.name,), (s.start, s.stop), 1, s.recompute, self._segment_layers(s, problem))
            for s in self.stages
        )
        pipelines = (Pipeline(self.microbatch_size, batch, stages),)
        return Plan(strategy, problem.profile.model, batch, pipelines)

    def _segment_layers(self, stage: TimedStage, problem: Problem) -> int:
        shape = StageShape(stage.start, stage.stop, 1, self.microbatch_size, recompute=True)
        return leanest_segments(problem.profile, shape, whole=False) if stage.recompute else 0

    def error(self, problem: Problem) -> InfeasibleError:
        """Return why no pipeline fits, of one that lacks something."""
        samples = self.microbatch_size
        whys = [
            missing_error(s.device, s.start, s.stop, min(stage_needs(problem, s.start, s.stop, samples)))
            for s in self.stages
        ]
        why = max(whys, key=lambda error: error.missing_bytes)
        what = "no pipeline fits, whatever the order" if self.proven else "no pipeline fits"
        scope = "of all devices, orders and cuts" if self.proven else "of the orders tried"
        return InfeasibleError(
            f"{what}: even in the best {scope}, each device serving one stage, with one microbatch of "
            f"{samples} in flight, {why}; add a device or memory, or lower `reserve`",
            device=why.device,
            missing_bytes=why.missing_bytes,
        )


def least_pipeline(problem: Problem) -> LeastPipeline:
    """Return the pipeline of fewest stages that fits and respects what is forced.

    Raises: InfeasibleError with the least that is missing.
    """
    sizes = sorted({min(size, problem.global_batch_size) for size in problem.microbatch_sizes})
    programmes = [MemoryProgramme(problem, size) for size in sizes]
    for programme in programmes:
        if cuts := programme.solve(0.0):
            return _named(programme, cuts)
    best: LeastPipeline | None = None
    for programme in programmes:
        if cuts := programme.leanest(best.missing_bytes if best else math.inf):
            best = _named(programme, cuts)
    if best is None:
        raise InfeasibleError("no single pipeline respects what is forced; force less")
    if best.missing_bytes > 0:
        raise best.error(problem)
    return best


def _named(programme: MemoryProgramme, cuts: Sequence[Cut]) -> LeastPipeline:
    """Return the pipeline on devices: of a class the one with most memory, of these the fastest."""
    unused = [sorted(group, key=lambda d: (-d.usable_bytes, -d.speed)) for group in programme.members]
    stages, missing = [], -math.inf
    for place, start, stop in cuts:
        device = unused[place].pop(0)
        plain, again = stage_needs(programme.problem, start, stop, programme.samples)
        missing = max(missing, min(plain, again) - device.usable_bytes)
        recompute = again < plain and plain > device.usable_bytes
        stages.append(TimedStage(device, start, stop, recompute))
    return LeastPipeline(tuple(stages), programme.samples, missing, programme.proven)
