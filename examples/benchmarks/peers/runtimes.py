"""The contenders that are not ours, on emulated devices: one rank of each, apart, so that a rank imports it.

All of them: layers are `SlowedModule`s on the device's clock, messages and sums reserve the links on the same
`Board`, and what a training loop adds (norm, clipping, AdamW) is our code at the profile's price.
"""

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from encoder import make_task
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from cost_model.cluster_file import read_cluster
from cost_model.layer_costs import Prices
from cost_model.profile import read_profile
from hetpipe.data.task import TrainingTask
from hetpipe.program.costs import ProgramCosts
from hetpipe.program.instructions import (
    Bucket,
    Compute,
    Direction,
    Pass,
    Program,
    Transfer,
    incoming,
    outgoing,
)
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.settings import TaskSettings
from hetpipe.runtime.emulated_links import Board
from hetpipe.runtime.host_load import HostLoad
from hetpipe.runtime.optimizer import Optimizer
from hetpipe.runtime.pace import EmulatedPace, Pace
from hetpipe.runtime.processes import Emit
from hetpipe.runtime.slowed_module import SlowedModule, VirtualPace
from hetpipe.simulation.schedule_selection import lower
from hetpipe.training.meeting import LEAD_S, gather
from partition.plan_file import read_plan

MOST_BUCKETS = 64
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Files:
    """What a run reads. board: where `Board.create` wrote its table."""

    cluster: str
    profile: str
    plan: str
    board: str


class Costs(ProgramCosts):
    """Prices of a program whose sums are DDP's buckets, of as many bytes as they turn out to have."""

    bucket_bytes: dict[int, float]

    def sync_bytes(self, bucket: int) -> float:
        return self.bucket_bytes[bucket]


def costs_of(files: Files, *, ddp: bool) -> Costs:
    """The costs of a plan; with ddp its program has MOST_BUCKETS buckets, all ranks in each."""
    cluster, profile = read_cluster(Path(files.cluster)), read_profile(Path(files.profile))
    program = lower(read_plan(Path(files.plan)), profile, cluster)
    if ddp:
        ranks = tuple(range(len(program.ranks)))
        program = Program(program.plan, (Bucket((0,), ranks),) * MOST_BUCKETS, program.ranks)
    costs = Costs(program, profile, cluster)
    costs.bucket_bytes = {}
    return costs


@dataclass(slots=True)
class Common:
    """What every contender has: the model's task, the prices, the table of the links."""

    costs: Costs
    board: Board
    task: TrainingTask
    inputs: Tensor = field(init=False)
    labels: Tensor = field(init=False)

    def __post_init__(self) -> None:
        inputs, self.labels = self.task.batch(0, self.costs.program.plan.global_batch_size)
        self.inputs = inputs["input_ids"]

    @classmethod
    def open(cls, files: Files, *, ddp: bool = False) -> "Common":
        costs = costs_of(files, ddp=ddp)
        profile = read_profile(Path(files.profile))
        settings = TaskSettings(profile.model, profile.sequence_length)
        task = make_task(RunFolder(Path(files.plan).parent), settings)
        return cls(costs, Board(Path(files.board), costs), task)

    @property
    def norm(self) -> int:
        """The number of the sum of squares among the collectives."""
        return len(self.costs.program.buckets)

    def layers(self, start: int, stop: int) -> tuple[list[nn.Module], dict[str, nn.Parameter]]:
        model = self.task.chain.materialise(range(start, stop), 0)
        return list(model.model.children())[start:stop], model.owned_parameters()

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Of a microbatch, as its share of the step's."""
        weight = 1 / self.task.num_loss_tokens(self.costs.program.plan.global_batch_size)
        return self.task.loss(outputs, labels) * weight

    def stage(self, rank: int, module: nn.Module, pace: Pace) -> SlowedModule:
        """A stage of the plan's one pipeline, whose messages go over the emulated links."""
        costs, board = self.costs, self.board
        stages = costs.stages[0]

        def nominal_s(op: Pass, call: int) -> float:
            return costs.compute_s(rank, Compute(op, 0, rank, call))

        def ready_s(op: Pass, call: int) -> float:
            message = incoming(Compute(op, 0, rank, call), stages)
            return 0.0 if message is None else board.due_s(message)

        def ended(op: Pass, call: int, end_s: float) -> None:
            if outgoing(Compute(op, 0, rank, call), stages, 0) is not None:
                board.send(Transfer(Direction.SEND, op, 0, rank, call), end_s)

        return SlowedModule(module, pace, nominal_s, ready_s=ready_s, ended=ended)

    def update(self, rank: int, pace: Pace, optimizer: Optimizer) -> None:
        """Clip by a norm of 1 and step, at the price of the profile."""
        start_s = pace.begin(0.0)
        optimizer.step(1e-4, 1.0)
        pace.end(start_s, self.costs.step_s(rank))


class Contender(Protocol):
    """A step is: prepare (not timed), then run, the optimizer included."""

    pace: Pace

    def prepare(self, *, slowed: bool) -> None: ...
    def run(self, step: int) -> None: ...


class TorchPipeline:
    """torch.distributed.pipelining.Schedule1F1B over the stages of a plan of one pipeline."""

    def __init__(self, files: Files, rank: int) -> None:
        self._common = common = Common.open(files)
        self._rank = rank
        pipeline = common.costs.program.plan.pipelines[0]
        layers, parameters = common.layers(*pipeline.stages[rank].layers)
        self.pace = EmulatedPace()
        self._module = common.stage(rank, nn.Sequential(*layers).train(), self.pace)
        stage = PipelineStage(self._module, rank, len(pipeline.stages), CPU)
        count = pipeline.num_microbatches
        self._schedule = Schedule1F1B(stage, count, loss_fn=common.loss, scale_grads=False)
        self._first, self._last = rank == 0, rank == len(pipeline.stages) - 1
        self._optimizer = Optimizer(parameters, set(parameters), 0.01)

    def prepare(self, *, slowed: bool) -> None:
        self._optimizer.zero_grad()
        self._module.active = slowed
        self._module.restart()

    def run(self, step: int) -> None:
        inputs = (self._common.inputs,) if self._first else ()
        target = self._common.labels if self._last else None
        self._schedule.step(*inputs, target=target, return_outputs=False)
        board, norm = self._common.board, self._common.norm
        squares = self._optimizer.square_sum().reshape(1)
        board.join(norm, self._rank, step, self.pace.now_s)
        dist.all_reduce(squares)
        self.pace.wait(board.collective_due_s(norm, self._rank))
        self._common.update(self._rank, self.pace, self._optimizer)


class DataParallel:
    """torch's DistributedDataParallel, samples as the plan shares them, microbatches added up under no_sync.

    A bucket's sum is posted when the backward of the layer that filled it ends on the device's clock. The
    norm needs no message: every rank holds all gradients.
    """

    def __init__(self, files: Files, rank: int) -> None:
        self._common = common = Common.open(files, ddp=True)
        self._rank = rank
        plan, profile = common.costs.program.plan, read_profile(Path(files.profile))
        self._pipeline = pipeline = plan.pipelines[rank]
        device = read_cluster(Path(files.cluster)).device(plan.device_names[rank])
        layers, parameters = common.layers(0, plan.num_layers)
        self.pace = pace = EmulatedPace()
        prices = Prices(profile)

        def seconds(layer: int) -> Callable[[Pass, int], float]:
            def nominal_s(op: Pass, call: int) -> float:
                samples = pipeline.microbatch_samples(call)
                price = prices.forward_s if op is Pass.FORWARD else prices.backward_s
                return price(device, layer, layer + 1, samples)

            return nominal_s

        def ended(op: Pass, call: int, end_s: float) -> None:
            if op is Pass.BACKWARD:
                self._start_sums()

        self._layers = [
            SlowedModule(module.train(), pace, seconds(index), ended=ended)
            for index, module in enumerate(layers)
        ]
        self._model: nn.Module = nn.Sequential(*self._layers)
        if len(plan.pipelines) > 1:  # of few samples slow devices may get none
            self._model = model = DistributedDataParallel(self._model)
            model.register_comm_hook(None, self._on_bucket)
        self._optimizer = Optimizer(parameters, set(parameters), 0.01)
        self._offset = sum(entry.num_samples for entry in plan.pipelines[:rank])
        self._filled: list[tuple[int, Tensor, Future[Tensor]]] = []
        self._summed: list[int] = []
        self._slowed, self._step = False, 0

    def prepare(self, *, slowed: bool) -> None:
        self._optimizer.zero_grad()
        self._slowed = slowed
        for layer in self._layers:
            layer.active = slowed
            layer.restart()

    def run(self, step: int) -> None:
        self._step, self._summed = step, []
        count, size = self._pipeline.num_microbatches, self._pipeline.microbatch_size
        model = self._model
        for index in range(count):
            start = self._offset + index * size
            stop = start + self._pipeline.microbatch_samples(index)
            summed = index == count - 1 or not isinstance(model, DistributedDataParallel)
            with nullcontext() if summed else model.no_sync():
                outputs = model(self._common.inputs[start:stop])
                self._common.loss(outputs, self._common.labels[start:stop]).backward()
        for bucket in self._summed:
            self.pace.wait(self._common.board.collective_due_s(bucket, self._rank))
        self._optimizer.square_sum()
        self._common.update(self._rank, self.pace, self._optimizer)

    def _on_bucket(self, state: object, bucket: dist.GradBucket) -> Future[Tensor]:
        """Called by DDP when the last gradient of a bucket is there."""
        future: Future[Tensor] = Future()
        self._filled.append((bucket.index(), bucket.buffer(), future))
        if not self._slowed:
            self._start_sums()
        return future

    def _start_sums(self) -> None:
        for bucket, buffer, future in self._filled:
            if self._slowed:
                self._common.costs.bucket_bytes[bucket] = float(buffer.numel() * buffer.element_size())
                self._common.board.join(bucket, self._rank, self._step, self.pace.now_s)
                self._summed.append(bucket)
            work = dist.all_reduce(buffer, async_op=True)
            assert work is not None
            work.get_future().then(_finish(buffer, future))
        self._filled.clear()


def _finish(buffer: Tensor, future: Future[Tensor]) -> Callable[[Future[Any]], None]:
    def finish(done: Future[Any]) -> None:
        done.value()  # raises what went wrong
        future.set_result(buffer)

    return finish


class TorchGPipe:
    """torchgpipe: all devices in this process and, on one CPU, in one thread, so on clocks nobody waits for.

    Its own order of forwards and backwards decides when each device begins what. The whole backward is one
    run of autograd.
    """

    def __init__(self, files: Files, rank: int) -> None:
        from torchgpipe import GPipe

        self._common = common = Common.open(files)
        plan = common.costs.program.plan
        self._pipeline = pipeline = plan.pipelines[0]
        layers, self._parameters = common.layers(0, plan.num_layers)
        self._paces = [VirtualPace() for _ in pipeline.stages]
        self._modules = [
            common.stage(index, nn.Sequential(*layers[stage.start : stage.stop]).train(), self._paces[index])
            for index, stage in enumerate(pipeline.stages)
        ]
        self._model = GPipe(
            nn.Sequential(*self._modules),
            balance=[1] * len(self._modules),
            devices=["cpu"] * len(self._modules),
            chunks=pipeline.num_microbatches,
            checkpoint="never",
        )
        self._optimizer = Optimizer(self._parameters, set(self._parameters), 0.01)
        self.pace = self._paces[0]

    def prepare(self, *, slowed: bool) -> None:
        self._optimizer.zero_grad()
        for module in self._modules:
            module.active = slowed
            module.restart()

    def run(self, step: int) -> None:
        for pace in self._paces[1:]:
            pace.start_step(self.pace.now_s)
        outputs = self._model(self._common.inputs)
        self._common.loss(outputs, self._common.labels).backward()
        self._optimizer.square_sum()
        board, norm = self._common.board, self._common.norm
        for rank, pace in enumerate(self._paces):
            board.join(norm, rank, step, pace.now_s)
        self._optimizer.step(1e-4, 1.0)
        for rank, pace in enumerate(self._paces):
            pace.wait(board.collective_due_s(norm, rank))
            pace.end(pace.now_s, self._common.costs.step_s(rank))
        self.pace.now_s = max(pace.now_s for pace in self._paces)


RUNTIMES: dict[str, Callable[[Files, int], Contender]] = {
    "TorchPipeline": TorchPipeline,
    "DataParallel": DataParallel,
    "TorchGPipe": TorchGPipe,
}


def contender_rank(files: Files, runtime: str, num_steps: int, *, rank: int, emit: Emit) -> None:
    """Run steps, of which the first is neither slowed nor timed.

    Emits the seconds of the others (last end of a rank less common start), those of one from end to end in
    the mean, which a clock that nobody waits for does not have, the largest share of a device's busy time by
    which operations took longer than they may, and the foreign load in cores.
    """
    contender = RUNTIMES[runtime](files, rank)
    load = HostLoad()
    seconds: list[float] = []
    ended_s: list[float] = []
    over_s = busy_s = 0.0
    for step in range(num_steps):
        contender.prepare(slowed=step > 0)
        # a clock that nobody waits for runs ahead of the host's, and so do the links that it has reserved
        start_s = max(gather(max(time.monotonic(), contender.pace.now_s))) + LEAD_S
        contender.pace.start_step(start_s)
        if step == 1:
            load.lap()
        contender.run(step)
        virtual = isinstance(contender.pace, VirtualPace)
        end_s = contender.pace.now_s if virtual else time.monotonic()
        ends = gather(end_s)
        ended_s.append(max(ends))
        if step > 0:
            seconds.append(max(ends) - start_s)
            over_s += contender.pace.over_budget_s
            busy_s += contender.pace.busy_s
    wall_s, host_s, own_s = load.lap()
    rows = gather((over_s / busy_s if busy_s else 0.0, own_s))
    foreign = max(0.0, (host_s - sum(own for _, own in rows)) / wall_s)
    if rank == 0:
        over = max(share for share, _ in rows)
        total_s = sum(seconds) if virtual else ended_s[-1] - ended_s[0]
        found = {"seconds": seconds, "wall_s": total_s / len(seconds)}
        emit({"event": "steps", **found, "over_budget": over, "foreign_cores": foreign})
