"""What a GPU does beside plain training, against the CPU: pytest tests/gpu. All need a GPU."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import peft_models
from cost_model.cluster import CPU
from cost_model.cluster_file import read_cluster
from cost_model.profile import ModelProfile
from hetpipe.models import philox, philox_torch
from hetpipe.models.adapters import task_spec
from hetpipe.models.chain import ChainModel
from hetpipe.profiling.profile_cache import profile_model
from hetpipe.runs.lora import LoraSettings
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.settings import OptimizerKind, Settings, TaskSettings
from hetpipe.training import checkpoint
from partition.plan import FROZEN_WEIGHTS, OPTIMIZER_STATES, OPTIMIZER_STEP, SAVED_ACTIVATIONS
from runs import CPU_CLUSTER, chain_plan, cluster_file, made_up_profile_of, run

NUM_GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(NUM_GPUS == 0, reason="no GPU here")]

LORA = LoraSettings(2, 4.0, ("query", "value"))
MODEL, ADAPTERS = "bert-tiny", "bert-tiny" + LORA.suffix
BATCH = 8
GPU_CLUSTER = (
    CPU_CLUSTER.replace('kind = "cpu", count = 4', 'kind = "gpu"')
    + 'host_memory = "1 GiB"\nhost_link = { bandwidth = "10 GB/s", latency = "10 us" }\n'
    + 'host_optimizer = "2 GB/s"\n'
)
ON_HOST = {
    "states": (MODEL, (OPTIMIZER_STATES,)),
    "states and their step": (MODEL, (OPTIMIZER_STATES, OPTIMIZER_STEP)),
    "activations": (MODEL, (SAVED_ACTIVATIONS,)),
    "frozen weights": (ADAPTERS, (FROZEN_WEIGHTS,)),
    "all": (ADAPTERS, (OPTIMIZER_STATES, FROZEN_WEIGHTS, SAVED_ACTIVATIONS)),
}


def settings(model: str, **others: Any) -> Settings:
    lora = LORA if model == ADAPTERS else None
    return Settings(
        **{"steps": 3, "total_steps": 3, "learning_rate": 1e-3, "lora": lora, "save": False, **others}
    )


def profile(model: str, kind: str, **others: Any) -> ModelProfile:
    chain = ChainModel.from_spec(task_spec(TaskSettings(model, run=settings(model))))
    return replace(made_up_profile_of(chain, model, kind), **others)


def losses(
    folder: Path, kind: str, model: str, chosen: Settings, offload: tuple[str, ...] = (), **of_profile: Any
) -> list[float]:
    """Those of one device of a kind, two microbatches in flight."""
    found = profile(model, kind, **of_profile)
    plan = chain_plan(model, [0, found.num_layers], 2, BATCH, offload=offload)
    return run(folder, plan, chosen, found, CPU_CLUSTER if kind == CPU else GPU_CLUSTER)[1]


def on_the_cpu(folder: Path, model: str, chosen: Settings) -> list[float]:
    return losses(folder / "cpu", CPU, model, chosen)


@pytest.mark.parametrize("what", ON_HOST)
def test_what_the_host_keeps_changes_no_loss(tmp_path, what):
    model, offload = ON_HOST[what]
    chosen = settings(model)
    plain = losses(tmp_path / "plain", "gpu", model, chosen)
    assert losses(tmp_path / "host", "gpu", model, chosen, offload) == pytest.approx(plain, rel=1e-6)
    assert plain == pytest.approx(on_the_cpu(tmp_path, model, chosen), rel=1e-3)


@pytest.mark.parametrize("optimizer", list(OptimizerKind))
def test_every_optimizer_steps_as_on_the_cpu(tmp_path, optimizer):
    chosen = settings(MODEL, optimizer=optimizer)
    found = losses(tmp_path / "gpu", "gpu", MODEL, chosen)
    assert found == pytest.approx(on_the_cpu(tmp_path, MODEL, chosen), rel=1e-3)


@pytest.mark.parametrize("of_profile", [{"compiled": True}, {"loss_chunks": 4}], ids=["compiled", "chunks"])
def test_compiled_blocks_and_losses_in_chunks_train_as_the_cpu_does(tmp_path, of_profile):
    chosen = settings(MODEL)
    found = losses(tmp_path / "gpu", "gpu", MODEL, chosen, **of_profile)
    assert found == pytest.approx(on_the_cpu(tmp_path, MODEL, chosen), rel=1e-3)


def test_a_checkpoint_of_a_gpu_is_gone_on_from_on_the_cpu_and_back(tmp_path):
    expected = on_the_cpu(tmp_path, MODEL, settings(MODEL, steps=4, total_steps=4))
    first = settings(MODEL, steps=2, total_steps=4, save=True)
    losses(tmp_path / "one", "gpu", MODEL, first)
    for kind, before, after in ((CPU, "one", "two"), ("gpu", "two", "three")):
        source = checkpoint.latest(RunFolder(tmp_path / before / "run").checkpoints)
        later = {"steps": 3 if kind == CPU else 4, "resume_from": str(source)}
        found = losses(tmp_path / after, kind, MODEL, settings(MODEL, total_steps=4, save=True, **later))
        assert found == pytest.approx(expected[later["steps"] - 1 : later["steps"]], rel=1e-3)


def test_adapters_beside_four_bits_train_near_the_cpu(tmp_path):
    pytest.importorskip("bitsandbytes")
    architecture = next(name for name in peft_models.TARGETS if "Llama" in name)
    lora = LoraSettings(4, 8.0, peft_models.TARGETS[architecture])
    base = peft_models.base_folder(tmp_path, architecture)
    name = peft_models.name_of(base, lora, "4bit")
    chosen = replace(settings(name), model_folder=str(base), lora=lora, load_in="4bit", learning_rate=1e-2)
    chain = peft_models.chain_of(base, lora, "4bit")
    found = {}
    for kind, cluster in ((CPU, CPU_CLUSTER), ("gpu", GPU_CLUSTER)):
        made_up = made_up_profile_of(chain, name, kind, sequence_length=12)
        plan = chain_plan(name, [0, made_up.num_layers], 2, BATCH)
        found[kind] = run(tmp_path / kind, plan, chosen, made_up, cluster)[1]
    assert found["gpu"] == pytest.approx(found[CPU], rel=1e-2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(4, 2**18 - 1), (5, 3, 67), (2, 1)])
def test_a_gpu_drops_the_same_elements_as_the_cpu(dtype, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    drawn = philox_torch.draw(0x123456789ABCDEF, 3, list(range(2**40, 2**40 + len(x))), 0.7)
    assert torch.equal(philox.dropped(x.cuda(), drawn).cpu(), philox.dropped(x, drawn))


def test_a_profile_goes_beyond_single_samples_though_kernels_load_at_the_first(tmp_path):
    """Of a budget in which the first forward, with all that it loads, would leave no time for a second."""
    cluster = read_cluster(cluster_file(tmp_path, GPU_CLUSTER))
    found = profile_model(
        "gpt2-tiny", cluster, 64, budget_s=2.0, microbatch_sizes=None, use_cache=False, tell=lambda text: None
    )
    assert len(found.kinds["gpu"].microbatch_sizes) > 2
