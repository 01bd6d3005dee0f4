"""What the runtime costs on a GPU, and how far its predictions are off there. See README.md."""

import argparse
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

from cost_model.cluster import CPU, Cluster, Device
from cost_model.cluster_file import read_cluster
from cost_model.dtypes import BFLOAT16_AUTOCAST, FLOAT32, TF32
from cost_model.profile import ModelProfile
from hetpipe.data.task import TrainingTask, prepare_data, registered_task
from hetpipe.models.block_structure import logits_of
from hetpipe.models.chain import ChainModel
from hetpipe.models.huggingface import model_spec
from hetpipe.models.keyed_dropout import KeyedDropout
from hetpipe.models.mixed_precision import lowered_dtype, set_products
from hetpipe.profiling.profile_cache import processor_name, profile_model
from hetpipe.program.costs import ProgramCosts
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.settings import Settings, TaskSettings
from hetpipe.runtime.accelerators import new_event
from hetpipe.runtime.cuda_events import GpuPace
from hetpipe.runtime.executor import Executor
from hetpipe.runtime.gpus import free_memory_here, gpus_here
from hetpipe.runtime.gradient_sync import GradientSync
from hetpipe.runtime.host_staging import Staging
from hetpipe.runtime.optimizer import Optimizer
from hetpipe.runtime.pace import Pace
from hetpipe.runtime.stage_runner import Microbatch, StageRunner
from hetpipe.runtime.transport import DistributedTransport
from hetpipe.simulation.schedule_selection import lower
from hetpipe.training.run import measure
from partition.plan import Pipeline, Plan, Stage

LEARNING_RATE, CLIP_NORM = 1e-4, 1.0
NO_GPU = "no GPU here: nothing to measure (--device cpu tries the code out)"


def main() -> None:
    options = _options()
    gpus = [(CPU, 2.0**33)]
    if options.device == "cuda":
        gpus = list(zip(gpus_here(), free_memory_here(), strict=True))
    if not gpus:
        sys.exit(NO_GPU)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cluster_file = folder / "cluster.toml"
        cluster_file.write_text(_cluster_text(gpus))
        cluster = read_cluster(cluster_file)
        profile = profile_model(
            options.model,
            cluster,
            options.length,
            dtype=options.dtype,
            budget_s=options.profile_budget,
            microbatch_sizes=(options.microbatch_size,),
            use_cache=False,
        )
        print(_runtime_table(cluster, profile, folder, options))
        print(_prediction_table(cluster_file, cluster, profile, options))
        print(_bfloat16_table(options))
    gpu = torch.cuda.get_device_name(0) if options.device == "cuda" else "none"
    print(
        f"GPU: {gpu}; {os.cpu_count()} cores ({processor_name()}); Python {platform.python_version()}, "
        f"torch {torch.__version__}, CUDA {torch.version.cuda}, transformers {version('transformers')}"
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-small")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--dtype", choices=(FLOAT32, TF32, BFLOAT16_AUTOCAST), default=FLOAT32)
    parser.add_argument("--microbatch-size", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=40, help="of steps, ours and plain torch's")
    parser.add_argument("--steps", type=int, default=10, help="of each predicted run; the first is not timed")
    parser.add_argument("--profile-budget", type=float, default=30.0)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    return parser.parse_args()


def _cluster_text(gpus: Sequence[tuple[str, float]]) -> str:
    """TOML of this host's GPUs as one node."""
    devices = ", ".join(f'{{ kind = "{kind}", memory = "{int(size)} B" }}' for kind, size in gpus)
    return (
        'name = "here"\n[network]\nbandwidth = "10 Gbit/s"\nlatency = "50 us"\n'
        f'[[nodes]]\nname = "here"\ndevices = [{devices}]\n'
        'interconnect = { bandwidth = "1 TB/s", latency = "0 us" }\n'  # what is measured counts
    )


def _plan(devices: Sequence[Device], num_layers: int, options: argparse.Namespace) -> Plan:
    """One pipeline, as many layers on each device, 1F1B."""
    count = len(devices)
    cuts = [stage * num_layers // count for stage in range(count + 1)]
    stages = tuple(
        Stage((device.name,), (cuts[index], cuts[index + 1]), count - index)
        for index, device in enumerate(devices)
    )
    batch = options.microbatches * options.microbatch_size
    return Plan("even", options.model, batch, (Pipeline(options.microbatch_size, batch, stages),))


Runner = Callable[[int], float]
"""A whole step, by its number; gives the loss."""


def _runtime_table(cluster: Cluster, profile: ModelProfile, folder: Path, options: argparse.Namespace) -> str:
    """Ours against plain torch in one process on one device, a step in turn."""
    batch = options.microbatches * options.microbatch_size
    settings = TaskSettings(options.model, options.length)
    run_folder = RunFolder(folder / "data")
    run_folder.path.mkdir()
    prepare_data(run_folder, settings)
    task = registered_task(run_folder, settings)
    place = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    inputs, labels = task.batch(0, batch)
    data = ({name: value.to(place) for name, value in inputs.items()}, labels.to(place))
    plan = _plan(cluster.devices[:1], profile.num_layers, options)
    costs = ProgramCosts(lower(plan, profile, cluster), profile, cluster)
    set_products(options.dtype, place)
    lowered = lowered_dtype(options.dtype)
    runners = {
        "ours": _ours(costs, task, data, place, lowered),
        "plain torch": _plain(task, data, place, lowered, options),
    }
    losses = {name: [runner(step) for step in range(3)] for name, runner in runners.items()}
    seconds: dict[str, list[float]] = {name: [] for name in runners}
    for pair in range(options.pairs):
        for name in list(runners) if pair % 2 == 0 else list(runners)[::-1]:
            _synchronize(place)
            begin = time.perf_counter()
            runners[name](pair + 3)
            _synchronize(place)
            seconds[name].append(time.perf_counter() - begin)
    ratios = sorted(a / b for a, b in zip(*seconds.values(), strict=True))
    lines = ["| runtime | step s, median [min, max] | losses of the first steps |", "|---|---|---|"]
    for name, values in seconds.items():
        shown = " ".join(f"{loss:.5f}" for loss in losses[name])
        lines.append(
            f"| {name} | {statistics.median(values):.4f} [{min(values):.4f}, {max(values):.4f}] | {shown} |"
        )
    quarters = ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]
    lines.append(
        f"\nours / plain torch of {len(ratios)} pairs: median {statistics.median(ratios):.3f}, "
        f"middle half [{quarters[0]:.3f}, {quarters[1]:.3f}]\n"
    )
    return "\n".join(lines)


def _synchronize(place: torch.device) -> None:
    if place.type == "cuda":
        torch.cuda.synchronize(place)


Data = tuple[Mapping[str, Tensor], Tensor]


def _ours(
    costs: ProgramCosts, task: TrainingTask, data: Data, place: torch.device, lowered: torch.dtype | None
) -> Runner:
    program = costs.program
    chain, size = task.chain, program.plan.pipelines[0].microbatch_size
    model = chain.materialise(range(chain.num_layers), 0, torch.float32, place, lowered)
    parameters = model.owned_parameters()
    weight = 1 / task.num_loss_tokens(program.plan.global_batch_size)
    staging = Staging.of(costs.devices)
    executor = Executor(
        costs,
        0,
        stages=StageRunner(program, model.train(), KeyedDropout(0), task.loss),
        transport=DistributedTransport(program, 0, place, 600.0, staging),
        sync=GradientSync(program, 0, chain, parameters, 600.0, staging),
        optimizer=Optimizer(parameters, set(parameters), 0.01),
        boundaries=lambda layer, samples: (),
        pace=GpuPace(partial(new_event, place)) if place.type == "cuda" else Pace(),
        board=None,
    )
    inputs, labels = data

    def microbatch(step: int, index: int) -> Microbatch:
        start, stop = index * size, (index + 1) * size
        chosen = {name: value[start:stop] for name, value in inputs.items()}
        return Microbatch(step, tuple(range(start, stop)), chosen, labels[start:stop], weight)

    def run(step: int) -> float:
        executor.prepare()
        outcome = executor.step(
            step,
            lambda pipeline, index: microbatch(step, index),
            start_s=0.0,
            learning_rate=LEARNING_RATE,
            clip_norm=CLIP_NORM,
        )
        return outcome.loss

    return run


def _plain(
    task: TrainingTask,
    data: Data,
    place: torch.device,
    lowered: torch.dtype | None,
    options: argparse.Namespace,
) -> Runner:
    """What one writes without a library: autocast, accumulation, clipping, fused AdamW; the same weights."""
    start = task.chain.materialise(range(task.chain.num_layers), 0).owned_parameters()
    model = model_spec(options.model).build()
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.copy_(start[name])
    model = model.to(place).train()
    matrices = [value for value in model.parameters() if value.dim() > 1]
    vectors = [value for value in model.parameters() if value.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, fused=True)
    inputs, labels = data
    weight = 1 / task.num_loss_tokens(len(labels))

    def run(step: int) -> float:
        optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=place)
        for start in range(0, len(labels), options.microbatch_size):
            stop = start + options.microbatch_size
            with torch.autocast(place.type, lowered, enabled=lowered is not None):
                logits = logits_of(model(**{name: value[start:stop] for name, value in inputs.items()}))
            loss = task.loss(logits.float(), labels[start:stop]) * weight
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        return float(total)

    return run


def _prediction_table(
    cluster_file: Path, cluster: Cluster, profile: ModelProfile, options: argparse.Namespace
) -> str:
    """Predicted and measured: one device, and a stage on each where there are several."""
    lines = [
        "| devices | predicted s | measured s, median [min, max] | error | peak over predicted bytes |",
        "|---|---|---|---|---|",
    ]
    for count in sorted({1, len(cluster.devices)}):
        plan = _plan(cluster.devices[:count], profile.num_layers, options)
        settings = Settings.of(plan, profile, steps=options.steps)
        report = measure(settings, cluster_file, profile, plan)
        values = report.step_s_all[1:]
        memory = ", ".join(
            f"{name}: {device.peak_bytes / device.predicted_bytes - 1:+.1%}"
            for name, device in report.devices.items()
            if device.peak_bytes is not None
        )
        lines.append(
            f"| {count} | {report.predicted_step_s:.4f} "
            f"| {report.measured_step_s:.4f} [{min(values):.4f}, {max(values):.4f}] "
            f"| {report.step_error:+.1%} | {memory} |"
        )
    return "\n".join(lines) + "\n"


def _bfloat16_table(options: argparse.Namespace) -> str:
    """A forward of all layers in both dtypes: seconds, and how far the outputs are apart."""
    spec = model_spec(options.model)
    chain = ChainModel.from_spec(spec)
    place = torch.device(options.device)
    shape = (options.microbatch_size, options.length)
    ids = torch.randint(spec.vocabulary_size, shape, generator=torch.Generator().manual_seed(0)).to(place)
    lines = ["| dtype | forward s, median of 20 | difference of the logits, relative |", "|---|---|---|"]
    first: Tensor | None = None
    for dtype in (torch.float32, torch.bfloat16):
        model = chain.materialise(range(chain.num_layers), 0, dtype, place).eval()
        seconds = []
        with torch.no_grad():
            for _ in range(23):
                _synchronize(place)
                begin = time.perf_counter()
                (logits,) = model.run(0, chain.num_layers, {"input_ids": ids})
                _synchronize(place)
                seconds.append(time.perf_counter() - begin)
        value = logits.float()
        first = value if first is None else first
        difference = float((value - first).norm() / first.norm())
        lines.append(f"| {str(dtype)[6:]} | {statistics.median(seconds[3:]):.5f} | {difference:.2e} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
