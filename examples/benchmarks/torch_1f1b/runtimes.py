"""One rank of both runtimes, with the same model, cuts and microbatches: apart, so that a rank imports it."""

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch
from encoder import SEED, Encoder
from pairs import Runtime, compare, gradient_difference, timed
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from cost_model.cluster import CPU, Cluster, Device, Link, Node
from cost_model.layer_profile import LayerProfile, LayerTimes
from cost_model.profile import KindProfile, ModelProfile
from hetpipe.models.chain import ChainModel
from hetpipe.models.keyed_dropout import KeyedDropout
from hetpipe.program.costs import ProgramCosts
from hetpipe.program.instructions import Norm, Program, Step
from hetpipe.runtime.byte_counter import ByteCounter
from hetpipe.runtime.executor import Executor
from hetpipe.runtime.gradient_sync import GradientSync
from hetpipe.runtime.optimizer import Optimizer
from hetpipe.runtime.pace import Pace
from hetpipe.runtime.processes import Emit
from hetpipe.runtime.rank_setup import boundaries_of
from hetpipe.runtime.stage_runner import Microbatch, StageRunner
from hetpipe.runtime.transport import DistributedTransport
from hetpipe.simulation.schedule_selection import lower
from hetpipe.training.meeting import gather
from partition.plan import Pipeline, Plan, Stage

TIMEOUT_S = 600.0
WARM_UP = 2
CPU_DEVICE = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Case:
    """A model cut into stages of equally many layers, and its microbatches."""

    num_stages: int
    num_microbatches: int
    microbatch_size: int
    model: Encoder

    @property
    def batch_size(self) -> int:
        return self.num_microbatches * self.microbatch_size

    @property
    def weight(self) -> float:
        """What a term of the loss counts."""
        return 1 / (self.batch_size * self.model.terms_of_sample)

    def cuts(self, num_layers: int) -> list[int]:
        return [round(stage * num_layers / self.num_stages) for stage in range(self.num_stages + 1)]


class Ours:
    """hetpipe's executor on the program of an even plan, without NORM and STEP."""

    def __init__(self, case: Case, rank: int) -> None:
        chain = case.model.chain()
        self.costs = ProgramCosts(_program(case, chain), _profile(chain), _cluster(case.num_stages))
        program = self.costs.program
        start, stop = program.plan.pipelines[0].stages[rank].layers
        model = chain.materialise(range(start, stop), SEED)
        self._parameters = model.owned_parameters()
        self._stages = StageRunner(program, model.train(), KeyedDropout(SEED), case.model.loss)
        self._executor = Executor(
            self.costs,
            rank,
            stages=self._stages,
            transport=DistributedTransport(program, rank, CPU_DEVICE, TIMEOUT_S),
            sync=GradientSync(program, rank, chain, self._parameters, TIMEOUT_S),
            optimizer=Optimizer(self._parameters, (), 0.0),
            boundaries=boundaries_of(chain, torch.float32),
            pace=Pace(),
            board=None,
        )
        inputs, labels = case.model.batch(case.batch_size)
        size, name = case.microbatch_size, next(iter(chain.example))

        def microbatch(pipeline: int, index: int) -> Microbatch:
            start, stop = index * size, (index + 1) * size
            samples = tuple(range(start, stop))
            return Microbatch(0, samples, {name: inputs[start:stop]}, labels[start:stop], case.weight)

        self._microbatch = microbatch

    def prepare(self) -> None:
        self._executor.prepare()
        self._stages.take_loss()

    def run(self) -> None:
        self._executor.step(0, self._microbatch, start_s=0.0, learning_rate=0.0, clip_norm=1.0)

    def gradients(self) -> dict[str, Tensor]:
        return {name: value.grad for name, value in self._parameters.items() if value.grad is not None}


class Torch:
    """torch.distributed.pipelining on the same layers, cut alike."""

    def __init__(self, case: Case, rank: int) -> None:
        chain = case.model.chain()
        start, stop = list(pairwise(case.cuts(chain.num_layers)))[rank]
        model = chain.materialise(range(start, stop), SEED)
        self._parameters = model.owned_parameters()
        # states that are never used, as in ours: optimizers are no part of the comparison
        self._optimizer = Optimizer(self._parameters, (), 0.0)
        module = nn.Sequential(*list(model.model.children())[start:stop])
        stage = PipelineStage(module.train(), rank, case.num_stages, CPU_DEVICE)
        weight = case.weight

        def loss(outputs: Tensor, labels: Tensor) -> Tensor:
            return case.model.loss(outputs, labels) * weight

        self._schedule = Schedule1F1B(stage, case.num_microbatches, loss_fn=loss, scale_grads=False)
        self._first, self._last = rank == 0, rank == case.num_stages - 1
        self._inputs, self._labels = case.model.batch(case.batch_size)

    def prepare(self) -> None:
        self._optimizer.zero_grad()

    def run(self) -> None:
        inputs = (self._inputs,) if self._first else ()
        target = self._labels if self._last else None
        self._schedule.step(*inputs, target=target, losses=[] if self._last else None, return_outputs=False)

    def gradients(self) -> dict[str, Tensor]:
        return {name: value.grad for name, value in self._parameters.items() if value.grad is not None}


class Alone:
    """The forwards and backwards of a rank's layers in a loop: no messages, no order, no runtime.

    For the case without blocks, whose layers all take and give [samples, 8].
    """

    def __init__(self, case: Case, rank: int) -> None:
        chain = case.model.chain()
        start, stop = list(pairwise(case.cuts(chain.num_layers)))[rank]
        model = chain.materialise(range(start, stop), SEED)
        self._case, self._rank = case, rank
        self._parameters = model.owned_parameters()
        self._optimizer = Optimizer(self._parameters, (), 0.0)
        self._module = nn.Sequential(*list(model.model.children())[start:stop]).train()
        self._inputs, self._labels = case.model.batch(case.microbatch_size)
        self._gradient = torch.ones_like(self._inputs)

    def prepare(self) -> None:
        self._optimizer.zero_grad()

    def run(self) -> None:
        case, last = self._case, self._rank == self._case.num_stages - 1
        for _ in range(case.num_microbatches):
            outputs = self._module(self._inputs.detach().requires_grad_(self._rank > 0))
            if last:
                (case.model.loss(outputs, self._labels) * case.weight).backward()
            else:
                outputs.backward(self._gradient)

    def gradients(self) -> dict[str, Tensor]:
        return {name: value.grad for name, value in self._parameters.items() if value.grad is not None}


RUNTIMES: dict[str, Callable[[Case, int], Runtime]] = {"ours": Ours, "torch": Torch}
ALONE = "alone"


def compare_rank(case: Case, num_pairs: int, *, rank: int, emit: Emit) -> None:
    """Step by step in turn, the other one first in every second pair.

    Emits the largest difference of a gradient, and per pair and runtime the seconds of the step (last end of
    a rank less common start) and the CPU seconds of all ranks; without blocks those of `Alone` too.
    """
    runtimes = {name: make(case, rank) for name, make in RUNTIMES.items()}
    if case.model.blocks is None:
        runtimes[ALONE] = Alone(case, rank)
    for runtime in runtimes.values():
        for _ in range(WARM_UP):
            timed(runtime)
    difference = gradient_difference(runtimes)
    if rank == 0:
        num_instructions = sum(map(len, _program(case, case.model.chain()).ranks))
        emit({"event": "case", "gradient_difference": difference, "instructions": num_instructions})
    compare(runtimes, num_pairs, emit if rank == 0 else None)


def memory_rank(case: Case, name: str, *, rank: int, emit: Emit) -> None:
    """One runtime alone in its processes.

    Emits per rank by how much the resident memory has grown at most since before the model was built, and the
    most bytes of tensors that are alive in a step, whoever holds them.
    """
    before = _status("VmRSS")
    runtime = RUNTIMES[name](case, rank)
    for _ in range(3):
        timed(runtime)
    resident = _status("VmHWM") - before
    runtime.prepare()
    gc.collect()
    counter = ByteCounter()
    for entry in gc.get_objects():
        if issubclass(type(entry), Tensor):  # of a proxy, isinstance would look up what it stands for
            counter.add(entry)
    with counter:
        runtime.run()
    rows = gather((resident, counter.peak_bytes))
    if rank == 0:
        emit({"event": "memory", "resident": [row[0] for row in rows], "tensors": [row[1] for row in rows]})


def profile_rank(case: Case, num_steps: int, path: str, *, rank: int, emit: Emit) -> None:
    """Where the Python time of our executor goes: cProfile of rank 0 into a file."""
    import cProfile

    runtime = Ours(case, rank)
    timed(runtime)
    profiler = cProfile.Profile()
    for _ in range(num_steps):
        runtime.prepare()
        gather(0)
        if rank == 0:
            profiler.enable()
        runtime.run()
        profiler.disable()
    if rank == 0:
        profiler.dump_stats(path)


def _status(key: str) -> int:
    """Bytes that the kernel notes of this process under a key."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(key)).split()[1])


def _program(case: Case, chain: ChainModel) -> Program:
    cuts = case.cuts(chain.num_layers)
    stages = tuple(
        Stage((f"here/{index}",), layers, case.num_stages - index)
        for index, layers in enumerate(pairwise(cuts))
    )
    pipeline = Pipeline(case.microbatch_size, case.batch_size, stages)
    program = lower(Plan("even", chain.name, case.batch_size, (pipeline,)), _profile(chain))
    lists = (tuple(entry for entry in row if not isinstance(entry, Norm | Step)) for row in program.ranks)
    return replace(program, ranks=tuple(lists))


def _cluster(num_stages: int) -> Cluster:
    devices = tuple(Device(f"here/{index}", "here", CPU, 2.0**40) for index in range(num_stages))
    return Cluster("equal", Link(0.0, 1e9), (Node("here", devices),))


def _profile(chain: ChainModel) -> ModelProfile:
    """Layers without costs: nothing here is predicted, and real devices take the time they take."""
    layers = tuple(LayerProfile(name, 4.0, 4.0, 4.0) for name in chain.layer_names)
    times = (LayerTimes((0.0,), (0.0,)),) * chain.num_layers
    return ModelProfile(chain.name, 1, "float32", layers, {CPU: KindProfile("estimated", (1,), times)})
