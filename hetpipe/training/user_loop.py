"""One step of a program on this rank, for a user's own training loop."""

import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cost_model.cluster import Cluster, is_emulated
from cost_model.errors import InputError
from cost_model.profile import ModelProfile
from hetpipe.models.chain import ChainModel
from hetpipe.models.loss import Loss
from hetpipe.models.mixed_precision import kept_casts, lowered_dtype, set_products
from hetpipe.program.costs import ProgramCosts
from hetpipe.program.instructions import Program
from hetpipe.program.trace import Trace, events_of_json
from hetpipe.runs.settings import Clock
from hetpipe.runtime.compilers import check_compilers
from hetpipe.runtime.device_room import check_room
from hetpipe.runtime.emulated_links import Board
from hetpipe.runtime.loss_scale import LossScale
from hetpipe.runtime.rank_setup import (
    RankLayers,
    check_weights,
    executor_of,
    pace_of,
    slices,
    torch_device,
)
from hetpipe.runtime.step_outcome import StepOutcome
from hetpipe.runtime.torch_optimizer import TorchOptimizer, refuse_offload
from hetpipe.training.common_clock import CommonClock
from hetpipe.training.meeting import gather, same_on_all_ranks
from partition.estimates.plan_memory import memory_on
from partition.problem import check_plan


class RankStages:
    """The stages of this rank, ready to run; owns its layers with their weights, the messages and sums.

    Made on all ranks together, once torch.distributed is initialised with one process for each device of the
    program, in that order (a program of one device needs no process group); gloo for CPU and emulated
    devices, "cpu:gloo,cuda:nccl" where any is an NVIDIA or AMD GPU ("xpu:xccl" for Intel's). The process
    group stays the caller's.

    model: the layers of this rank in train mode, on its device; weights that only other ranks keep (zero 3,
    `model.absent`) are no numbers there between steps. rank, device_name: of this process.
    rehearsed: whether the first `execute` has run each stage once before its step.
    """

    rehearsed: bool = False

    def __init__(
        self,
        program: Program,
        chain: ChainModel,
        loss: Loss,
        *,
        profile: ModelProfile,
        cluster: Cluster,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        timeout_s: float = 600.0,
    ) -> None:
        """Materialise the layers of this rank and open its channels.

        loss: (outputs, labels) of a microbatch -> the sum of its losses. profile, cluster: what the program
        was lowered with; the stages compute in the profile's precision, under float16-autocast with scaled
        losses (`loss_scale`). seed: of initial weights and dropout. timeout_s: how long a message or a sum
        may take.

        Raises: InputError if program, model, cluster and process group do not fit together.
        """
        check_plan(program.plan, profile, cluster)
        if program.plan.owner_ranges:
            raise InputError(
                f"owner_ranges of the plan cuts layer {program.plan.owner_ranges[0].layer} between devices, "
                "and an optimizer of your own may need whole parameters; plan with whole_states=True in the "
                "profile, or train by hetpipe.Trainer"
            )
        profile.check_layers(chain.layer_names)
        check_weights(profile, chain)
        if profile.loss_chunks is not None:
            raise InputError(
                f"the profile is of a loss in {profile.loss_chunks} chunks, and this loss is one of your "
                "own, which only it can cut; profile without loss_chunks"
            )
        self.rank = _rank_of(program)
        same_on_all_ranks(program.sha256)
        self.clock = CommonClock.of_all()
        self.program, self.chain = program, chain
        self.device_name = program.device_names[self.rank]
        device = cluster.device(self.device_name)
        self.device = torch_device(device)
        self._hardware, self._need_bytes = device, memory_on(program.plan, profile, device).total_bytes
        precision = profile.dtype_of(device.kind)
        lowered = lowered_dtype(precision)
        if any(map(lowered_dtype, profile.dtypes.values())) and dtype != torch.float32:
            raise InputError(f"dtype is {dtype}; weights under a profile in {profile.dtype} are in float32")
        set_products(precision, self.device)
        if profile.compiled:
            check_compilers([device])
        layers = RankLayers.of(
            program, self.rank, chain, seed, self.device, dtype, lowered, compiled=profile.compiled
        )
        refuse_offload(layers.offloaded)
        self.model, self._trained = layers.model, layers.trained.keys()
        costs = ProgramCosts(program, profile, cluster)
        self._board = _open_board(costs, cluster)
        self._optimizer = TorchOptimizer(None, layers.stepped, layers.counted)
        self.executor = executor_of(
            costs, self.rank, layers, loss, self._optimizer,
            seed=seed, pace=pace_of(device, Clock.NOMINAL, self.device), timeout_s=timeout_s,
            board=self._board,
        )  # fmt: skip

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Return the trained parameters here by name; what several ranks hold is equal on each of them."""
        return {name: value for name, value in self.model.held_parameters().items() if name in self._trained}

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters that this rank steps, for an optimizer; none where there are none.

        All that are trained here; where states are sharded (zero 1 to 3) those whose states it owns.
        """
        return list(self._optimizer.parameters.values())

    @property
    def loss_scale(self) -> LossScale | None:
        """Return the loss scale of the next step, to be kept in a checkpoint; None where nothing is scaled.

        Set it to go on from one, on all ranks alike.
        """
        return self.executor.loss_scale

    @loss_scale.setter
    def loss_scale(self, scale: LossScale) -> None:
        self.executor.loss_scale = scale

    def check_room(self) -> None:
        """Check that the plan fits beside what the driver has taken, once all of it has run.

        Raises: InfeasibleError if not.
        """
        check_room(self._hardware, self.device, self._need_bytes)

    def use(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Set the optimizer that the next STEP runs."""
        self._optimizer.optimizer = optimizer

    def close(self) -> None:
        """Let go of the program's groups and emulated links, on all ranks together.

        The default process group is the caller's to end.
        """
        self.executor.close()
        if self._board is not None:
            self._board.close()
            self._board = None


def execute(
    program: Program,
    stages: RankStages,
    inputs: Mapping[str, Tensor],
    labels: Tensor,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    step: int = 0,
    num_terms: int | None = None,
    clip_norm: float = math.inf,
) -> StepOutcome:
    """Run one step of a program on this rank, together with all other ranks; return its outcome.

    The outcome holds loss, norm and events.

    inputs: by name, each [global_batch_size, ...], the same on every rank, in the dtype of the stages and on
    any device, of any length that the model takes; labels [global_batch_size, ...]. Pipelines take
    consecutive blocks, in the order of the plan.
    optimizer: of `stages.parameters()`; its learning rate is the caller's. None: the step ends with the
    gradients, summed over all ranks, in the parameters (not where states are sharded: no rank has all then).
    step: keys the dropout masks; give each step its own number. num_terms: the sum of the losses is divided
    by it, the terms of the whole step; None: the number of samples. clip_norm: of the gradients of all ranks.

    The gradients of the step before are forgotten first. A step whose gradients are not finite on any rank
    leaves the parameters as they are on all of them, and says so in `finite`.

    Raises: InputError for another program than that of the stages, or another number of samples than the
    plan's; InfeasibleError if the plan does not fit beside what the driver of a GPU takes; PeerError if a
    message or a sum does not come in time.
    """
    if program is not stages.program and program.sha256 != stages.program.sha256:
        raise InputError("the stages are those of another program; make them of this one")
    count = program.plan.global_batch_size
    for name, value in {**inputs, "labels": labels}.items():
        if len(value) != count:
            raise InputError(f"{name!r} has {len(value)} samples, a step of the plan {count}; give as many")
    terms = count if num_terms is None else num_terms
    if not 0 < terms < math.inf:
        raise InputError(f"num_terms is {terms}; give the terms of the loss of the whole step, above 0")
    if optimizer is None and program.plan.state_owners is not None and stages.parameters():
        raise InputError(
            f"no optimizer is given, and the plan shards its states (zero {program.plan.zero}), which leaves "
            "no gradients; give one, or a plan with zero 0"
        )
    placed = {name: value.to(stages.device) for name, value in inputs.items()}
    stages.chain.know_boundaries(placed)
    stages.use(optimizer)
    microbatch = slices(program, step, placed, labels.to(stages.device), 1 / terms)
    if not stages.rehearsed:
        stages.executor.rehearse(microbatch, stages.chain.layer_names)
        stages.check_room()
        stages.rehearsed = True
    stages.executor.prepare()
    with kept_casts():
        return stages.executor.step(
            step,
            microbatch,
            start_s=stages.clock.own_s(stages.clock.start_s()),
            learning_rate=math.nan,  # the optimizer's own
            clip_norm=clip_norm,
        )


def trace_of(program: Program, outcome: StepOutcome) -> Trace:
    """Return the trace of a step from the outcomes of all ranks, on every rank, which must all call this."""
    rows = gather([event.to_json() for event in outcome.events])
    return Trace(program.device_names, tuple(event for found in rows for event in events_of_json(found)))


def _rank_of(program: Program) -> int:
    """Return the rank of this process.

    Raises: InputError if the process group does not have a process for each device.
    """
    names = program.device_names
    started = dist.get_world_size() if dist.is_initialized() else 1
    if started != len(names):
        raise InputError(
            f"torch.distributed has {started} processes, the program {len(names)} devices "
            f"({', '.join(names)}); start one for each, and init_process_group in them"
        )
    return dist.get_rank() if dist.is_initialized() else 0


def _open_board(costs: ProgramCosts, cluster: Cluster) -> Board | None:
    """Open the table of emulated links, made by rank 0, on all ranks; None where nothing is emulated."""
    names = costs.program.device_names
    if not any(is_emulated(cluster.device(name).kind) for name in names):
        return None
    path = ""
    if not dist.is_initialized() or dist.get_rank() == 0:
        handle, path = tempfile.mkstemp(prefix="hetpipe-board-")
        os.close(handle)
        Board.create(Path(path), costs)
    path = gather(path)[0]
    board = Board(Path(path), costs)
    if all(gather(True)) and (not dist.is_initialized() or dist.get_rank() == 0):
        os.unlink(path)  # open on all ranks, and gone with the last of them
    return board
