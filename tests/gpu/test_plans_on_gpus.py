"""Plans that could hang or fail on GPUs alone: pytest tests/gpu. All are left out where there is no GPU."""

import dataclasses
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import user_tasks
from cost_model.cluster import CPU
from cost_model.dtypes import BFLOAT16_AUTOCAST, FLOAT16_AUTOCAST, GRADIENT_BF16
from cost_model.profile import ModelProfile
from hetpipe.data.task import TrainingTask
from hetpipe.models.chain import ChainModel
from hetpipe.models.huggingface import model_spec
from hetpipe.program.instructions import Schedule
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.settings import Settings, TaskSettings
from hetpipe.runtime.processes import WorkerLostError
from hetpipe.training.run import train
from partition.plan import Pipeline, Plan, Stage
from runs import CPU_CLUSTER, chain_plan, cluster_file, made_up_profile_of, run

NUM_GPUS = torch.cuda.device_count()
MODEL = "gpt2-tiny"
SOON_S = 60.0
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(NUM_GPUS == 0, reason="no GPU here")]

HEAD = CPU_CLUSTER[: CPU_CLUSTER.index("devices")]
CLUSTERS = {
    "a GPU and a CPU": HEAD
    + 'devices = [{ kind = "gpu", memory = "4 GiB" }, { kind = "cpu", memory = "4 GiB" }]\n',
    "two GPUs": HEAD + 'devices = [{ kind = "gpu", count = 2, memory = "4 GiB" }]\n',
}
ONE_CPU = Plan("manual", MODEL, 16, (Pipeline(2, 16, (Stage(("here/0",), (0, 6), 1),)),))


def stages(in_flight: tuple[int, int], **settings: object) -> tuple[Stage, Stage]:
    return (
        Stage(("here/0",), (0, 3), in_flight[0], **settings),  # type: ignore[arg-type]
        Stage(("here/1",), (3, 6), in_flight[1], **settings),  # type: ignore[arg-type]
    )


def replicas() -> tuple[Pipeline, ...]:
    return tuple(Pipeline(2, 8, (Stage((f"here/{index}",), (0, 6), 1),)) for index in range(2))


def plan(*pipelines: Pipeline, **settings: object) -> Plan:
    return Plan("manual", MODEL, 16, pipelines, **settings)  # type: ignore[arg-type]


CROSSING = (
    Pipeline(2, 8, stages((2, 1))),
    Pipeline(2, 8, (Stage(("here/1",), (0, 3), 2), Stage(("here/0",), (3, 6), 1))),
)
PLANS = {
    "one microbatch": plan(Pipeline(16, 16, stages((1, 1)))),
    "one in flight": plan(Pipeline(2, 16, stages((1, 1)))),
    "1F1B": plan(Pipeline(2, 16, stages((2, 1)))),
    "recompute": plan(Pipeline(2, 16, stages((2, 1), recompute=True))),
    "recompute by layer": plan(Pipeline(2, 16, stages((2, 1), recompute=True, segment_layers=1))),
    "crossing pipelines": plan(*CROSSING),
    "replicas": plan(*replicas()),
    "sharded states": plan(*replicas(), zero=1),
    "sharded gradients": plan(*replicas(), zero=2),
    "sharded weights": plan(*replicas(), zero=3),
    "gradients in bf16": plan(*replicas(), gradient_dtype=GRADIENT_BF16),
    "sharded states, gradients in bf16": plan(*replicas(), zero=1, gradient_dtype=GRADIENT_BF16),
}


def profile(dtype: str = "float32") -> ModelProfile:
    """Made up, alike for both kinds."""
    chain = ChainModel.from_spec(model_spec(MODEL))
    found = made_up_profile_of(chain, MODEL, "gpu", dtype=dtype)
    return dataclasses.replace(found, kinds=dict.fromkeys(("gpu", CPU), found.kinds["gpu"]))


def losses(
    folder: Path, plan: Plan, cluster: str, dtype: str = "float32", schedule: Schedule | None = None
) -> list[float]:
    folder.mkdir(parents=True, exist_ok=True)
    corpus = folder / "corpus.txt"
    corpus.write_text("a stage waits for what it needs to arrive\n" * 400)
    settings = Settings(
        MODEL, steps=3, learning_rate=1e-3, data=(str(corpus),), save=False, schedule=schedule
    )
    report, found = run(folder, plan, settings, profile(dtype), cluster)
    assert report.owners_agree and len(found) == 3
    return found


@pytest.fixture(scope="module")
def on_one_cpu(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return losses(tmp_path_factory.mktemp("cpu"), ONE_CPU, CPU_CLUSTER)


@pytest.fixture(params=CLUSTERS)
def cluster(request: pytest.FixtureRequest) -> str:
    if request.param == "two GPUs" and NUM_GPUS < 2:
        pytest.skip("NCCL wants a GPU for each process, and one is here")
    return CLUSTERS[request.param]


@pytest.mark.parametrize("shape", PLANS)
def test_every_shape_of_plan_trains_as_one_cpu_does(tmp_path, on_one_cpu, cluster, shape):
    assert losses(tmp_path, PLANS[shape], cluster) == pytest.approx(on_one_cpu, rel=1e-3)


def test_gpipe_trains_as_one_cpu_does(tmp_path, on_one_cpu, cluster):
    all_in_flight = plan(Pipeline(2, 16, stages((8, 8))))
    found = losses(tmp_path, all_in_flight, cluster, schedule=Schedule.GPIPE)
    assert found == pytest.approx(on_one_cpu, rel=1e-3)


@pytest.mark.parametrize("dtype", [BFLOAT16_AUTOCAST, FLOAT16_AUTOCAST])
@pytest.mark.parametrize("shape", ["1F1B", "replicas"])
def test_two_ranks_train_in_sixteen_bits_near_float32(tmp_path, on_one_cpu, cluster, shape, dtype):
    found = losses(tmp_path, PLANS[shape], cluster, dtype)
    assert found == pytest.approx(on_one_cpu, rel=2e-2)


class Scratch(nn.Module):
    """Passes its input on, and takes 0.5 and 0.7 of a GPU's memory in turn: what the allocator kept of the
    one does not serve the other, and it has to give back and ask again, while messages are under way."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        share = (0.5, 0.7)[self.calls % 2]
        size = int(share * torch.cuda.mem_get_info(x.device)[1]) if x.is_cuda else 1 << 20
        return x + torch.empty(size, dtype=torch.uint8, device=x.device)[:1].zero_()


class Doomed(nn.Module):
    """Passes its input on, and kills its process at the fifth call there."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += dist.is_initialized()
        if self.calls == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return x * 1.0


def between(layer: type[nn.Module]) -> nn.Module:
    features = user_tasks.NUM_FEATURES
    return nn.Sequential(nn.Linear(features, 16), layer(), nn.Linear(16, user_tasks.NUM_OUTPUTS))


def build_scratch() -> nn.Module:
    return between(Scratch)


def build_doomed() -> nn.Module:
    return between(Doomed)


def scratch_task(folder: RunFolder, settings: TaskSettings) -> TrainingTask:
    return user_tasks.task_of(settings, build_scratch)


def doomed_task(folder: RunFolder, settings: TaskSettings) -> TrainingTask:
    return user_tasks.task_of(settings, build_doomed)


def run_own(folder: Path, cluster: str, task: object) -> list[float]:
    """Three steps of a pipeline of two stages, the first of which holds the layer that is tried."""
    chain = task(None, TaskSettings("mine", 1)).chain  # type: ignore[operator]
    found = made_up_profile_of(chain, "mine", "gpu", sequence_length=1)
    found = dataclasses.replace(found, kinds=dict.fromkeys(("gpu", CPU), found.kinds["gpu"]))
    folder.mkdir(exist_ok=True)
    run_folder = RunFolder(folder / "run")
    settings = Settings("mine", steps=3, learning_rate=1e-3, save=False)
    train(settings, cluster_file(folder, cluster), found, chain_plan("mine", [0, 2, 3], 2), run_folder,
          make_task=task)  # type: ignore[arg-type]  # fmt: skip
    return [entry["loss"] for entry in run_folder.read_metrics()]


def test_a_gpu_whose_allocator_must_give_memory_back_trains_on(tmp_path, cluster):
    on_cpus = run_own(tmp_path / "cpus", CPU_CLUSTER, scratch_task)
    assert run_own(tmp_path / "gpus", cluster, scratch_task) == pytest.approx(on_cpus, rel=1e-3)


def test_a_killed_rank_ends_the_run_soon_and_is_named(tmp_path, cluster):
    begin = time.monotonic()
    with pytest.raises(WorkerLostError, match=r"rank 0 \(here/0\) was killed by signal 9"):
        run_own(tmp_path, cluster, doomed_task)
    assert time.monotonic() - begin < SOON_S
