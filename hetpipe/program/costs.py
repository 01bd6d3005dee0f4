"""Seconds and bytes of a program's instructions: what the simulator charges, and an emulated device takes.

Here R6 to R10 of docs/clock.md get their seconds; R2, R3 and R5 act in `cost_model.network`.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, TypeVar, cast

from cost_model.cluster import Cluster
from cost_model.errors import InfeasibleError
from cost_model.host_memory import moved_ends_s
from cost_model.layer_costs import Prices
from cost_model.network import FreeAt, Network, Route, reserve
from cost_model.profile import ModelProfile
from cost_model.sum_resources import all_reduce_resources
from cost_model.sum_times import all_reduce_due, broadcast_due, norm_due, reduce_due
from hetpipe.program.instructions import Compute, Gather, Pass, Program, Reduce, Round, Transfer
from hetpipe.program.sync_starts import after_layer_s
from partition.estimates.host_fetches import HostFetches, host_fetches, served_s, taken_s
from partition.estimates.host_moves import plan_step_s, saved_moves_s, stage_visits, weight_moves_s
from partition.estimates.plan_memory import host_bytes, memory_on, stepped_bytes
from partition.plan import Plan, Stage

F = TypeVar("F", bound=Callable[..., Any])


def remembered(method: F) -> F:
    """Return a method for its own object, which remembers answers and does not keep the object."""
    owner, function = weakref.ref(cast(Any, method).__self__), cast(Any, method).__func__

    @cache
    def answer(*args: Any) -> Any:
        return function(owner(), *args)

    return cast(F, answer)


class ProgramCosts:
    """Prices every instruction of one program; each shape of instruction is priced once.

    network, prices: of the cluster and the profile, where there are some already.
    """

    def __init__(
        self,
        program: Program,
        profile: ModelProfile,
        cluster: Cluster,
        network: Network | None = None,
        prices: Prices | None = None,
    ) -> None:
        self.program = program
        self.network = network or Network(cluster, profile.links, profile.all_reduces)
        self.device_names = program.device_names
        self.stages = [pipeline.stages for pipeline in program.plan.pipelines]
        self._prices = prices or Prices(profile)
        self._profile, self._cluster = profile, cluster
        by_name = {device.name: device for device in cluster.devices}
        self.devices = [by_name.get(name) or cluster.device(name) for name in self.device_names]
        self._pipelines = program.plan.pipelines
        self._seconds = remembered(self._stage_seconds)
        self._moves_s = remembered(self._find_moves_s)
        self._stepped: dict[tuple[int, ...], float] = {}
        self._route = remembered(self._find_route)
        self._boundary_bytes = remembered(self._message_bytes)
        self._known_fetches: dict[str, HostFetches] | None = None

    @property
    def cluster(self) -> Cluster:
        """The cluster that the program is for, also what of it the plan leaves out."""
        return self._cluster

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The precision in which each rank computes."""
        return tuple(self._profile.dtype_of(device.kind) for device in self.devices)

    def of(self, program: Program) -> "ProgramCosts":
        """Return the costs of another program for the same plan."""
        return ProgramCosts(program, self._profile, self._cluster, self.network, self._prices)

    def memory_bytes(self, rank: int) -> float:
        """Return what the plan needs on a rank's device."""
        return memory_on(self.program.plan, self._profile, self.devices[rank]).total_bytes

    def compute_s(self, rank: int, compute: Compute) -> float:
        samples = self._pipelines[compute.pipeline].microbatch_samples(compute.microbatch)
        return self._seconds(rank, compute.op, compute.pipeline, compute.stage, samples, compute.layer)

    def _stage_seconds(
        self, rank: int, op: Pass, pipeline: int, stage: int, samples: int, layer: int | None
    ) -> float:
        entry = self._pipelines[pipeline].stages[stage]
        visits = self._visit_ends(rank, op, entry, samples)
        if visits is not None:
            return visits[-1][1] if visits else 0.0
        device, layers = self.devices[rank], entry.layers if layer is None else (layer, layer + 1)
        if op is Pass.FORWARD:
            return self._prices.forward_s(device, *layers, samples)
        return self._prices.backward_s(device, *layers, samples, recompute=entry.recompute)

    def _find_moves_s(self, rank: int) -> dict[int, float]:
        if not self.program.plan.offloads:
            return {}
        return weight_moves_s(self.program.plan, self._profile, self._cluster, self.device_names[rank])

    def _visit_ends(self, rank: int, op: Pass, stage: Stage, samples: int) -> list[tuple[int, float]] | None:
        """Return the visits of a pass: layers, and when each is over; None where nothing of the stage moves.

        What moves is of this stage, or weights of one with its layers on the same device.
        """
        if not self.program.plan.offloads:
            return None
        weights_s, device = self._moves_s(rank), self.devices[rank]
        saved_s = saved_moves_s(self.program.plan, self._profile, self._cluster, stage, samples)
        if not saved_s and weights_s.keys().isdisjoint(range(*stage.layers)):
            return None
        visits = stage_visits(self._prices, device, stage, samples, backward=op is Pass.BACKWARD)
        ends_s = moved_ends_s(visits, weights_s, saved_s, forward=op is Pass.FORWARD)
        return [(layer, end_s) for (layer, _), end_s in zip(visits, ends_s, strict=True)]

    def after_layer_s(self, rank: int, compute: Compute, layer: int) -> float:
        """Return the seconds of a backward that come after that of one of its stage's layers."""
        pipeline = self._pipelines[compute.pipeline]
        stage, samples = pipeline.stages[compute.stage], pipeline.microbatch_samples(compute.microbatch)
        visits = self._visit_ends(rank, Pass.BACKWARD, stage, samples)
        if visits is not None:
            over_s = max((end_s for each, end_s in visits if each >= layer), default=0.0)
            return visits[-1][1] - over_s if visits else 0.0
        return after_layer_s(self._prices, self.devices[rank], stage, samples, layer)

    @property
    def _fetches(self) -> dict[str, HostFetches]:
        if self._known_fetches is None:
            self._known_fetches = host_fetches(self.program.plan, self._profile, self._cluster)
        return self._known_fetches

    def step_s(self, rank: int) -> float:
        """Return the seconds of the optimizer on a rank, and in which a GPU's new weights go to its host."""
        return self._optimizer_s(rank) + served_s(self._fetches, self._cluster, self.device_names[rank])

    def _optimizer_s(self, rank: int) -> float:
        plan, name = self.program.plan, self.device_names[rank]
        if plan.offloads:
            return plan_step_s(plan, self._prices, self._cluster, name)
        if plan.state_owners is not None:
            num_bytes = stepped_bytes(plan, self._profile, name)
        elif (layers := plan.layers_of(name)) in self._stepped:
            num_bytes = self._stepped[layers]
        else:
            num_bytes = self._stepped[layers] = stepped_bytes(plan, self._profile, name)
        return self._prices.update_s(self.devices[rank], num_bytes)

    def route(self, transfer: Transfer) -> Route:
        """Return the way of a message from the stage of its SEND to the peer's."""
        return self._route(transfer.pipeline, transfer.stage, transfer.peer_stage)

    def _find_route(self, pipeline: int, stage: int, peer_stage: int) -> Route:
        stages = self._pipelines[pipeline].stages
        return self.network.route(stages[stage].device, stages[peer_stage].device)

    def transfer_bytes(self, transfer: Transfer) -> float:
        samples = self._pipelines[transfer.pipeline].microbatch_samples(transfer.microbatch)
        return self._boundary_bytes(transfer.pipeline, transfer.boundary, samples)

    def _message_bytes(self, pipeline: int, boundary: int, samples: int) -> float:
        stages, cluster = self._pipelines[pipeline].stages, self._cluster
        giver, taker = (cluster.device(stages[index].device) for index in (boundary - 1, boundary))
        return self._prices.boundary_bytes(stages[boundary].start, samples, giver, taker)

    def sync_bytes(self, bucket: int) -> float:
        """Return the bytes that each owner of a bucket gives to its sum, as they travel."""
        return self.program.plan.gradient_share * self.parameter_bytes(bucket)

    def parameter_bytes(self, bucket: int) -> float:
        """Return the bytes of a bucket's parameters, as they are broadcast."""
        return self.program.buckets[bucket].num_bytes(self._profile)

    def send_due(self, free_at: FreeAt, send: Transfer, ready_s: float) -> float:
        """Return when a message that is ready at ready_s is at its receiver, and reserve its route."""
        return reserve(free_at, self.route(send), ready_s, self.transfer_bytes(send))

    def summed_resources(self) -> set[int]:
        """Return what the SYNCs of all buckets occupy, where states are not sharded."""
        found: set[int] = set()
        for bucket in self.program.buckets:
            names = [self.device_names[rank] for rank in bucket.ranks]
            found |= all_reduce_resources(self.network, names, bucket.collective)
        return found

    def sync_due(self, free_at: FreeAt, bucket: int, ready_s: Mapping[int, float]) -> dict[int, float]:
        """Return when a bucket's SYNC is over for each rank, given when each owner was ready (by rank)."""
        entry, num_bytes = self.program.buckets[bucket], self.sync_bytes(bucket)
        ready = self._by_name(entry.ranks, ready_s)
        if entry.state_owner is not None:
            root = self.device_names[entry.state_owner]
            due = reduce_due(free_at, self.network, num_bytes, ready, root)
        else:
            due = all_reduce_due(free_at, self.network, num_bytes, ready, entry.collective)
        return {rank: due[self.device_names[rank]] for rank in entry.ranks}

    def broadcast_due(self, free_at: FreeAt, bucket: int, ready_s: Mapping[int, float]) -> dict[int, float]:
        """Return when each rank has a bucket's new parameters, given when each was ready (by rank).

        They travel as they are, in whatever dtype gradients do.
        """
        entry = self.program.buckets[bucket]
        assert entry.state_owner is not None
        ready, root = self._by_name(entry.ranks, ready_s), self.device_names[entry.state_owner]
        due = broadcast_due(free_at, self.network, self.parameter_bytes(bucket), ready, root)
        return {rank: due[self.device_names[rank]] for rank in entry.ranks}

    def round_due(self, free_at: FreeAt, entry: Round, ready_s: Mapping[int, float]) -> dict[int, float]:
        """Return when a REDUCE or a GATHER is over for each rank, given when each was ready (by rank).

        A GATHER of a rank alone is one message from the owner; to a GPU it comes through its host.
        """
        if isinstance(entry, Gather) and self.program.plan.fetches_apart:
            bucket = self.program.buckets[entry.bucket]
            assert bucket.state_owner is not None
            owner, num_bytes = self.device_names[bucket.state_owner], self.parameter_bytes(entry.bucket)
            return {
                rank: reserve(free_at, self.network.route(owner, self.device_names[rank]), at_s, num_bytes)
                + taken_s(self._fetches, self._cluster, self.device_names[rank], num_bytes)
                for rank, at_s in ready_s.items()
            }
        due = self.sync_due if isinstance(entry, Reduce) else self.broadcast_due
        return due(free_at, entry.bucket, ready_s)

    def norm_due(self, free_at: FreeAt, ready_s: Mapping[int, float]) -> dict[int, float]:
        """Return when each rank has the norm, given when each was ready for it (by rank)."""
        ready = self._by_name(range(len(self.device_names)), ready_s)
        due = norm_due(free_at, self.network, ready)
        return {rank: due[name] for rank, name in enumerate(self.device_names)}

    def _by_name(self, ranks: Iterable[int], ready_s: Mapping[int, float]) -> dict[str, float]:
        """In order of rank, so that the messages are the same however the ranks arrive."""
        return {self.device_names[rank]: ready_s[rank] for rank in ranks}


def check_memory(plan: Plan, profile: ModelProfile, cluster: Cluster) -> None:
    """Check that every device holds what the plan needs on it, and every host what is kept there.

    Raises: InfeasibleError naming the device that lacks most, or the host, and its missing bytes.
    """
    _check_hosts(plan, profile, cluster)
    devices = [cluster.device(name) for name in plan.device_names]
    needs = [(device, memory_on(plan, profile, device).total_bytes) for device in devices]
    device, need = max(needs, key=lambda pair: pair[1] - pair[0].usable_bytes)
    missing = need - device.usable_bytes
    if missing > 0:
        layers = plan.layers_of(device.name)
        raise InfeasibleError(
            f"{plan.strategy}: layers {layers[0]} to {layers[-1]} need {need:,.0f} bytes on {device.name!r}, "
            f"which has {device.usable_words}; {missing:,.0f} bytes are missing: give it fewer layers, a "
            "smaller microbatch, or more memory",
            device=device.name,
            missing_bytes=missing,
        )


def _check_hosts(plan: Plan, profile: ModelProfile, cluster: Cluster) -> None:
    held = host_bytes(plan, profile, cluster)
    for node in cluster.nodes:
        room = 0.0 if node.host_memory is None else node.host_memory.memory_bytes
        missing = held.get(node.name, 0.0) - room
        if missing > 0:
            raise InfeasibleError(
                f"{plan.strategy}: {held[node.name]:,.0f} bytes of states, weights and saved "
                f"activations are to be kept in the memory of node {node.name!r}, whose host_memory is "
                f"{room:,.0f}; {missing:,.0f} bytes are missing: offload fewer stages, shard fewer weights, "
                "or give the node more",
                missing_bytes=missing,
            )
