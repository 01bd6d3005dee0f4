"""The plan never changes the mathematics: real runs of several processes against one."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hetpipe import checkpoint
from hetpipe.dropout import KeyedDropout
from hetpipe.loss import loss_sum
from hetpipe.models import model_spec
from hetpipe.run_folder import RunFolder
from hetpipe.settings import Settings
from hetpipe.splitting import ChainModel
from hetpipe.task import prepare_data, registered_task
from hetpipe.training import find_checkpoint
from partition.plan import Pipeline, Plan, Stage
from runs import chain_plan, made_up_profile, run

MODEL = "bert-tiny"  # 6 blocks, dropout 0.1
WHOLE = [0, 8]
EVEN = [0, 3, 6, 8]
UNEVEN = [0, 1, 4, 7, 8]


def relative(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))


def plain_losses(folder: Path, settings: Settings) -> list[float]:
    """The same training without anything of the runtime but data, initial weights and dropout keys."""
    spec = model_spec(settings.model)
    run_folder = RunFolder(folder)
    folder.mkdir()
    prepare_data(run_folder, settings)
    task = registered_task(run_folder, settings)
    chain = ChainModel.from_spec(spec)
    model = chain.materialise(range(chain.num_layers), settings.seed).train()
    dropout = KeyedDropout(settings.seed)
    model.on_layer = dropout.enter_layer
    trained = [value for value in model.owned_parameters().values() if value.requires_grad]
    groups = [
        {"params": [value for value in trained if value.dim() > 1], "weight_decay": settings.weight_decay},
        {"params": [value for value in trained if value.dim() <= 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups)
    losses = []
    for step in range(settings.steps):
        inputs, labels = task.batch(step * 16, 16)
        dropout.at(step, range(16))
        with dropout:
            logits = model.run(0, chain.num_layers, inputs)[0]
        loss = loss_sum(spec.task, logits, labels) / task.num_loss_tokens(16)
        adamw.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, settings.clip_norm)
        for group in adamw.param_groups:
            group["lr"] = settings.learning_rate_at(step)
        adamw.step()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
def test_losses_do_not_depend_on_the_plan(tmp_path):
    settings = Settings(MODEL, 20, learning_rate=1e-3)
    profile = made_up_profile(MODEL)
    expected = plain_losses(tmp_path / "plain", settings)
    assert expected[-1] < expected[0] - 0.1  # it learns
    for name, cuts, microbatch_size in (("one", WHOLE, 4), ("even", EVEN, 4), ("uneven", UNEVEN, 1)):
        report, losses = run(tmp_path / name, chain_plan(MODEL, cuts, microbatch_size), settings, profile)
        assert relative(losses, expected) < 2e-6, name
        assert report.owners_agree
        assert report.shared_parameters == (0 if name == "one" else 1)


@pytest.mark.slow
def test_gradients_of_the_first_step_equal_one_process_in_float64(tmp_path):
    # with clipping off, AdamW's first moment after one step is (1 - beta1) times the gradient
    settings = Settings(MODEL, 1, dtype="float64", save=True, clip_norm=1e30)
    profile = replace(made_up_profile(MODEL), dtype="float64")
    plans = {
        "one": chain_plan(MODEL, WHOLE, 16),
        "even": chain_plan(MODEL, EVEN, 4),
        "uneven": chain_plan(MODEL, UNEVEN, 1),
        "short last microbatch": chain_plan(MODEL, EVEN, 3),
        "recompute": chain_plan(MODEL, EVEN, 4, recompute=True),
        "two pipelines": two_pipelines(MODEL),
    }
    gradients = {}
    for name, plan in plans.items():
        run(tmp_path / name, plan, settings, profile)
        gradients[name] = first_moments(tmp_path / name / "run")
    largest = max(float(value.abs().max()) for value in gradients["one"].values())
    assert largest > 0
    for name, found in gradients.items():
        assert found.keys() == gradients["one"].keys()
        worst = max(float((found[key] - gradients["one"][key]).abs().max()) for key in found)
        assert worst <= 1e-12 * largest, (name, worst, largest)


def two_pipelines(model: str) -> Plan:
    first = Pipeline(2, 10, (Stage(("here/0",), (0, 5), 2), Stage(("here/1",), (5, 8), 1)))
    second = Pipeline(4, 6, (Stage(("here/2",), (0, 2), 2), Stage(("here/3",), (2, 8), 1)))
    return Plan("manual", model, 16, (first, second))


def first_moments(run_folder: Path) -> dict[str, torch.Tensor]:
    folder = checkpoint.latest(run_folder / "checkpoints")
    assert folder is not None
    tensors = {}
    for path in sorted(folder.glob("layer-*.safetensors")):
        tensors |= load_file(path)
    return {key: value for key, value in tensors.items() if key.endswith(".exp_avg")}


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt2-tiny", "llama-tiny"])
def test_causal_models_train_the_same_under_a_plan(tmp_path, model):
    settings, profile = Settings(model, 3, learning_rate=1e-3), made_up_profile(model)
    _, expected = run(tmp_path / "one", chain_plan(model, [0, 6], 8), settings, profile)
    _, losses = run(tmp_path / "three", chain_plan(model, [0, 1, 4, 6], 2), settings, profile)
    assert relative(losses, expected) < 2e-6


@pytest.mark.slow
def test_a_run_resumes_under_another_plan(tmp_path):
    profile = made_up_profile(MODEL)
    straight = Settings(MODEL, 20, learning_rate=1e-3)
    _, expected = run(tmp_path / "straight", chain_plan(MODEL, UNEVEN, 2), straight, profile)
    first = replace(straight, steps=10, total_steps=20, save=True)
    run(tmp_path / "two", chain_plan(MODEL, UNEVEN, 2), first, profile)
    folder = RunFolder(tmp_path / "two" / "run")
    source = find_checkpoint("auto", folder, tmp_path, MODEL)
    second = replace(straight, resume_from=str(source))
    _, losses = run(tmp_path / "two", chain_plan(MODEL, EVEN, 4), second, profile)
    assert len(losses) == 20
    assert relative(losses[10:], expected[10:]) < 1e-6
    assert [entry["step"] for entry in folder.read_metrics()] == list(range(1, 21))
