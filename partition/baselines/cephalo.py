"""Cephalo: computation by speed, states by free memory, and a layer for all microbatches before the next.

Source: Guo et al., "Cephalo: Harnessing Heterogeneous GPU Clusters for Training Transformer Models", ICS
2025. Weights, gradients and optimizer states are sharded, as in ZeRO stage 3, by the memory that is free,
whoever computes how much. Each device has its own microbatch, and number of them, so that the last one ends
first. A layer takes all microbatches of a device before the next layer does, so that it is gathered once.

What differs: their dynamic programme over devices, samples and sizes has the least longest time of them all,
which is found here by bisection, since nothing but the batch and the memory of all couples the devices.
Shards are whole layers, or ranges where only these fit. Activations stay on the device, recomputed layer by
layer or not, in place of host memory: where not all microbatches fit at once they pass in groups, as few as
memory takes. Gathers and sums are for the simulator to price, which judges two plans: least computation, and
fewest groups. Where weights cannot be sharded (one device, 16 bits by autocast, compiled blocks) only
optimizer states are (ZeRO stage 1).
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from cost_model.cluster import Device
from cost_model.dtypes import FLOAT32
from cost_model.errors import InfeasibleError, InputError
from cost_model.memory import state_home_bytes
from cost_model.sharding import Sharding
from partition.baselines.largest_microbatch import largest_microbatches, tried_sizes
from partition.baselines.poplar_steps import sharded_replicas
from partition.baselines.strategy import least_of, missing_bytes, shortfall
from partition.baselines.whole_models import LEAST_S, WholeModels, largest_fitting, sharded
from partition.estimates.batch_split import in_proportion
from partition.estimates.optimizer_sharding import with_state_owners
from partition.estimates.pipeline_costs import PipelineCosts
from partition.estimates.plan_memory import memory_without_owner
from partition.plan import Pipeline, Plan, Stage
from partition.problem import Evaluate, Problem

PRECISION = 1e-9  # of a time
RESERVES = (0.0, 0.5, 1.0)
"""Of a device's part of all states, by memory, which microbatches leave free; the first that fits counts."""


@dataclass(frozen=True, slots=True)
class _Microbatch:
    """A microbatch that a device may have, its seconds, and how many of them memory takes together."""

    seconds: float
    size: int
    most: int
    recompute: bool = False

    def within(self, seconds: float) -> int:
        """Return how many are computed in a time."""
        return min(self.most, int(seconds / self.seconds * (1 + PRECISION)))


NOTHING = _Microbatch(LEAST_S, 1, 0), 0
Chosen = Mapping[str, tuple[_Microbatch, int]]
"""The microbatches that the devices of each class have, and how many, by the first device of the class."""


def cephalo(problem: Problem, evaluate: Evaluate | None = None) -> Plan:
    """Choose microbatch and number of them for each device so that the last ends first; states lie apart.

    Raises: InfeasibleError of what lacks least.
    """
    try:
        shards = len(problem.cluster.devices) > 1 and problem.gradient_dtype == FLOAT32
        largest = largest_microbatches(problem, Sharding.WEIGHTS) if shards else {}
    except InputError:
        largest = {}
    if not largest:
        return sharded(problem, partial(_states_sharded, "cephalo"))
    found: list[tuple[float, int, Plan]] = []
    errors: list[InfeasibleError] = []
    for seconds, groups, plan in _candidates("cephalo", problem, largest):
        lacking = shortfall(problem, plan)
        if lacking is None:
            found.append((seconds, groups, plan))
        else:
            errors.append(lacking)
    if not found:
        raise least_of("cephalo", errors)
    by_time = sorted(found, key=lambda entry: entry[:2])
    plans = list(dict.fromkeys([by_time[0][2], min(found, key=lambda entry: (entry[1], entry[0]))[2]]))
    if evaluate is None or len(plans) == 1:
        return plans[0]
    return min(plans, key=lambda plan: evaluate(plan).step_s)


def _candidates(name: str, problem: Problem, largest: Mapping[str, int]) -> Iterator[tuple[float, int, Plan]]:
    """Yield (seconds of computation, groups, plan), fewest groups first, until none is recomputed.

    In the last one all devices have the smallest microbatch, one at once.
    """
    classes, batch = _Classes(problem, largest), problem.global_batch_size
    groups = 1
    while groups <= batch:
        for reserve in RESERVES:
            chosen = _soonest(classes.microbatches(reserve), classes.counts, -(-batch // groups))
            if chosen is None:
                break
            seconds, parts = chosen
            plan = classes.plan(name, parts)
            yield groups * seconds, groups, plan
            if shortfall(problem, plan) is None:
                if not any(part.recompute for part, count in parts.values() if count):
                    return
                break
        groups *= 2
    size = min(*problem.microbatch_sizes, batch)
    each = sharded_replicas(
        name, problem, Sharding.WEIGHTS, {device.name: size for device in problem.cluster.devices[:batch]}
    )
    costs, last = PipelineCosts(problem), problem.profile.num_layers
    rounds = max(pipeline.num_microbatches for pipeline in each.pipelines)
    slowest_s = max(costs.busy_s(device, 0, last, size) for device in problem.cluster.devices)
    yield rounds * slowest_s, rounds, each


class _Classes:
    """The devices of a problem by what they can do; owns the bytes that microbatches were found to need."""

    def __init__(self, problem: Problem, largest: Mapping[str, int]) -> None:
        self._problem, self._largest = problem, largest
        self._devices = problem.cluster.devices
        self._leader_of = {
            device.name: next(other for other in self._devices if _key(other) == _key(device))
            for device in self._devices
        }
        self.counts = Counter(leader.name for leader in self._leader_of.values())
        self._costs, self._needs = PipelineCosts(problem), dict[tuple[str, int, int, bool], float]()
        profile = problem.profile
        states = state_home_bytes(profile, range(profile.num_layers))
        self._state_bytes = states * (2 + profile.optimizer_bytes_per_parameter_byte)

    def microbatches(self, reserve: float) -> dict[str, list[_Microbatch]]:
        """Return what the first device of each class may have; reserve: see `RESERVES`."""
        whole = sum(device.usable_bytes for device in self._devices)
        found = {}
        for name in self.counts:
            device = self._problem.cluster.device(name)
            room = device.usable_bytes * (1 - reserve * min(1.0, self._state_bytes / whole))
            found[name] = list(self._of(device, room))
        return found

    def _of(self, device: Device, room_bytes: float) -> Iterator[_Microbatch]:
        problem, last = self._problem, self._problem.profile.num_layers
        batch = problem.global_batch_size
        sizes = {min(size, batch) for size in problem.sizes_of(device.kind)}
        sizes.update(tried_sizes(problem, device.kind, self._largest[device.name]))
        for size in sorted(sizes):
            for recompute in (False, True):
                if most := self._most(device, room_bytes, size, recompute):
                    seconds = self._costs.busy_s(device, 0, last, size)
                    if recompute:
                        seconds += self._costs.prices.forward_s(device, 0, last, size)
                    yield _Microbatch(max(seconds, LEAST_S), size, most, recompute)

    def _most(self, device: Device, room_bytes: float, size: int, recompute: bool) -> int:
        """Return how many microbatches at once a device has room for."""
        needs_bytes = partial(self._needs_bytes, device, size, recompute)
        most, guess = -(-self._problem.global_batch_size // size), 1
        if most > 2 and (more_bytes := needs_bytes(2) - needs_bytes(1)) > 0:
            guess = 1 + int((room_bytes - needs_bytes(1)) / more_bytes)  # each more needs as much
        return largest_fitting(lambda count: needs_bytes(count) <= room_bytes, most, guess)

    def _needs_bytes(self, device: Device, size: int, recompute: bool, count: int) -> float:
        """Return what a device needs, beside what owners keep, with so many microbatches at once."""
        key = (device.name, size, count, recompute)
        if key not in self._needs:
            other = next(other for other in self._devices if other.name != device.name)
            plan = self._plan_of(
                {device.name: (size, size * count, count, recompute), other.name: (1, 1, 1, True)}
            )
            need = memory_without_owner(plan, self._problem.profile.on(device.kind), device.name)
            self._needs[key] = need.total_bytes
        return self._needs[key]

    def plan(self, name: str, chosen: Chosen) -> Plan:
        """Return the plan in which each device has its part of the batch, and owners by free memory."""
        batch = self._problem.global_batch_size
        parts = [chosen.get(self._leader_of[device.name].name, NOTHING) for device in self._devices]
        shares = in_proportion([float(part.size * count) for part, count in parts], batch)
        plan = self._plan_of(
            {
                device.name: (min(part.size, share), share, count, part.recompute)
                for device, (part, count), share in zip(self._devices, parts, shares, strict=True)
                if share
            },
            name,
        )
        return with_state_owners(plan, self._problem.profile, self._problem.cluster)

    def _plan_of(self, parts: Mapping[str, tuple[int, int, int, bool]], name: str = "cephalo") -> Plan:
        """Return the plan of (microbatch size, samples, in flight, recompute) by device, without owners."""
        layers = (0, self._problem.profile.num_layers)
        pipelines = tuple(
            Pipeline(
                size,
                samples,
                (Stage((device,), layers, in_flight, recompute, segment_layers=int(recompute)),),
            )
            for device, (size, samples, in_flight, recompute) in parts.items()
        )
        total = sum(pipeline.num_samples for pipeline in pipelines)
        return Plan(name, self._problem.profile.model, total, pipelines, int(Sharding.WEIGHTS))


def _key(device: Device) -> tuple[str, float, float]:
    return device.kind, device.speed, device.usable_bytes


def _soonest(
    options: Mapping[str, Sequence[_Microbatch]], counts: Mapping[str, int], num_samples: int
) -> tuple[float, Chosen] | None:
    """Return the least time in which all do so many samples, and what each class does.

    None if memory takes fewer. counts: devices of each class.
    """

    def chosen(seconds: float) -> Chosen:
        return {
            leader: max(
                ((part, part.within(seconds)) for part in parts),
                key=lambda entry: (entry[0].size * entry[1], not entry[0].recompute, entry[0].size),
            )
            for leader, parts in options.items()
            if parts
        }

    def done(seconds: float) -> int:
        return sum(counts[leader] * part.size * count for leader, (part, count) in chosen(seconds).items())

    most = sum(
        counts[leader] * max((part.size * part.most for part in parts), default=0)
        for leader, parts in options.items()
    )
    if most < num_samples:
        return None
    low, high = 0.0, min(part.seconds for parts in options.values() for part in parts)
    while done(high) < num_samples:
        low, high = high, 2 * high
    while high - low > PRECISION * high:
        middle = (low + high) / 2
        low, high = (low, middle) if done(middle) >= num_samples else (middle, high)
    return high, chosen(high)


def _states_sharded(name: str, problem: Problem) -> Plan:
    """Return the plan in which each device has the whole model, but for optimizer states."""
    copies, batch = WholeModels(problem), problem.global_batch_size
    sizes = {min(size, batch) for size in problem.microbatch_sizes}
    options = {
        device.name: [
            _Microbatch(max(copies.pipeline(device, size).timing.busy_s[0], LEAST_S), size, batch)
            for size in sorted(fit)
        ]
        for device in copies.leaders
        if (fit := copies.fitting(device, sizes))
    }
    if not options:
        lacking = (copies.shortfall(name, [device], min(sizes)) for device in copies.leaders)
        raise min(lacking, key=missing_bytes)
    counts = Counter(leader for leader in copies.leader_of.values() if leader in options)
    soonest = _soonest(options, counts, batch)
    assert soonest is not None  # any device could do all
    _, best = soonest
    timed = copies.timed({leader: part.size for leader, (part, _) in best.items()})
    parts = [best[copies.leader_of[each.devices[0].name]] for each in timed]
    shares = [part.size * count for part, count in parts]
    surplus = sum(shares) - batch
    for place in sorted(range(len(shares)), key=lambda place: -timed[place].timing.total_s(shares[place])[0]):
        taken = min(surplus, timed[place].microbatch_size, shares[place])
        shares[place], surplus = shares[place] - taken, surplus - taken
    return copies.plan(name, timed, shares)
