"""Seconds and bytes of a program's instructions on a cluster: what the simulator charges, and what an
emulated device takes."""

from functools import cache

from cost_model.cluster import Cluster
from cost_model.communication import Network, Route
from cost_model.pricing import Prices
from cost_model.profile import ModelProfile
from hetpipe.instructions import Compute, Pass, Program, Transfer


class ProgramCosts:
    """Prices every instruction of one program; each shape of instruction is priced once.

    network: of the cluster and the profile, where there is one already.
    """

    def __init__(
        self, program: Program, profile: ModelProfile, cluster: Cluster, network: Network | None = None
    ) -> None:
        self.program = program
        self.network = network or Network(cluster, profile.links, profile.all_reduces)
        self.device_names = program.device_names
        self.num_stages = [len(pipeline.stages) for pipeline in program.plan.pipelines]
        self._prices = Prices(profile)
        self._profile = profile
        by_name = {device.name: device for device in cluster.devices}
        self._devices = [by_name.get(name) or cluster.device(name) for name in self.device_names]
        self._pipelines = program.plan.pipelines
        self._seconds = cache(self._stage_seconds)
        self._route = cache(self._find_route)
        self._boundary_bytes = cache(self._message_bytes)
        held: dict[str, set[int]] = {name: set() for name in self.device_names}
        for pipeline in self._pipelines:
            for stage in pipeline.stages:
                held[stage.device].update(range(*stage.layers))
        self._held = [tuple(sorted(held[name])) for name in self.device_names]

    def compute_s(self, rank: int, compute: Compute) -> float:
        samples = self._pipelines[compute.pipeline].microbatch_samples(compute.microbatch)
        return self._seconds(rank, compute.op, compute.pipeline, compute.stage, samples)

    def _stage_seconds(self, rank: int, op: Pass, pipeline: int, stage: int, samples: int) -> float:
        entry = self._pipelines[pipeline].stages[stage]
        device = self._devices[rank]
        if op is Pass.FORWARD:
            return self._prices.forward_s(device, entry.start, entry.stop, samples)
        return self._prices.backward_s(device, entry.start, entry.stop, samples, recompute=entry.recompute)

    def step_s(self, rank: int) -> float:
        """Seconds of the optimizer on a rank."""
        return self._prices.optimizer_s(self._devices[rank], self._held[rank])

    def route(self, transfer: Transfer) -> Route:
        """The way of a message from the stage of its SEND to the peer's."""
        return self._route(transfer.pipeline, transfer.stage, transfer.peer_stage)

    def _find_route(self, pipeline: int, stage: int, peer_stage: int) -> Route:
        stages = self._pipelines[pipeline].stages
        return self.network.route(stages[stage].device, stages[peer_stage].device)

    def transfer_bytes(self, transfer: Transfer) -> float:
        samples = self._pipelines[transfer.pipeline].microbatch_samples(transfer.microbatch)
        return self._boundary_bytes(transfer.pipeline, transfer.boundary, samples)

    def _message_bytes(self, pipeline: int, boundary: int, samples: int) -> float:
        return self._prices.boundary_bytes(self._pipelines[pipeline].stages[boundary].start, samples)

    def sync_bytes(self, bucket: int) -> float:
        return self.program.buckets[bucket].num_bytes(self._profile)
