"""Real runs on GPUs: pytest tests/gpu. All are left out where there is no GPU."""

import dataclasses
from pathlib import Path

import pytest
import torch

import user_tasks
from cost_model.cluster import CPU
from cost_model.errors import InputError
from cost_model.profile import ModelProfile
from hetpipe.models.chain import ChainModel
from hetpipe.models.huggingface import model_spec
from hetpipe.profiling.layer_profiler import profile_task
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.run_report import RunReport
from hetpipe.runs.settings import Settings, TaskSettings
from partition.plan import Pipeline, Plan, Stage
from runs import CPU_CLUSTER, chain_plan, made_up_profile, run

NUM_GPUS = torch.cuda.device_count()
MODEL = "gpt2-tiny"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(NUM_GPUS == 0, reason="no GPU here")]
two_gpus = pytest.mark.skipif(NUM_GPUS < 2, reason="NCCL wants a GPU for each process, and one is here")

GPUS = """
name = "gpus"
[network]
bandwidth = "10 Gbit/s"
latency = "50 us"
[[nodes]]
name = "here"
devices = [{ kind = "gpu", count = 8, memory = "4 GiB" }]
"""
MIXED = GPUS.replace(
    'count = 8, memory = "4 GiB" }', 'memory = "4 GiB" }, { kind = "cpu", memory = "4 GiB" }'
)


def train(
    folder: Path, plan: Plan, profile: ModelProfile | str, cluster: str
) -> tuple[RunReport, list[float]]:
    """profile: or the kind of a made-up one."""
    corpus = folder / "corpus.txt"
    folder.mkdir(parents=True, exist_ok=True)
    corpus.write_text("a stage waits for what it needs to arrive\n" * 400)
    settings = Settings(MODEL, steps=3, learning_rate=1e-3, data=(str(corpus),), save=False)
    found = made_up_profile(MODEL, profile) if isinstance(profile, str) else profile
    return run(folder, plan, settings, found, cluster)


@pytest.fixture(scope="module")
def losses_on_the_cpu(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return train(tmp_path_factory.mktemp("cpu"), chain_plan(MODEL, [0, 6], 2), CPU, CPU_CLUSTER)[1]


def test_one_gpu_trains_as_the_cpu_does(tmp_path, losses_on_the_cpu):
    report, losses = train(tmp_path, chain_plan(MODEL, [0, 6], 2), "gpu", GPUS)
    assert losses == pytest.approx(losses_on_the_cpu, rel=1e-3)
    assert report.owners_agree and not report.emulated


def test_the_allocators_peak_holds_weights_gradients_and_states(tmp_path):
    plan = chain_plan(MODEL, [0, 6], 2)
    report, _ = train(tmp_path, plan, "gpu", GPUS)
    trained = sum(layer.parameter_bytes - layer.tied_bytes for layer in made_up_profile(MODEL).layers)
    peak = report.devices["here/0"].peak_bytes
    assert peak is not None and 4 * trained <= peak < torch.cuda.get_device_properties(0).total_memory


def test_two_stages_share_one_gpu_in_one_process(tmp_path, losses_on_the_cpu):
    stages = (Stage(("here/0",), (0, 3), 2), Stage(("here/0",), (3, 6), 1))
    plan = Plan("manual", MODEL, 16, (Pipeline(2, 16, stages),))
    assert train(tmp_path, plan, "gpu", GPUS)[1] == pytest.approx(losses_on_the_cpu, rel=1e-3)


@two_gpus
def test_two_gpus_train_a_pipeline_as_the_cpu_does(tmp_path, losses_on_the_cpu):
    losses = train(tmp_path, chain_plan(MODEL, [0, 3, 6], 2), "gpu", GPUS)[1]
    assert losses == pytest.approx(losses_on_the_cpu, rel=1e-3)


@two_gpus
def test_two_gpus_sum_gradients_as_the_cpu_does(tmp_path, losses_on_the_cpu):
    pipelines = tuple(Pipeline(2, 8, (Stage((f"here/{index}",), (0, 6), 1),)) for index in range(2))
    report, losses = train(tmp_path, Plan("manual", MODEL, 16, pipelines), "gpu", GPUS)
    assert losses == pytest.approx(losses_on_the_cpu, rel=1e-3)
    assert report.shared_parameters > 0 and report.owners_agree


def test_a_gpu_that_is_not_there_is_named(tmp_path):
    if NUM_GPUS >= 8:
        pytest.skip("the cluster of this test has eight, and they are here")
    stage = Stage((f"here/{NUM_GPUS}",), (0, 6), 1)
    plan = Plan("manual", MODEL, 16, (Pipeline(2, 16, (stage,)),))
    with pytest.raises(InputError, match=f"this host has no GPU {NUM_GPUS}"):
        train(tmp_path, plan, "gpu", GPUS)


def mixed_profile() -> ModelProfile:
    profile = made_up_profile(MODEL, "gpu")
    profile.kinds[CPU] = profile.kinds["gpu"]  # type: ignore[index]
    return profile


def mixed_plan(shape: str) -> Plan:
    """A pipeline over the GPU and the CPU, or one on each."""
    if shape == "pipeline":
        return chain_plan(MODEL, [0, 3, 6], 2)
    pipelines = tuple(Pipeline(2, 8, (Stage((f"here/{index}",), (0, 6), 1),)) for index in range(2))
    return Plan("manual", MODEL, 16, pipelines)


@pytest.mark.parametrize("shape", ["pipeline", "data parallel"])
def test_a_gpu_and_a_cpu_train_together_as_the_cpu_does(tmp_path, losses_on_the_cpu, shape):
    report, losses = train(tmp_path, mixed_plan(shape), mixed_profile(), MIXED)
    assert losses == pytest.approx(losses_on_the_cpu, rel=1e-3)
    assert report.owners_agree and not report.emulated


@pytest.mark.parametrize("model", ["gpt2-tiny", "llama-tiny", "bert-tiny"])
def test_a_forward_in_bfloat16_is_near_that_in_float32(model):
    spec = model_spec(model)
    chain = ChainModel.from_spec(spec)
    ids = torch.arange(128).reshape(2, 64) % spec.vocabulary_size
    logits = {}
    for dtype, place in ((torch.float32, "cpu"), (torch.bfloat16, "cuda")):
        layers = chain.materialise(range(chain.num_layers), 0, dtype, place)
        with torch.no_grad():
            (value,) = layers.eval().run(0, chain.num_layers, {"input_ids": ids.to(place)})
        logits[dtype] = value.cpu().float()
        assert value.dtype is dtype
    # eight bits of mantissa: about three digits, some of which the layers use up
    difference = (logits[torch.bfloat16] - logits[torch.float32]).norm()
    assert difference <= 0.05 * logits[torch.float32].norm()


def test_events_time_more_work_as_longer(tmp_path):
    settings = TaskSettings("mine", 1)

    def batch(first_sample: int, num_samples: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        ones = (torch.ones(num_samples, size) for size in (user_tasks.NUM_FEATURES, user_tasks.NUM_OUTPUTS))
        return {"x": next(ones)}, next(ones)

    task = dataclasses.replace(user_tasks.linear_task(RunFolder(tmp_path), settings), batch=batch)
    profile = profile_task(task, settings, "gpu", (1, 1 << 20), 0.01, device=torch.device("cuda", 0))
    # a million samples against one: no matter how much a launch costs
    forward = [layer.forward_s for layer in profile.kinds["gpu"].layers]
    assert sum(times[1] for times in forward) > sum(times[0] for times in forward) > 0
