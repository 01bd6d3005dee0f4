"""What is asked of the planner."""

from collections.abc import Callable
from dataclasses import dataclass

from cost_model.cluster import Cluster
from cost_model.errors import InputError
from cost_model.profile import ModelProfile
from partition.plan import Figures, Plan

Evaluate = Callable[[Plan], Figures]
"""What a plan's step will be: the simulator, handed in from above (`hetpipe.simulation.prediction`)."""


@dataclass(frozen=True, slots=True)
class Pin:
    """A device that must hold exactly layers [start, stop)."""

    device: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Forced:
    """What the user has decided; None and () leave it to the planner.

    A plan respects it if every pinned device serves one stage, of exactly its layers; has num_pipelines
    pipelines; and uses at most max_devices devices.
    """

    pins: tuple[Pin, ...] = ()
    num_pipelines: int | None = None
    max_devices: int | None = None

    def allows(self, plan: Plan) -> bool:
        if self.num_pipelines is not None and len(plan.pipelines) != self.num_pipelines:
            return False
        if self.max_devices is not None and len(plan.device_names) > self.max_devices:
            return False
        stages = [stage for pipeline in plan.pipelines for stage in pipeline.stages]
        return all(
            [stage.layers for stage in stages if stage.device == pin.device] == [(pin.start, pin.stop)]
            for pin in self.pins
        )


@dataclass(frozen=True, slots=True)
class Problem:
    """Train profile.model on the cluster, global_batch_size samples a step, as fast as possible.

    microbatch_sizes: those that a plan may use, rising.
    """

    profile: ModelProfile
    cluster: Cluster
    global_batch_size: int
    microbatch_sizes: tuple[int, ...]
    forced: Forced = Forced()

    def __post_init__(self) -> None:
        if self.global_batch_size < 1:
            raise InputError(f"global_batch_size is {self.global_batch_size}; give at least 1")
        if not self.microbatch_sizes or min(self.microbatch_sizes) < 1:
            raise InputError(
                f"microbatch sizes {list(self.microbatch_sizes)} must be at least one, from 1 up"
            )
        for device in self.cluster.devices:
            self.profile.kind(device.kind)


def problem_of_plan(plan: Plan, profile: ModelProfile, cluster: Cluster) -> Problem:
    """The problem that a given plan answers, with the microbatch sizes it uses."""
    sizes = sorted({pipeline.microbatch_size for pipeline in plan.pipelines})
    return Problem(profile, cluster, plan.global_batch_size, tuple(sizes))


def problem_of(
    profile: ModelProfile, cluster: Cluster, global_batch_size: int, microbatch_size: int | None = None
) -> Problem:
    """The problem with the microbatch sizes that every kind was profiled at, or the one that is forced."""
    if microbatch_size is not None:
        return Problem(profile, cluster, global_batch_size, (microbatch_size,))
    kinds = {device.kind for device in cluster.devices}
    common = set.intersection(*(set(profile.kind(kind).microbatch_sizes) for kind in kinds))
    sizes = tuple(sorted(size for size in common if size <= global_batch_size))
    return Problem(profile, cluster, global_batch_size, sizes or (1,))
