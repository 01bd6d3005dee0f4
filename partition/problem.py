"""What is asked of the planner."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from cost_model.cluster import Cluster
from cost_model.dtypes import (
    BFLOAT16_AUTOCAST,
    FLOAT16_AUTOCAST,
    FLOAT32,
    check_gradient_dtype,
    gradient_share,
)
from cost_model.errors import InputError
from cost_model.host_memory import movable_bytes, saved_bytes_on_host
from cost_model.plain_numbers import whole_number
from cost_model.profile import ModelProfile
from cost_model.sharding import Sharding
from partition.plan import (
    FROZEN_WEIGHTS,
    OPTIMIZER_STATES,
    OPTIMIZER_STEP,
    SAVED_ACTIVATIONS,
    Figures,
    Pipeline,
    Plan,
)

MOST_BATCH = 2**23
"""Samples a step: 8 pipelines of as many as one may have; what is beyond would be searched without end."""

MOST_LAYERS = 1024
"""Tables of all stages grow as their square: about 2 GiB and a minute there, on three devices."""

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
    """A request: train profile.model on the cluster, global_batch_size samples a step, as fast as possible.

    microbatch_sizes: those that a plan may use, rising. any_size: a device that holds the whole model may
    have any microbatch up to the largest that its kind was profiled at, which others may not have been.
    gradient_dtype: as for `Plan`; not for the planner to choose, since sums in fewer bits are not exact.
    thorough: whether the search for a plan goes on, some five times as long in all.
    """

    profile: ModelProfile
    cluster: Cluster
    global_batch_size: int
    microbatch_sizes: tuple[int, ...]
    forced: Forced = Forced()
    gradient_dtype: str = FLOAT32
    any_size: bool = False
    thorough: bool = False

    def __post_init__(self) -> None:
        batch = whole_number("global_batch_size", self.global_batch_size)
        sizes = tuple(whole_number("microbatch_size", size) for size in self.microbatch_sizes)
        object.__setattr__(self, "global_batch_size", batch)
        object.__setattr__(self, "microbatch_sizes", sizes)
        if self.global_batch_size < 1:
            raise InputError(f"global_batch_size is {self.global_batch_size}; give at least 1")
        if self.global_batch_size > MOST_BATCH:
            raise InputError(f"global_batch_size is {self.global_batch_size:,}; give at most {MOST_BATCH:,}")
        if not self.microbatch_sizes or min(self.microbatch_sizes) < 1:
            raise InputError(
                f"microbatch sizes {list(self.microbatch_sizes)} must be at least one, from 1 up"
            )
        if self.profile.num_layers > MOST_LAYERS:
            raise InputError(
                f"{self.profile.model!r} has {self.profile.num_layers:,} layers; plans are made of at most "
                f"{MOST_LAYERS:,}: put several in one"
            )
        check_gradient_dtype(self.gradient_dtype, self.profile.dtype)
        for device in self.cluster.devices:
            self.profile.kind(device.kind)

    @property
    def gradient_share(self) -> float:
        """Bytes of gradients that travel over those that are made, in [0, 1]."""
        return gradient_share(self.gradient_dtype)

    def sizes_of(self, kind: str) -> tuple[int, ...]:
        """Return the microbatch sizes for a kind that does all layers: its own, if it may have any."""
        return self.profile.kind(kind).microbatch_sizes if self.any_size else self.microbatch_sizes

    def plan(self, strategy: str, pipelines: tuple[Pipeline, ...]) -> Plan:
        """Return a plan of these pipelines, which do the batch."""
        return Plan(
            strategy,
            self.profile.model,
            self.global_batch_size,
            pipelines,
            gradient_dtype=self.gradient_dtype,
        )


def problem_of_plan(plan: Plan, profile: ModelProfile, cluster: Cluster) -> Problem:
    """Return the problem that a given plan answers, with the microbatch sizes it uses."""
    sizes = sorted({pipeline.microbatch_size for pipeline in plan.pipelines})
    return Problem(profile, cluster, plan.global_batch_size, tuple(sizes), gradient_dtype=plan.gradient_dtype)


def problem_of(
    profile: ModelProfile,
    cluster: Cluster,
    global_batch_size: int,
    microbatch_size: int | None = None,
    *,
    gradient_dtype: str = FLOAT32,
    thorough: bool = False,
) -> Problem:
    """Return the problem with the microbatch sizes that all kinds were profiled at, or the given one.

    With a given one no device has a larger one.

    Raises: InputError for what is no whole number, or too few or too many.
    """
    sizes: tuple[int, ...]
    global_batch_size = whole_number("global_batch_size", global_batch_size)
    if microbatch_size is not None:
        microbatch_size = whole_number("microbatch_size", microbatch_size)
        if microbatch_size > global_batch_size > 0:
            raise InputError(
                f"microbatch_size is {microbatch_size:,}, more than the batch of "
                f"{global_batch_size:,}; give less"
            )
        sizes = (microbatch_size,)
    else:
        kinds = {device.kind for device in cluster.devices}
        common = set.intersection(*(set(profile.kind(kind).microbatch_sizes) for kind in kinds))
        sizes = tuple(sorted(size for size in common if size <= global_batch_size)) or (1,)
    any_size = microbatch_size is None
    return Problem(
        profile,
        cluster,
        global_batch_size,
        sizes,
        gradient_dtype=gradient_dtype,
        any_size=any_size,
        thorough=thorough,
    )


def check_plan(plan: Plan, profile: ModelProfile, cluster: Cluster) -> None:
    """Check that a plan covers a profile's layers on devices of a cluster.

    Raises: InputError if it does not, or if a device is of a kind that was not profiled.
    """
    if plan.num_layers != profile.num_layers:
        stages = max(len(pipeline.stages) for pipeline in plan.pipelines)
        raise InputError(
            f"the plan covers layers [0, {plan.num_layers}) in {stages} stages, {profile.model!r} has "
            f"{profile.num_layers} layers; the stages must cover them all, once"
        )
    if plan.model != profile.model:
        raise InputError(
            f"the plan is for {plan.model!r}, the profile for {profile.model!r}; give matching ones"
        )
    check_gradient_dtype(plan.gradient_dtype, profile.dtype)
    for name in plan.device_names:
        profile.kind(cluster.device(name).kind)
    if plan.owner_ranges and profile.whole_states:
        raise InputError(
            f"owner_ranges of the plan cuts layer {plan.owner_ranges[0].layer} between devices, and the "
            "optimizer may need all of a parameter to step it; leave owner_ranges out of the plan"
        )
    if profile.resident_states and any(plan.offloaded_layers(name) for name in plan.device_names):
        raise InputError(
            'offload names "optimizer states", and the optimizer has them on the device alone; take '
            "hetpipe's own AdamW, or take it out of the plan"
        )
    if plan.sharding is Sharding.WEIGHTS:
        _check_weights_sharded(profile, [cluster.device(name).kind for name in plan.device_names])
    offloaded = {layer for name in plan.device_names for layer in plan.offloaded_layers(name, FROZEN_WEIGHTS)}
    if offloaded and profile.compiled:
        raise InputError(
            'offload names "frozen weights", and blocks are compiled, with the place of their weights; '
            "profile without --compile, or take it out of the plan"
        )
    views = [profile.on(kind) for kind in profile.kinds]
    if offloaded and not any(movable_bytes(view, layer) for view in views for layer in offloaded):
        raise InputError(
            'offload names "frozen weights", and no block of those stages has any that can move; train '
            "adapters or freeze blocks, or take it out of the plan"
        )
    for stage in (stage for pipeline in plan.pipelines for stage in pipeline.stages):
        steps = bool(plan.offloaded_layers(stage.device, OPTIMIZER_STEP))
        if (OPTIMIZER_STATES in stage.offload or OPTIMIZER_STEP in stage.offload) and (
            {OPTIMIZER_STATES, OPTIMIZER_STEP} <= set(stage.offload)
        ) is not steps:
            raise InputError(
                f'offload of layers {list(stage.layers)} of {stage.device!r} names one of "optimizer states" '
                'and "optimizer step"; the host steps all that it keeps of a device: name both, or leave '
                "optimizer step out of all stages of the device"
            )
    keeping = [
        stage
        for pipeline in plan.pipelines
        for stage in pipeline.stages
        if SAVED_ACTIVATIONS in stage.offload
    ]
    for stage in keeping:
        if not saved_bytes_on_host(profile, *stage.layers):
            raise InputError(
                f'offload of layers {list(stage.layers)} names "saved activations", and none of them is a '
                "block with a backward, whose can move; take it out of the plan"
            )
    if keeping and profile.compiled:
        raise InputError(
            'offload names "saved activations", and blocks are compiled, which keep them as they like; '
            "profile without --compile, or take it out of the plan"
        )


def _check_weights_sharded(profile: ModelProfile, kinds: Iterable[str]) -> None:
    """Check that weights are used as they are held, and so can be dropped.

    Raises: InputError if not.
    """
    if profile.compiled:
        raise InputError("zero is 3, and blocks are compiled; give zero 2, or profile without --compile")
    halves = (BFLOAT16_AUTOCAST, FLOAT16_AUTOCAST)
    lowered = sorted({kind for kind in kinds if profile.dtype_of(kind) in halves})
    if lowered:
        raise InputError(
            f"zero is 3, and {lowered[0]!r} computes in {profile.dtype_of(lowered[0])}, which keeps copies "
            "of all weights in 16 bits; give zero 2"
        )
