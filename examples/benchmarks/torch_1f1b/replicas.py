"""One rank of both: a replica under hetpipe's executor, and one under torch's DistributedDataParallel."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from encoder import SEED, Encoder
from pairs import Runtime, compare, gradient_difference, timed
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from cost_model.cluster import CPU, Cluster, Device, Link, Node
from cost_model.layer_profile import LayerProfile, LayerTimes
from cost_model.profile import KindProfile, ModelProfile
from hetpipe.models.chain import ChainModel
from hetpipe.models.keyed_dropout import KeyedDropout
from hetpipe.program.costs import ProgramCosts
from hetpipe.program.instructions import Program, Schedule
from hetpipe.program.lowering import lower_as
from hetpipe.runtime.bucket_parameters import counted_names
from hetpipe.runtime.executor import Executor
from hetpipe.runtime.gradient_sync import GradientSync
from hetpipe.runtime.optimizer import Optimizer
from hetpipe.runtime.pace import Pace
from hetpipe.runtime.processes import Emit
from hetpipe.runtime.rank_setup import boundaries_of
from hetpipe.runtime.stage_runner import Microbatch, StageRunner
from hetpipe.runtime.transport import DistributedTransport
from partition.plan import Pipeline, Plan, Stage

TIMEOUT_S = 600.0
WARM_UP = 3
CLIP_NORM = 1.0
LEARNING_RATE = 1e-4


@dataclass(frozen=True, slots=True)
class Case:
    """A model as an nn.Sequential on each of some ranks, and the microbatches of each."""

    num_ranks: int
    num_microbatches: int
    microbatch_size: int
    model: Encoder
    bucket_bytes: float

    @property
    def samples_of_rank(self) -> int:
        return self.num_microbatches * self.microbatch_size

    @property
    def weight(self) -> float:
        """What a token's loss counts."""
        return 1 / (self.num_ranks * self.samples_of_rank * self.model.terms_of_sample)


class Ours:
    """hetpipe's executor on the whole program of a plan with a pipeline of one stage on each rank."""

    def __init__(self, case: Case, rank: int) -> None:
        chain = case.model.chain()
        profile, cluster = profile_of(chain), cluster_of(case.num_ranks)
        program = program_of(case, chain, profile, cluster)
        model = chain.materialise(range(chain.num_layers), SEED)
        self._parameters = model.owned_parameters()
        counted = counted_names(program, rank, chain)
        self._stages = StageRunner(program, model.train(), KeyedDropout(SEED), case.model.loss)
        self._executor = Executor(
            ProgramCosts(program, profile, cluster),
            rank,
            stages=self._stages,
            transport=DistributedTransport(program, rank, torch.device("cpu"), TIMEOUT_S),
            sync=GradientSync(program, rank, chain, self._parameters, TIMEOUT_S),
            optimizer=Optimizer(self._parameters, counted, 0.01),
            boundaries=boundaries_of(chain, torch.float32),
            pace=Pace(),
            board=None,
        )
        inputs, labels = case.model.batch(case.num_ranks * case.samples_of_rank)
        size, name = case.microbatch_size, next(iter(chain.example))

        def microbatch(pipeline: int, index: int) -> Microbatch:
            start = pipeline * case.samples_of_rank + index * size
            chosen = slice(start, start + size)
            samples = tuple(range(start, start + size))
            return Microbatch(0, samples, {name: inputs[chosen]}, labels[chosen], case.weight)

        self._microbatch = microbatch

    def prepare(self) -> None:
        self._executor.prepare()

    def run(self) -> None:
        self._executor.step(
            0, self._microbatch, start_s=0.0, learning_rate=LEARNING_RATE, clip_norm=CLIP_NORM
        )

    def gradients(self) -> dict[str, Tensor]:
        return {name: value.grad for name, value in self._parameters.items() if value.grad is not None}


class Torch:
    """DistributedDataParallel with its usual buckets, which sums in the last backward of a step alone."""

    def __init__(self, case: Case, rank: int) -> None:
        chain = case.model.chain()
        model = chain.materialise(range(chain.num_layers), SEED)
        self._case, self._parameters = case, model.owned_parameters()
        module = nn.Sequential(*list(model.model.children())).train()
        self._module = DistributedDataParallel(
            module, bucket_cap_mb=case.bucket_bytes / 2**20, gradient_as_bucket_view=True
        )
        matrices = [value for value in self._parameters.values() if value.dim() > 1]
        vectors = [value for value in self._parameters.values() if value.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
        self._adamw = torch.optim.AdamW(groups, lr=LEARNING_RATE, fused=True)
        inputs, labels = case.model.batch(case.num_ranks * case.samples_of_rank)
        own = slice(rank * case.samples_of_rank, (rank + 1) * case.samples_of_rank)
        self._inputs, self._labels = inputs[own], labels[own]

    def prepare(self) -> None:
        self._adamw.zero_grad()

    def run(self) -> None:
        case = self._case
        for index in range(case.num_microbatches):
            part = slice(index * case.microbatch_size, (index + 1) * case.microbatch_size)
            last = index == case.num_microbatches - 1
            with nullcontext() if last else self._module.no_sync():
                # it divides sums by the number of ranks
                weight = case.weight * case.num_ranks
                (case.model.loss(self._module(self._inputs[part]), self._labels[part]) * weight).backward()
        nn.utils.clip_grad_norm_(self._parameters.values(), CLIP_NORM)
        self._adamw.step()

    def gradients(self) -> dict[str, Tensor]:
        return {name: value.grad for name, value in self._parameters.items() if value.grad is not None}


REPLICAS: dict[str, Callable[[Case, int], Runtime]] = {"ours": Ours, "torch": Torch}


def compare_rank(case: Case, num_pairs: int, *, rank: int, emit: Emit) -> None:
    """Compare steps of both: forwards, backwards, sums, clipping and AdamW.

    Emits the largest difference of a clipped gradient after the first step, and the seconds of each pair.
    """
    replicas = {name: make(case, rank) for name, make in REPLICAS.items()}
    for replica in replicas.values():
        timed(replica)
    difference = gradient_difference(replicas)
    if rank == 0:
        emit({"event": "case", "gradient_difference": difference})
    for replica in replicas.values():
        for _ in range(WARM_UP - 1):
            timed(replica)
    compare(replicas, num_pairs, emit if rank == 0 else None)


def program_of(case: Case, chain: ChainModel, profile: ModelProfile, cluster: Cluster) -> Program:
    """The program with buckets of at most so many bytes, as torch has them."""
    pipelines = tuple(
        Pipeline(case.microbatch_size, case.samples_of_rank, (Stage((name,), (0, chain.num_layers), 1),))
        for name in (device.name for device in cluster.devices)
    )
    plan = Plan("replicas", chain.name, case.num_ranks * case.samples_of_rank, pipelines)
    return lower_as(plan, profile, cluster, Schedule.ONE_F_ONE_B, most_bytes=case.bucket_bytes)


def cluster_of(num_ranks: int) -> Cluster:
    devices = tuple(Device(f"here/{index}", "here", CPU, 2.0**40) for index in range(num_ranks))
    return Cluster("equal", Link(5e-5, 1e9), (Node("here", devices),))


def profile_of(chain: ChainModel) -> ModelProfile:
    """Layers with the bytes that they have, and backwards of some milliseconds, beside which sums pay."""
    layers = []
    for index, name in enumerate(chain.layer_names):
        num_bytes = sum(4.0 * math.prod(info.shape) for info in chain.parameters(index))
        layers.append(LayerProfile(name, num_bytes, 4.0, 4.0))
    times = (LayerTimes((5e-3,), (1e-2,)),) * chain.num_layers
    return ModelProfile(chain.name, 1, "float32", tuple(layers), {CPU: KindProfile("estimated", (1,), times)})
