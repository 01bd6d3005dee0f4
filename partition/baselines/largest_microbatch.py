"""The largest microbatch of the whole model on each device under a stage of ZeRO, as Poplar profiles it.

Source: Zhang et al., "Poplar: Efficient Scaling of Distributed DNN Training on Heterogeneous GPU Clusters",
AAAI 2025, the online profiling: batches are doubled until memory ends, then bisected.

What differs: bytes of a microbatch are those measured of each layer on the device, so that whether a whole
model fits is arithmetic, for models and stages of ZeRO that no device has run. Where states are sharded a
device is asked that owns none of them: who owns what depends on the plan. None is larger than what its kind
was profiled at.
"""

from collections.abc import Iterable, Sequence

from cost_model.cluster import Device
from cost_model.sharding import Sharding
from partition.baselines.whole_models import WholeModels, largest_fitting
from partition.estimates.optimizer_sharding import unsharded
from partition.estimates.plan_memory import memory_without_owner
from partition.plan import Pipeline, Plan, Stage
from partition.problem import Problem, check_plan

ROUNDS = 2
"""Of microbatches in the plan that is asked for its memory: in one alone nothing is added up."""


def largest_microbatches(problem: Problem, sharding: Sharding) -> dict[str, int]:
    """Return the largest microbatch by device, 0 where none fits.

    Raises: InputError if the model cannot be sharded so.
    """
    devices = problem.cluster.devices
    if not sharding.by_layer:
        share = 1.0 if sharding is Sharding.NONE else 0.0
        copies = WholeModels(unsharded(problem, share))
        found = {device.name: copies.largest(device) for device in copies.leaders}
        return {device.name: found[copies.leader_of[device.name]] for device in devices}
    check_plan(_replicas(problem, sharding, 1, devices), problem.profile, problem.cluster)
    known: dict[tuple[str, float], int] = {}
    for device in devices:
        key = device.kind, device.usable_bytes
        if key not in known:
            known[key] = _largest(problem, sharding, device)
    return {device.name: known[device.kind, device.usable_bytes] for device in devices}


def tried_sizes(problem: Problem, kind: str, largest: int) -> list[int]:
    """Return sizes at which a kind may be fastest, rising: those it was profiled at, and the largest.

    largest: that fits, 0 where none does. Between two of these samples a second only rise or only fall.
    """
    batch = problem.global_batch_size
    known: Iterable[int] = {min(size, batch) for size in problem.sizes_of(kind)}
    found = {size for size in known if size <= largest}
    return sorted(found | {largest} if problem.any_size and largest else found)


def _largest(problem: Problem, sharding: Sharding, device: Device) -> int:
    others = [other for other in problem.cluster.devices if other.name != device.name]

    def fits(size: int) -> bool:
        plan = _replicas(problem, sharding, size, [device, *others[:1]])
        need = memory_without_owner(plan, problem.profile.on(device.kind), device.name)
        return need.total_bytes <= device.usable_bytes

    return largest_fitting(fits, min(max(problem.sizes_of(device.kind)), problem.global_batch_size))


def _replicas(problem: Problem, sharding: Sharding, size: int, devices: Sequence[Device]) -> Plan:
    """Return full rounds of microbatches of a size on some devices, whatever the batch."""
    layers = (0, problem.profile.num_layers)
    pipelines = tuple(
        Pipeline(size, size * ROUNDS, (Stage((device.name,), layers, 1),)) for device in devices
    )
    total = sum(pipeline.num_samples for pipeline in pipelines)
    return Plan("replicas", problem.profile.model, total, pipelines, int(sharding))
