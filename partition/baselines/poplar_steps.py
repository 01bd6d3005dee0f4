"""Poplar's allocation where gradients, or weights too, are sharded: all devices run equally many rounds.

Source: Zhang et al., "Poplar: Efficient Scaling of Distributed DNN Training on Heterogeneous GPU Clusters",
AAAI 2025, the batch allocation of ZeRO stages 2 and 3. Every microbatch is a round of sums in which all take
part, so a time T of a round is searched for: each device has the largest microbatch that it computes in T,
which fixes the number of rounds; the last one takes what is left.

What differs: T is the time of some device for a microbatch size that its kind was profiled at, or for its
largest (`largest_microbatch`), and every one of these is tried. What a round's communication takes is for the
simulator to say, which judges two: the candidate with the fewest seconds of computation, and that with the
fewest rounds.
"""

from collections.abc import Iterator, Mapping

from cost_model.cluster import Device
from cost_model.errors import InfeasibleError, InputError
from cost_model.sharding import Sharding
from partition.baselines.largest_microbatch import largest_microbatches, tried_sizes
from partition.baselines.strategy import least_of, shortfall
from partition.baselines.whole_models import largest_fitting
from partition.estimates.batch_split import in_proportion
from partition.estimates.optimizer_sharding import with_state_owners
from partition.estimates.pipeline_costs import PipelineCosts
from partition.plan import Pipeline, Plan, Stage
from partition.problem import Evaluate, Problem, check_plan


def poplar_2(problem: Problem, evaluate: Evaluate | None = None) -> Plan:
    """Run equal numbers of unequal microbatches on all devices, gradients sharded.

    Raises: InfeasibleError if none fits.
    """
    return _in_rounds("poplar-2", problem, Sharding.GRADIENTS, evaluate)


def poplar_3(problem: Problem, evaluate: Evaluate | None = None) -> Plan:
    """Run equal numbers of unequal microbatches on all devices, gradients and weights sharded.

    Raises: InfeasibleError if none fits.
    """
    return _in_rounds("poplar-3", problem, Sharding.WEIGHTS, evaluate)


def sharded_replicas(strategy: str, problem: Problem, sharding: Sharding, sizes: Mapping[str, int]) -> Plan:
    """Return the whole model on some devices, each with its microbatch size, in equally many rounds.

    The last round takes what is left, in proportion; of a single round who gets nothing is left out. Owners
    are those of `with_state_owners`; whether all fits is not asked.
    """
    each, batch = sum(sizes.values()), problem.global_batch_size
    full, rest = divmod(batch, each)
    last = in_proportion(list(map(float, sizes.values())), rest) if rest else [0] * len(sizes)
    layers = (0, problem.profile.num_layers)
    pipelines = tuple(
        Pipeline(size, full * size + more, (Stage((name,), layers, 1),))
        for (name, size), more in zip(sizes.items(), last, strict=True)
        if full * size + more
    )
    plan = Plan(
        strategy, problem.profile.model, batch, pipelines, int(sharding),
        gradient_dtype=problem.gradient_dtype,
    )  # fmt: skip
    check_plan(plan, problem.profile, problem.cluster)
    return with_state_owners(plan, problem.profile, problem.cluster)


def _in_rounds(strategy: str, problem: Problem, sharding: Sharding, evaluate: Evaluate | None) -> Plan:
    if len(problem.cluster.devices) < 2:
        raise InfeasibleError(f"{strategy}: one device has nobody to share with; let `auto` plan for it")
    found: list[tuple[float, int, Plan]] = []
    errors: list[InfeasibleError] = []
    try:
        candidates = list(_candidates(strategy, problem, sharding))
    except InputError as error:  # what is not sharded at all: 16 bits, gradients in bf16
        raise InfeasibleError(f"{strategy}: {error}") from error
    for round_s, plan in candidates:
        lacking = shortfall(problem, plan)
        if lacking is None:
            rounds = max(pipeline.num_microbatches for pipeline in plan.pipelines)
            found.append((rounds * round_s, rounds, plan))
        else:
            errors.append(lacking)
    if not found:
        raise least_of(strategy, errors)
    by_time = sorted(found, key=lambda entry: entry[:2])
    if evaluate is None:
        return by_time[0][2]
    few = min(found, key=lambda entry: (entry[1], entry[0]))
    plans = [plan for *_, plan in dict.fromkeys((by_time[0], few))]
    if len(plans) == 1:
        return plans[0]
    return min(plans, key=lambda plan: evaluate(plan).step_s)


def _candidates(strategy: str, problem: Problem, sharding: Sharding) -> Iterator[tuple[float, Plan]]:
    """Yield the seconds of a round, and the plan with the largest microbatches that are computed in them.

    Microbatches that do not fit where nothing is owned are left out, but the smallest.
    """
    costs, layers = PipelineCosts(problem), problem.profile.num_layers
    smallest = min(*problem.microbatch_sizes, problem.global_batch_size)
    largest = {name: max(size, smallest) for name, size in largest_microbatches(problem, sharding).items()}
    leaders = {
        (device.kind, device.speed, largest[device.name]): device for device in problem.cluster.devices
    }
    tried = {key: tried_sizes(problem, key[0], key[2]) for key in leaders}

    def round_s(device: Device, size: int) -> float:
        return costs.busy_s(device, 0, layers, size)

    def within(key: tuple[str, float, int], seconds: float) -> int:
        device = leaders[key]
        if problem.any_size:
            return largest_fitting(lambda size: round_s(device, size) <= seconds, key[2])
        return max((size for size in tried[key] if round_s(device, size) <= seconds), default=0)

    for seconds in sorted({round_s(leaders[key], size) for key, sizes in tried.items() for size in sizes}):
        found = {key: within(key, seconds) for key in leaders}
        each = {
            device.name: found[device.kind, device.speed, largest[device.name]]
            for device in problem.cluster.devices
        }
        chosen = {name: size for name, size in each.items() if size}
        if chosen:  # where a larger microbatch was measured to be sooner, nobody may be found within its time
            yield seconds, sharded_replicas(strategy, problem, sharding, chosen)
