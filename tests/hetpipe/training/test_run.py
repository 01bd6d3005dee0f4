"""The plan never changes the mathematics: real runs of several processes against one."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cost_model.errors import InputError
from hetpipe.data.task import prepare_data, registered_task
from hetpipe.models.chain import ChainModel
from hetpipe.models.huggingface import model_spec
from hetpipe.models.keyed_dropout import KeyedDropout
from hetpipe.models.loss import loss_sum
from hetpipe.runs.identity import identity_of
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.settings import Settings, TaskSettings
from hetpipe.training.resumption import find_checkpoint
from interleaved_runs import first_moments, interleaved
from partition.plan import Pipeline, Plan, Stage
from runs import CPU_CLUSTER, chain_plan, made_up_profile, run

MODEL = "bert-tiny"  # 6 blocks, dropout 0.1
WHOLE = [0, 8]
EVEN = [0, 3, 6, 8]
UNEVEN = [0, 1, 4, 7, 8]


def relative(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))


def plain_losses(folder: Path, settings: Settings) -> list[float]:
    """The same training without anything of the runtime but data, initial weights and dropout keys."""
    spec = model_spec(MODEL)
    run_folder, task_settings = RunFolder(folder), TaskSettings(MODEL, run=settings)
    folder.mkdir()
    prepare_data(run_folder, task_settings)
    task = registered_task(run_folder, task_settings)
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
    settings = Settings(MODEL, 12, learning_rate=1e-3, save=False)
    profile = made_up_profile(MODEL)
    expected = plain_losses(tmp_path / "plain", settings)
    assert expected[-1] < expected[0] - 0.1  # it learns
    for name, plan, shared in (
        ("one", chain_plan(MODEL, WHOLE, 4), 0),
        ("even", chain_plan(MODEL, EVEN, 4), 1),
    ):  # others below, where they are resumed
        report, losses = run(tmp_path / name, plan, settings, profile)
        assert relative(losses, expected) < 2e-6, name
        assert report.owners_agree
        assert report.shared_parameters == shared, name


@pytest.mark.slow
def test_gradients_of_the_first_step_equal_one_process_in_float64(tmp_path):
    # with clipping off, AdamW's first moment after one step is (1 - beta1) times the gradient
    settings = Settings(MODEL, 1, dtype="float64", save=True, clip_norm=1e30)
    profile = replace(made_up_profile(MODEL), dtype="float64")
    plans = {
        "one": chain_plan(MODEL, WHOLE, 16),
        "recompute, a short last microbatch": chain_plan(MODEL, EVEN, 3, recompute=True),
        "a shared device": shared_device(MODEL),
        "one device feeds three": unequal_widths(MODEL),
        "two cuts over two devices": two_cuts(MODEL),
        "two stages in a row, recompute by layer": interleaved(
            MODEL, (0, 0, 1, 0), recompute=True, segment_layers=1
        ),
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


def shared_device(model: str) -> Plan:
    """Two pipelines that begin on one device, the embeddings in both, and another cut for each."""
    first = Pipeline(2, 10, (Stage(("here/0",), (0, 3), 3), Stage(("here/1",), (3, 8), 1)))
    second = Pipeline(4, 6, (Stage(("here/0",), (0, 5), 2), Stage(("here/2",), (5, 8), 1)))
    return Plan("manual", model, 16, (first, second))


def unequal_widths(model: str) -> Plan:
    """Of 8 samples at a time three replicas of the second stage take 4, 3 and 1; the first has no other."""
    pipelines = tuple(
        Pipeline(size, 2 * size, (Stage(("here/0",), (0, 4), 2), Stage((f"here/{device}",), (4, 8), 1)))
        for device, size in enumerate((4, 3, 1), 1)
    )
    return Plan("manual", model, 16, pipelines)


def two_cuts(model: str) -> Plan:
    """Two pipelines over the same two devices, the other way round, messages of both on each edge."""
    first = Pipeline(2, 10, (Stage(("here/0",), (0, 3), 2), Stage(("here/1",), (3, 8), 1)))
    second = Pipeline(2, 6, (Stage(("here/1",), (0, 5), 2), Stage(("here/0",), (5, 8), 1)))
    return Plan("manual", model, 16, (first, second))


LATE_LINKS = CPU_CLUSTER.replace('"50 us"', '"50 ms"')
"""Latency makes the tree cheaper than the ring; on devices that are not emulated it slows nothing down."""


def data_parallel(model: str) -> Plan:
    """Three pipelines, two of them of one stage: three owners of each layer, four of the tied weights."""
    whole = [Pipeline(2, 4, (Stage((f"here/{index}",), (0, 8), 1),)) for index in range(2)]
    cut = Pipeline(2, 8, (Stage(("here/2",), (0, 5), 2), Stage(("here/3",), (5, 8), 1)))
    return Plan("manual", model, 16, (*whole, cut))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.exhaustive), "float64"])
def test_reducing_to_an_owner_that_broadcasts_gives_the_same_gradients(tmp_path, dtype):
    settings = Settings(MODEL, 2, dtype=dtype, save=True, clip_norm=1e30)
    profile = replace(made_up_profile(MODEL), dtype=dtype)
    plan = data_parallel(MODEL)
    _, expected = run(tmp_path / "one", chain_plan(MODEL, WHOLE, 16), settings, profile)
    links = {"ring": CPU_CLUSTER, "tree": LATE_LINKS}
    if dtype == "float64":
        del links["ring"]  # which test_parity.py has
    for name, cluster in links.items():
        report, losses = run(tmp_path / name, plan, settings, profile, cluster)
        text = RunFolder(tmp_path / name / "run").program.read_text()
        assert text.count(" tree\n") == (3 if name == "tree" else 0)  # two cuts of layers, and tied weights
        assert report.owners_agree and report.shared_parameters > 10
        assert relative(losses, expected) < (2e-6 if dtype == "float32" else 1e-13)
        found, whole = (first_moments(tmp_path / kind / "run") for kind in (name, "one"))
        largest = max(float(value.abs().max()) for value in whole.values())
        worst = max(float((found[key] - whole[key]).abs().max()) for key in whole)
        assert worst <= (1e-4 if dtype == "float32" else 1e-12) * largest


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt2-tiny", "llama-tiny"])
def test_causal_models_train_the_same_under_a_plan(tmp_path, model):
    settings, profile = Settings(model, 3, learning_rate=1e-3, save=False), made_up_profile(model)
    _, expected = run(tmp_path / "one", chain_plan(model, [0, 6], 8), settings, profile)
    _, losses = run(tmp_path / "three", chain_plan(model, [0, 1, 4, 6], 2), settings, profile)
    assert relative(losses, expected) < 2e-6


BEGUN = Settings(MODEL, 8, learning_rate=1e-3, save=False)


@pytest.fixture(scope="module")
def eight_steps(tmp_path_factory) -> list[float]:
    return plain_losses(tmp_path_factory.mktemp("plain") / "run", BEGUN)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "shared"),
    [(chain_plan(MODEL, UNEVEN, 1), 1), (interleaved(MODEL), 1), (shared_device(MODEL), None)],
    ids=["uneven", "interleaved", "shared device"],
)
def test_a_run_resumes_under_another_plan(tmp_path, eight_steps, plan, shared):
    profile = made_up_profile(MODEL)
    first = replace(BEGUN, steps=4, total_steps=8, save=True)
    report, losses = run(tmp_path / "two", plan, first, profile)
    assert relative(losses, eight_steps[:4]) < 2e-6
    assert report.owners_agree
    assert shared is None or report.shared_parameters == shared
    folder = RunFolder(tmp_path / "two" / "run")
    run_id = identity_of(folder)
    assert len(run_id) == 16
    source = find_checkpoint("auto", folder, tmp_path, MODEL)
    second = replace(BEGUN, resume_from=str(source))
    _, losses = run(tmp_path / "two", chain_plan(MODEL, EVEN, 4), second, profile)
    assert len(losses) == 8
    assert relative(losses[4:], eight_steps[4:]) < 3e-6
    assert [entry["step"] for entry in folder.read_metrics()] == list(range(1, 9))
    assert identity_of(folder) == run_id


def test_a_run_that_is_refused_leaves_what_the_run_before_told(tmp_path):
    settings, plan = Settings(steps=2, save=False), chain_plan("bert-tiny", [0, 8], 4)
    run(tmp_path, plan, settings, made_up_profile("bert-tiny"))
    (tmp_path / "held.txt").write_text("short")
    refused = replace(settings, eval_data=(str(tmp_path / "held.txt"),))
    with pytest.raises(InputError, match="--eval-data: the corpus has"):
        run(tmp_path, plan, refused, made_up_profile("bert-tiny"))
    folder = RunFolder(tmp_path / "run")
    assert folder.report.exists() and folder.trace.exists() and len(folder.read_metrics()) == 2
