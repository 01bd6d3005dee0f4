"""Seconds and bytes of a program's instructions on a cluster: what the simulator charges, and what an
emulated device takes."""

from functools import cache

from cost_model.cluster import Cluster
from cost_model.communication import Network, Route
from cost_model.pricing import Prices
from cost_model.profile import ModelProfile
from hetpipe.instructions import Compute, Pass, Program, Transfer


class ProgramCosts:
    """Prices every instruction of one program."""

    def __init__(self, program: Program, profile: ModelProfile, cluster: Cluster) -> None:
        self.program = program
        self.network = Network(cluster, profile.links)
        self._prices = Prices(profile)
        self._profile = profile
        self._devices = [cluster.device(name) for name in program.device_names]
        self._seconds = cache(self._stage_seconds)
        self.num_stages = [len(pipeline.stages) for pipeline in program.plan.pipelines]

    def compute_s(self, rank: int, compute: Compute) -> float:
        samples = self.program.samples(compute)
        return self._seconds(rank, compute.op, compute.pipeline, compute.stage, samples)

    def _stage_seconds(self, rank: int, op: Pass, pipeline: int, stage: int, samples: int) -> float:
        entry = self.program.plan.pipelines[pipeline].stages[stage]
        device = self._devices[rank]
        if op is Pass.FORWARD:
            return self._prices.forward_s(device, entry.start, entry.stop, samples)
        return self._prices.backward_s(device, entry.start, entry.stop, samples, recompute=entry.recompute)

    def step_s(self, rank: int) -> float:
        """Seconds of the optimizer on a rank."""
        device = self._devices[rank]
        return self._prices.optimizer_s(device, self.program.plan.layers_of(device.name))

    def route(self, transfer: Transfer) -> Route:
        """The way of a message from the stage of its SEND to the peer's."""
        stages = self.program.pipeline(transfer).stages
        return self.network.route(stages[transfer.stage].device, stages[transfer.peer_stage].device)

    def transfer_bytes(self, transfer: Transfer) -> float:
        layer = self.program.pipeline(transfer).stages[transfer.boundary].start
        return self._prices.boundary_bytes(layer, self.program.samples(transfer))

    def sync_bytes(self, bucket: int) -> float:
        return self.program.buckets[bucket].num_bytes(self._profile)
