"""What runs on the device made of Python: apart, in a process that has it for good."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cost_model.cluster import Cluster
from cost_model.errors import InfeasibleError
from cost_model.profile import ModelProfile
from hetpipe.data.task import TrainingTask
from hetpipe.models.chain import ChainModel
from hetpipe.models.huggingface import model_spec
from hetpipe.models.keyed_dropout import KeyedDropout
from hetpipe.models.loss import loss_sum
from hetpipe.profiling.layer_profiler import profile_task
from hetpipe.program.costs import ProgramCosts
from hetpipe.program.instructions import Program
from hetpipe.runs.settings import TaskSettings
from hetpipe.runtime.cuda_events import GpuPace
from hetpipe.runtime.device_room import check_room
from hetpipe.runtime.executor import Executor
from hetpipe.runtime.optimizer import Optimizer
from hetpipe.runtime.pace import Pace
from hetpipe.runtime.rank_setup import RankLayers, executor_of, slices
from partition.estimates.plan_memory import memory_on
from sim_device import DEVICE, FROM_HOST, SIM, WAITS, SimEvent

Emit = Callable[[dict[str, Any]], None]
LENGTH, STEPS = 16, 2
CPU = torch.device("cpu")


def batch(first: int, count: int) -> tuple[dict[str, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(first)
    ids = torch.randint(0, 1024, (count, LENGTH), generator=generator)
    return {"input_ids": ids}, ids.roll(1, 1)


def chain_of(model: str) -> ChainModel:
    return ChainModel.from_spec(model_spec(model))


def _ready(
    place: torch.device, model: str, program: Program, profile: ModelProfile, cluster: Cluster
) -> tuple[Executor, RankLayers]:
    chain = chain_of(model)
    layers = RankLayers.of(program, 0, chain, 0, place, torch.float32, None)
    loss = partial(loss_sum, model_spec(model).task)
    costs = ProgramCosts(program, profile, cluster)
    optimizer = Optimizer(layers.stepped, layers.counted, 0.01)
    pace = Pace() if place == CPU else GpuPace(SimEvent)
    executor = executor_of(costs, 0, layers, loss, optimizer, seed=0, pace=pace, timeout_s=60.0, board=None)
    return executor, layers


def train(model: str, program: Program, profile: ModelProfile, cluster: Cluster, *, emit: Emit) -> None:
    """Train on both devices; emit losses, norms, last weights, and the waits of each step."""
    for place in (CPU, DEVICE):
        executor, layers = _ready(place, model, program, profile, cluster)
        count = program.plan.global_batch_size
        for step in range(STEPS):
            inputs, labels = batch(step, count)
            placed = {name: value.to(place) for name, value in inputs.items()}
            microbatch = slices(program, step, placed, labels.to(place), 1 / labels.numel())
            layers.chain.know_boundaries(placed)
            if step == 0:
                executor.rehearse(microbatch, layers.chain.layer_names)
            executor.prepare()
            SIM.restart()
            SimEvent.waits = 0
            outcome = executor.step(step, microbatch, start_s=0.0, learning_rate=1e-3, clip_norm=0.5)
            emit(
                {
                    "place": place.type,
                    "loss": outcome.loss,
                    "norm": outcome.gradient_norm,
                    "waits": SIM.counts[WAITS],
                    "from_host": SIM.counts[FROM_HOST],
                    "event_waits": SimEvent.waits,
                }
            )
        owned = layers.model.owned_parameters().items()
        weights = {name: value.detach().to("cpu").sum().item() for name, value in owned}
        emit({"place": place.type, "weights": weights})


def room(model: str, program: Program, profile: ModelProfile, cluster: Cluster, *, emit: Emit) -> None:
    """Emit what the driver is found to take once the stages have run, and what is said if it is too much."""
    executor, layers = _ready(DEVICE, model, program, profile, cluster)
    inputs, labels = batch(0, program.plan.global_batch_size)
    placed = {name: value.to(DEVICE) for name, value in inputs.items()}
    microbatch = slices(program, 0, placed, labels.to(DEVICE), 1 / labels.numel())
    executor.rehearse(microbatch, layers.chain.layer_names)
    (device,) = (cluster.device(name) for name in program.device_names)
    need_bytes = memory_on(program.plan, profile, device).total_bytes
    for driver_bytes in (2.0**20, 2.0**22):
        SIM.driver_bytes = driver_bytes
        SIM.capacity_bytes = need_bytes + 2.0**21
        try:
            emit({"driver_bytes": check_room(device, DEVICE, need_bytes)})
        except InfeasibleError as error:
            emit({"refused": str(error), "missing_bytes": error.missing_bytes})


def profile(model: str, *, emit: Emit) -> None:
    """Profile on the device without and with a limit of its memory; emit what was profiled."""
    loss = partial(loss_sum, model_spec(model).task)
    task = TrainingTask(chain_of(model), loss, batch, lambda count: count)
    settings = TaskSettings(model, LENGTH)
    before = SIM.live_bytes
    for sizes in ((1, 2), (1, 2, 256)):
        made = profile_task(task, settings, "sim", sizes, 0.01, device=DEVICE)
        emit({"profile": made.to_json(), "left_bytes": SIM.live_bytes - before})
        # out of reach of a backward, an error in whose thread torch does not take from a device in Python
        SIM.capacity_bytes = 4 * SIM.peak_bytes


def masks(*, emit: Emit) -> None:
    """Emit whether dropout has the same masks on both devices, and the waits of drawing on this one."""
    x = torch.ones(4, 33)
    found = []
    for place in (CPU, DEVICE):
        dropout = KeyedDropout(5, place)
        on_it = x.to(place)
        SIM.restart()
        with dropout:
            dropout.at(step=2, samples=(3, 1, 4, 15))
            dropout.enter_layer(1)
            dropped = torch.nn.functional.dropout(on_it, 0.3)
        waits = SIM.counts[WAITS]
        found.append(dropped.to("cpu"))
    emit({"same": torch.equal(*found), "kept": int(found[0].count_nonzero()), "waits": waits})
