"""What runs on the device made of Python: apart, in a process that has it for good."""

import gc
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
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
from hetpipe.runtime import accelerators, transport
from hetpipe.runtime.cuda_events import GpuPace
from hetpipe.runtime.device_room import check_room
from hetpipe.runtime.executor import Executor
from hetpipe.runtime.host_states import HostStates
from hetpipe.runtime.optimizer import Optimizer
from hetpipe.runtime.pace import Pace
from hetpipe.runtime.rank_setup import RankLayers, executor_of, slices
from partition.estimates.plan_memory import memory_on
from sim_device import DEVICE, FROM_HOST, MESSAGES, MODULE, SECOND, SIM, SIMS, WAITS
from sim_memory import ENDLESS
from sim_streams import HOST, TooEarlyError

Found = dict[str, Any]
Emit = Callable[[Found], None]
LENGTH, STEPS = 16, 2
CPU = torch.device("cpu")
PLACES = {"cpu": CPU, "Sim-A": DEVICE, "Sim-B": SECOND}


def batch(first: int, count: int) -> tuple[dict[str, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(first)
    ids = torch.randint(0, 1024, (count, LENGTH), generator=generator)
    return {"input_ids": ids}, ids.roll(1, 1)


def chain_of(model: str) -> ChainModel:
    return ChainModel.from_spec(model_spec(model))


def _ready(
    place: torch.device,
    model: str,
    program: Program,
    profile: ModelProfile,
    cluster: Cluster,
    rank: int = 0,
) -> tuple[Executor, RankLayers]:
    chain = chain_of(model)
    layers = RankLayers.of(program, rank, chain, 0, place, torch.float32, None)
    loss = partial(loss_sum, model_spec(model).task)
    costs = ProgramCosts(program, profile, cluster)
    optimizer = Optimizer(layers.stepped, layers.counted, 0.01)
    if layers.offloaded:
        optimizer = HostStates(layers.stepped, layers.counted, 0.01, offloaded=layers.offloaded.names)
    MODULE.set_device(place.index or 0)
    pace = Pace() if place == CPU else GpuPace(MODULE.Event)
    executor = executor_of(
        costs, rank, layers, loss, optimizer, seed=0, pace=pace, timeout_s=60.0, board=None
    )
    return executor, layers


def steps(place: torch.device, executor: Executor, layers: RankLayers, program: Program) -> Iterator[Found]:
    """Train some steps; yield losses, norms, and the waits of each step."""
    for step in range(STEPS):
        inputs, labels = batch(step, program.plan.global_batch_size)
        placed = {name: value.to(place) for name, value in inputs.items()}
        microbatch = slices(program, step, placed, labels.to(place), 1 / labels.numel())
        layers.chain.know_boundaries(placed)
        if step == 0:
            executor.rehearse(microbatch, layers.chain.layer_names)
        executor.prepare()
        sim = SIMS[place.index or 0]
        sim.restart()
        event_waits, retries = HOST.waits, sim.memory.num_retries
        outcome = executor.step(step, microbatch, start_s=0.0, learning_rate=1e-3, clip_norm=0.5)
        yield {
            "loss": outcome.loss,
            "norm": outcome.gradient_norm,
            "waits": sim.counts[WAITS],
            "event_waits": HOST.waits - event_waits,
            "from_host": sim.counts[FROM_HOST],
            "messages": sim.counts[MESSAGES],
            "retries": sim.memory.num_retries - retries,
            "peak_bytes": sim.memory.peak_bytes,
            "reserved_bytes": sim.memory.peak_reserved_bytes,
        }


def train(
    model: str, program: Program, profile: ModelProfile, cluster: Cluster, *, rank: int, emit: Emit
) -> None:
    """Train on the CPU and on both devices; emit losses, norms, last weights, and the waits of each step."""
    for place in (CPU, DEVICE, SECOND):
        executor, layers = _ready(place, model, program, profile, cluster)
        for found in steps(place, executor, layers, program):
            emit({"place": str(place), **found})
        owned = layers.model.owned_parameters().items()
        weights = {name: value.detach().to("cpu").sum().item() for name, value in owned}
        emit({"place": str(place), "weights": weights})


def train_on_streams(
    model: str, program: Program, profile: ModelProfile, cluster: Cluster, *, rank: int, emit: Emit
) -> None:
    """Train the same with streams beside that of computations, as on CUDA."""
    vars(accelerators)["_ALIKE"] += ("sim",)
    train(model, program, profile, cluster, rank=rank, emit=emit)


def train_together(
    model: str, cases: Sequence[tuple[Program, ModelProfile, Cluster]], *, rank: int, emit: Emit
) -> None:
    """Train as a rank of several programs in turn, on the device of its kind in each; emit the steps.

    Messages have a stream of their own, as on CUDA.
    """
    vars(accelerators)["_ALIKE"] += ("sim",)
    # NOTE: a message of gloo is not over before somebody waits for it: to look again and again is vain
    vars(transport)["wait_for_gpu"] = lambda work, limit_s: work.wait(timedelta(seconds=limit_s))
    for number, (program, made_up, cluster) in enumerate(cases):
        place = PLACES[cluster.device(program.device_names[rank]).kind]
        executor, layers = _ready(place, model, program, made_up, cluster, rank)
        for found in steps(place, executor, layers, program):
            emit({"case": number, "place": str(place), **found})
        executor.close()


def train_in_little(
    model: str, program: Program, profile: ModelProfile, cluster: Cluster, *, rank: int, emit: Emit
) -> None:
    """Train with less memory from the second step on: all, what is used at once, and less.

    Emit the steps, or what was told.
    """
    peak = 0.0
    for share in (None, 1.0, 0.9):
        SIM.memory.capacity_bytes = ENDLESS
        executor, layers = _ready(DEVICE, model, program, profile, cluster)
        try:
            for found in steps(DEVICE, executor, layers, program):
                emit({"share": share, **found})
                peak = found["peak_bytes"] if share is None else peak
                MODULE.empty_cache()
                SIM.memory.capacity_bytes = ENDLESS if share is None else share * peak
        except torch.OutOfMemoryError as error:
            emit({"share": share, "told": str(error), "refused": SIM.memory.num_refused})
        del executor, layers
        gc.collect()


def room(
    model: str, program: Program, profile: ModelProfile, cluster: Cluster, *, rank: int, emit: Emit
) -> None:
    """Emit what the driver is found to take once the stages have run, and what is said if it is too much."""
    executor, layers = _ready(DEVICE, model, program, profile, cluster)
    inputs, labels = batch(0, program.plan.global_batch_size)
    placed = {name: value.to(DEVICE) for name, value in inputs.items()}
    microbatch = slices(program, 0, placed, labels.to(DEVICE), 1 / labels.numel())
    executor.rehearse(microbatch, layers.chain.layer_names)
    (device,) = (cluster.device(name) for name in program.device_names)
    need_bytes = memory_on(program.plan, profile, device).total_bytes
    for driver_bytes in (2.0**20, 2.0**22):
        SIM.memory.driver_bytes = driver_bytes
        SIM.memory.capacity_bytes = need_bytes + 2.0**21
        try:
            emit({"driver_bytes": check_room(device, DEVICE, need_bytes)})
        except InfeasibleError as error:
            emit({"refused": str(error), "missing_bytes": error.missing_bytes})


def profile(model: str, *, rank: int, emit: Emit) -> None:
    """Profile on the device without and with a limit of its memory; emit what was profiled."""
    loss = partial(loss_sum, model_spec(model).task)
    task = TrainingTask(chain_of(model), loss, batch, lambda count: count)
    settings = TaskSettings(model, LENGTH)
    before = SIM.memory.live_bytes
    for sizes in ((1, 2), (1, 2, 256)):
        made = profile_task(task, settings, "sim", sizes, 0.01, device=DEVICE)
        emit({"profile": made.to_json(), "left_bytes": SIM.memory.live_bytes - before})
        SIM.memory.capacity_bytes = 2 * SIM.memory.peak_bytes


def masks(*, rank: int, emit: Emit) -> None:
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


def rules(*, rank: int, emit: Emit) -> None:
    """Emit what the device does with those who do not wait, and what it has room for."""
    x = torch.arange(4.0).to(DEVICE)
    late = x.to("cpu", non_blocking=True)
    before = late.tolist()
    MODULE.synchronize()
    emit({"late": [before, late.tolist()]})

    source = torch.ones(4)
    copied, done = torch.empty(4, device=DEVICE), MODULE.Event()
    copied.copy_(source, non_blocking=True)
    done.record()
    emit({"asked": [done.query(), done.query()]})  # the second finds it done
    copied.copy_(source, non_blocking=True)
    source.zero_()
    emit({"changed": _told(MODULE.synchronize)})

    side, begin, end = MODULE.Stream(DEVICE), MODULE.Event(), MODULE.Event()
    begin.record()
    y = x + 1
    end.record()
    emit({"untimed": _told(lambda: begin.elapsed_time(end))})
    with MODULE.stream(side):
        emit({"raced": _told(lambda: y * 2)})
        side.wait_event(end)
        twice = y * 2
    emit({"overwritten": _told(lambda: y.zero_())})
    MODULE.current_stream(DEVICE).wait_stream(side)
    y.zero_()
    emit({"waited": twice.to("cpu").tolist(), "timed": begin.elapsed_time(end) >= 0})
    emit({"two": _told(lambda: x + x.to(SECOND)), "mixed": _told(lambda: x + torch.ones(4))})

    weight = torch.ones(2**12, device=DEVICE, requires_grad=True)
    loss = (weight * weight).sum()
    SIM.memory.capacity_bytes = SIM.memory.reserved_bytes
    emit({"backward": _told(loss.backward)})


def _told(work: Callable[[], object]) -> str:
    try:
        work()
    except (RuntimeError, TooEarlyError) as error:
        return str(error)
    return ""
