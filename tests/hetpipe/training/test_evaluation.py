"""The loss of held-out texts: that of one device under every plan, and training beside it unchanged."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from hetpipe.data.figures import Figures
from hetpipe.data.held_out import HeldOut
from hetpipe.data.kinds import data_sha256
from hetpipe.data.task import registered_task
from hetpipe.models.chain import ChainModel
from hetpipe.models.huggingface import model_spec
from hetpipe.models.loss import loss_sum
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.run_report import read_report
from hetpipe.runs.settings import LOSS, Decay, Settings, TaskSettings
from hetpipe.runtime.stage_runner import Microbatch
from hetpipe.training import checkpoint
from hetpipe.training.checkpoint_owners import home_layers
from hetpipe.training.evaluated import Evaluated
from hetpipe.training.evaluation import Evaluation, _Counted
from hetpipe.training.resumption import find_checkpoint
from interleaved_runs import interleaved
from partition.plan import Pipeline, Plan, Stage
from runs import chain_plan, made_up_profile, replica_plan, run

MODEL = "bert-tiny"
OTHER_PARTS = ("task", "program", "place", "forwards", "parts")
SETTINGS = Settings(
    MODEL, 4, learning_rate=1e-3, decay=Decay.COSINE, warmup_steps=1, betas=(0.8, 0.95), clip_norm=0.5
)


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    (folder / "train.txt").write_text("a text to train on, of no great length\n" * 400)
    (folder / "held.txt").write_text("other words than there, which are held out\n" * 90)
    return folder


def two_pipelines() -> Plan:
    """Uneven cuts, blocks of samples and microbatches; the last microbatch of each is smaller."""
    first = (Stage(("here/0",), (0, 3), 2), Stage(("here/1",), (3, 8), 1))
    return Plan(
        "manual",
        MODEL,
        16,
        (Pipeline(3, 10, first), Pipeline(4, 6, (Stage(("here/2",), (0, 8), 1),))),
    )


def one_device_loss(folder: RunFolder, settings: Settings) -> float:
    """The held-out loss of the last checkpoint, by one model and one sample after another."""
    settings = replace(settings)
    task = registered_task(folder, TaskSettings(MODEL, run=settings))
    assert task.held_out is not None
    chain = ChainModel.from_spec(model_spec(MODEL))
    model = chain.materialise(range(chain.num_layers), 0).eval()
    source = checkpoint.latest(folder.checkpoints)
    assert source is not None
    manifest, homes = checkpoint.read_manifest(source), home_layers(chain)
    with torch.no_grad():
        for name, value in model.owned_parameters().items():
            value.copy_(checkpoint.read_layer(source, manifest, homes[name], [name])[name])
        total = 0.0
        for sample in range(task.held_out.num_samples):
            inputs, labels = task.held_out.batch(sample, 1)
            logits = model.run(0, chain.num_layers, inputs)[0]
            total += float(loss_sum(model_spec(MODEL).task, logits, labels))
    return total / task.held_out.num_loss_tokens


def held_out(folder: RunFolder) -> dict[int, float]:
    return {row["step"]: row["eval_loss"] for row in folder.read_metrics() if "eval_loss" in row}


@pytest.mark.slow
def test_it_is_one_devices_loss_under_every_plan_and_changes_nothing(tmp_path, texts):
    settings = replace(SETTINGS, data=(str(texts / "train.txt"),))
    evaluating = replace(settings, eval_data=(str(texts / "held.txt"),), eval_every=2)
    profile, found, trained = made_up_profile(MODEL), [], []
    plans = {
        "two": two_pipelines(),
        "interleaved": interleaved(MODEL),
        "sharded gradients": replace(two_pipelines(), zero=2),
        "sharded weights": replica_plan(MODEL, 8, (3, 10), (4, 6), zero=3),
        "sharded weights of stages": replace(two_pipelines(), zero=3),
    }
    for name, plan in plans.items():
        _, losses = run(tmp_path / name, plan, evaluating, profile)
        trained.append(losses)
        folder = RunFolder(tmp_path / name / "run")
        found.append(held_out(folder))
        assert list(found[-1]) == [2, 4]
        assert found[-1][4] == pytest.approx(one_device_loss(folder, evaluating), rel=2e-6), name
        if name == "two":
            assert RunFolder(folder.held_out).tokens.stat().st_size > 0
            _, plain = run(tmp_path / "plain", plan, replace(settings, save=False), profile)
            assert plain == losses  # to the last bit
            report = read_report(folder.report)
            assert (report.eval_loss, report.best_eval_step) == (found[-1][4], 4)
    for held, losses in zip(found[1:], trained[1:], strict=True):
        assert list(held.values()) == pytest.approx(list(found[0].values()), rel=2e-6)
        assert losses == pytest.approx(trained[0], rel=2e-6)


@pytest.mark.slow
def test_training_ends_without_a_new_best_which_is_kept_and_found(tmp_path, texts):
    told: list[str] = []
    settings = replace(
        SETTINGS, steps=30, learning_rate=0.05, warmup=0.0, keep=1, patience=2, eval_every=1,
        data=(str(texts / "train.txt"),), eval_data=(str(texts / "held.txt"),), clip_norm=1e30,
    )  # fmt: skip
    with pytest.warns(UserWarning, match="2 held-out losses in a row") as warned:
        run(tmp_path, chain_plan(MODEL, [0, 3, 8], 8), settings, made_up_profile(MODEL))
    told += [str(warning.message) for warning in warned]
    folder = RunFolder(tmp_path / "run")
    losses = held_out(folder)
    best = min(losses, key=lambda step: losses[step])
    assert max(losses) == best + 2 < 30
    kept = {step: checkpoint.read_manifest(path) for step, path in checkpoint.written(folder.checkpoints)}
    assert {step: manifest.best for step, manifest in kept.items()} == {best: True, best + 2: False}
    assert kept[best + 2].evaluated == Evaluated(
        best + 2, losses[best + 2], best, losses[best], 2, of=data_sha256(folder.held_out)
    )
    for what in ("best", str(folder.path / "best")):
        source = find_checkpoint(what, folder, tmp_path, MODEL)
        assert source.name == f"step-{best:06d}"


def test_the_least_is_remembered_and_one_that_is_not_finite_is_none():
    now = Evaluated.after(None, 10, math.nan)
    assert now == Evaluated(10, None, 0, None, 1) and not now.is_best
    for step, loss in ((20, 3.0), (30, 2.0), (40, 2.0), (50, math.inf)):
        now = Evaluated.after(now, step, loss)
    assert now == Evaluated(50, None, 30, 2.0, 2)
    assert Evaluated.after(now, 60, 1.5) == Evaluated(60, 1.5, 60, 1.5)


def test_figures_of_other_held_out_data_are_not_compared():
    before = Evaluated.after(None, 10, 1.0, of="one")
    assert Evaluated.after(before, 20, 2.0, of="one") == Evaluated(20, 2.0, 10, 1.0, 1, of="one")
    assert Evaluated.after(before, 20, 2.0, of="another") == Evaluated(20, 2.0, 20, 2.0, of="another")
    unknown = Evaluated.after(None, 10, 1.0)  # of an older checkpoint
    assert Evaluated.after(unknown, 20, 2.0, of="one") == Evaluated(20, 2.0, 20, 2.0, of="one")


@pytest.mark.parametrize(
    ("of", "by", "told"),
    [
        ("one", LOSS, []),
        ("one", "accuracy", ["the best is by loss, before the checkpoint by accuracy"]),
        ("another", LOSS, ["the held-out data are others (sha256 one) than before the checkpoint (another)"]),
        ("", LOSS, ["the checkpoint does not tell of which data its best is"]),
    ],
)
def test_what_goes_on_with_other_held_out_data_or_another_figure_says_so(of: str, by: str, told: list[str]):
    found: list[dict[str, Any]] = []
    evaluation = Evaluation(held_out=HeldOut(1, 1, cast(Any, None), "one"), **dict.fromkeys(OTHER_PARTS))
    evaluation.go_on(Evaluated.after(None, 10, 1.0, {"accuracy": 0.5}, by, of=of), found.append)
    assert [event["text"].partition(";")[0] for event in found] == told


@pytest.mark.slow
def test_a_resumed_run_on_other_held_out_texts_says_so_and_finds_the_best_anew(tmp_path, texts):
    settings = replace(
        SETTINGS,
        steps=2,
        total_steps=4,
        data=(str(texts / "train.txt"),),
        eval_data=(str(texts / "train.txt"),),
    )
    plan, profile = chain_plan(MODEL, [0, 8], 8), made_up_profile(MODEL)
    run(tmp_path, plan, settings, profile)
    folder = RunFolder(tmp_path / "run")
    harder = replace(
        settings,
        steps=4,
        eval_data=(str(texts / "held.txt"),),
        resume_from=str(folder.checkpoints / "step-000002"),
    )
    with pytest.warns(UserWarning, match="the held-out data are others .* what is best is found anew"):
        run(tmp_path, plan, harder, profile)
    report = read_report(folder.report)
    assert report.best_eval_step == 4 and report.best_eval_loss == report.eval_loss
    found = checkpoint.best(folder.checkpoints)
    assert found is not None and found.name == "step-000004"


def test_figures_are_joined_once_however_many_microbatches_there_are():
    joined: list[int] = []

    def added(counts):
        joined.append(len(counts))
        return [sum(values) for values in zip(*counts, strict=True)]

    def right(outputs, labels):
        return float((outputs == labels).sum()), float(len(labels))

    counted = _Counted(Figures(("accuracy",), right, added, lambda counts: [counts[0] / counts[1]]))
    assert counted.counts is None
    for index in range(50):
        counted.seen(torch.tensor([0, index]), Microbatch(0, (0, 1), {}, torch.tensor([0, 7]), 1.0))
    assert counted.counts == [51.0, 100.0] and joined == [50]
    assert counted.figures_of([[51.0, 100.0], None]) == {"accuracy": 0.51}
