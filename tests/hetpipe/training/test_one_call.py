"""A trainer that is given model, data, optimizer, loss, cluster and batch, and does the rest by itself."""

import copy
import multiprocessing
import os
import signal
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch
from torch import nn

import user_tasks
from cost_model.errors import InputError
from hetpipe.cli import main
from hetpipe.data.own_code import own_code_sha256
from hetpipe.data.user_task import SummedLoss
from hetpipe.runs.run_report import RunReport
from hetpipe.training.callbacks import Callback
from hetpipe.training.checkpoint_weights import load_weights
from hetpipe.training.own_planning import name_of, sizes_for
from hetpipe.training.trained_model import TrainedModel
from hetpipe.training.trainer import AdamW, Trainer
from notebook_runs import execute
from partition.plan import Plan
from runs import EMULATED_CLUSTER, chain_plan, cluster_file, emulated_cluster
from trainers import Recorder, module, plain_losses, trainer

pytestmark = pytest.mark.filterwarnings("ignore:the times of")  # they are measured for a second
BATCH = 8


class Steady(nn.Module):
    """A layer whose time is long enough to plan by."""

    def __init__(self, width: int, times: int) -> None:
        super().__init__()
        self.times = times
        self.inner = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            x = torch.tanh(self.inner(x))
        return x


def stack(times: int = 2) -> nn.Sequential:
    torch.manual_seed(1)
    layers = [Steady(64, times) for _ in range(3)]
    return nn.Sequential(
        nn.Linear(user_tasks.NUM_FEATURES, 64), *layers, nn.Linear(64, user_tasks.NUM_OUTPUTS)
    )


def samples(count: int = 40) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(x.float(), y.float()) for x, y in user_tasks.samples(count)]


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make a trainer in a folder and with a cache of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cluster_file(tmp_path, EMULATED_CLUSTER)

    def make(model: Any = None, data: Any = None, **options: Any) -> Trainer:
        given = {
            "cluster": "cluster.toml",
            "batch_size": BATCH,
            "rate_schedule": user_tasks.constant,
            **options,
        }
        optimizer = given.pop("optimizer", AdamW(1e-2))
        loss = given.pop("loss", user_tasks.squared_error)
        return Trainer(stack() if model is None else model, data or samples(), optimizer, loss, **given)

    return make


@pytest.mark.slow
def test_it_measures_plans_and_trains_once_through_the_data_as_torch_does(made, capsys):
    recorder, model = Recorder(), stack()
    trainer = made(model, optimizer=user_tasks.sgd, callbacks=[recorder])
    assert trainer.plan is None
    report = trainer.fit()
    assert report.steps == 5  # 40 samples
    alone = copy.deepcopy(model)
    optimizer = user_tasks.sgd(list(alone.parameters()))
    expected = plain_losses(alone, optimizer, user_tasks.constant, data=samples(), steps=5, batch=BATCH)
    assert [entry["loss"] for entry in recorder.metrics] == pytest.approx(expected, rel=1e-5)
    assert isinstance(trainer.plan, Plan) and trainer.plan.global_batch_size == BATCH
    assert trainer.plan.strategy == "auto" and trainer.plan.model == "sequential"
    out = capsys.readouterr().out
    assert "sequential: " in out and "on here/" in out and "predicted" in out
    assert "step 5/5" in out and "run folder: runs/sequential-001" in out.replace("\n", " ")
    assert main(["export", "runs/sequential-001", "-o", "exported"]) == 2
    assert "only that can build it; call trainer.save_pretrained" in capsys.readouterr().err
    again = made(stack(), optimizer=user_tasks.sgd, progress=False)
    again.prepare()
    assert again.plan is not None and capsys.readouterr().out == ""
    if list(Path("cache/hetpipe").rglob("*.json")):  # times that are known well are kept
        assert again.profile == trainer.profile
        other = made(stack(times=3), optimizer=user_tasks.sgd, progress=False)
        other.prepare()
        assert other.profile != trainer.profile


@pytest.mark.slow
def test_the_loss_of_held_out_samples_is_that_of_the_trained_model(made):
    recorder, model, held_out = Recorder(), stack(), samples(19)
    trainer = made(model, callbacks=[recorder], eval_data=held_out, eval_every=2, progress=False)
    trainer.fit(3)
    assert ["eval_loss" in entry for entry in recorder.metrics] == [False, True, True]
    load_weights(trainer.checkpoint, model)
    x, y = (torch.stack(each) for each in zip(*held_out[:16], strict=True))  # whole batches
    with torch.no_grad():
        expected = user_tasks.squared_error(model(x), y).item() / 16
    assert recorder.metrics[-1]["eval_loss"] == pytest.approx(expected, rel=1e-5)
    best = [entry["best"] for entry in recorder.metrics if "best" in entry]
    assert best[0]


class Kill(Callback):
    """Kills a rank after a step, once."""

    def __init__(self, step: int) -> None:
        self.step, self.reports = step, list[RunReport]()

    def on_step_end(self, metrics: Mapping[str, Any]) -> None:
        if metrics["step"] == self.step:
            self.step = 0
            os.kill(
                min(child.pid for child in multiprocessing.active_children() if child.pid), signal.SIGKILL
            )

    def on_end(self, report: RunReport) -> None:
        self.reports.append(report)


@pytest.mark.slow
def test_a_run_that_loses_a_device_goes_on_and_its_losses_stay(made):
    killed, kill, alone = Recorder(), Kill(4), stack()
    trainer = made(optimizer=user_tasks.sgd, callbacks=[killed, kill], every=2, progress=False)
    with pytest.warns(UserWarning, match="was killed by signal 9"):
        trainer.fit(6)
    (report,) = kill.reports
    assert len(report.recoveries) == 1 and report.steps <= 6
    losses = {entry["step"]: entry["loss"] for entry in killed.metrics}
    optimizer = user_tasks.sgd(list(alone.parameters()))
    expected = plain_losses(alone, optimizer, user_tasks.constant, data=samples(), steps=6, batch=BATCH)
    assert losses == pytest.approx(dict(enumerate(expected, 1)), rel=1e-5)


@pytest.mark.slow
def test_lambdas_and_what_they_see_reach_the_ranks(made):
    scale, recorder, alone = 0.5, Recorder(), stack()
    loss = lambda outputs, labels: scale * (outputs - labels).square().sum()  # noqa: E731
    made(callbacks=[recorder], loss=loss, progress=False, save=False).fit(1)
    optimizer = user_tasks.sgd(list(alone.parameters()))
    (whole,) = plain_losses(alone, optimizer, user_tasks.constant, data=samples(), steps=1, batch=BATCH)
    assert recorder.metrics[0]["loss"] == pytest.approx(whole / 2, rel=1e-5)


@pytest.mark.slow
def test_a_model_of_transformers_is_saved_as_one(made, tmp_path):
    from transformers import GPT2LMHeadModel

    trainer = made(
        user_tasks.build_gpt2,
        user_tasks.sequences(16),
        loss=user_tasks.next_token_loss,
        count_terms=user_tasks.num_next_tokens,
        progress=False,
    )
    with pytest.raises(InputError, match="there is no checkpoint of a trained model; fit first"):
        trainer.save_pretrained(tmp_path / "saved")
    trainer.fit()
    trainer.save_pretrained(tmp_path / "saved")
    model = user_tasks.build_gpt2()
    load_weights(trainer.checkpoint, model)
    found = GPT2LMHeadModel.from_pretrained(tmp_path / "saved").state_dict()
    assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())
    with pytest.raises(InputError, match="exists and is not an empty folder"):
        trainer.save_pretrained(tmp_path / "saved")


CELLS = (
    """
    import torch, hetpipe

    class Wave(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(8, 8)
        def forward(self, x):
            return bend(self.inner(x))

    def bend(x):
        return torch.sin(x)

    def loss(outputs, labels):
        return (outputs - labels).square().sum()

    data = [(torch.full((8,), k / 16), torch.ones(8)) for k in range(16)]
    """,
    """
    model = torch.nn.Sequential(Wave(), Wave(), Wave())
    trainer = hetpipe.Trainer(model, data, hetpipe.AdamW(0.1), loss, cluster="cluster.toml", batch_size=8)
    report = trainer.fit(steps=4)
    losses = [line["loss"] for line in trainer.folder.read_metrics()]
    assert report.steps == 4 and losses[-1] < losses[0], losses
    """,
)


@pytest.mark.slow
def test_what_a_notebook_defines_reaches_the_ranks(made, tmp_path):
    book = nbformat.v4.new_notebook()  # type: ignore[no-untyped-call]
    book.cells = [nbformat.v4.new_code_cell(textwrap.dedent(text)) for text in CELLS]  # type: ignore[no-untyped-call]
    execute(book, tmp_path)
    assert (tmp_path / "runs" / "sequential-001" / "report.html").exists()


def test_the_cache_knows_a_model_by_its_code_and_sizes(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    helper, layers = tmp_path / "my_helper.py", tmp_path / "my_layers.py"
    helper.write_text("def bend(x):\n    return x\n")
    layers.write_text(
        "import torch\nfrom my_helper import bend\n\n\nclass Layer(torch.nn.Linear):\n"
        "    def forward(self, x):\n        return bend(super().forward(x))\n"
    )
    import my_layers  # type: ignore[import-not-found]

    def key(width: int = 4, **attributes: Any) -> str:
        model = nn.Sequential(my_layers.Layer(width, width), nn.Dropout(0.1))
        for name, value in attributes.items():
            setattr(model[1], name, value)
        return own_code_sha256(model, user_tasks.squared_error, None)

    first = key()
    assert key() == first
    assert len({first, key(5), key(p=0.2), key(inplace=True)}) == 4
    model = nn.Sequential(my_layers.Layer(4, 4), nn.Dropout(0.1))
    losses = user_tasks.squared_error, nn.MSELoss(reduction="sum")
    for frozen, loss in ((True, losses[0]), (False, losses[1])):
        model.requires_grad_(not frozen)
        assert own_code_sha256(model, loss, None) != first
    helper.write_text("def bend(x):\n    return 2 * x\n")  # what the layer's file imports
    assert key() != first


@pytest.mark.parametrize(
    ("batch", "sizes"), [(1, (1,)), (3, (1, 2)), (8, (1, 2, 4)), (32, (1, 2, 4, 8)), (64, (1, 2, 4, 8, 16))]
)
def test_sizes_of_microbatches_that_are_measured(tmp_path, batch, sizes):
    assert sizes_for(batch, emulated_cluster(tmp_path)) == sizes


def test_names_of_runs():
    assert name_of(nn.Sequential()) == "sequential" and name_of(user_tasks.build_gpt2) == "build-gpt2"
    assert name_of(lambda: nn.Sequential()) == "lambda"
    assert name_of(print.__class__.__call__) in ("call", "own")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["org/model", "../x", ".x", "", "x" * 101, "a\nb", 3])
def test_a_name_that_no_folder_can_have_is_refused(tmp_path, name):
    with pytest.raises(InputError, match=r"name is .*; give what a folder can be called"):
        trainer(tmp_path, name=name)


def test_a_plan_goes_by_its_name(tmp_path):
    plan = chain_plan("mine", [0, 2, 5], 4)
    with pytest.raises(InputError, match="the model is a Plan; give model, data, optimizer, loss, and plan="):
        Trainer(plan, stack(), samples(), AdamW(), cluster=cluster_file(tmp_path))  # type: ignore[arg-type]


def test_a_model_with_frozen_weights_in_16_bits_is_evaluated_as_it_was_trained():
    model = user_tasks.build_plain()
    model[0].bfloat16().requires_grad_(False)
    wide = copy.deepcopy(model).float()
    data = [(x.float(), y.float()) for x, y in user_tasks.samples(8)]
    found = TrainedModel(model, "float32")
    (outputs, _), *_ = found.outputs(data, 8)
    assert torch.equal(outputs, wide(torch.stack([x for x, _ in data])))
    assert model[0].weight.dtype is torch.bfloat16  # as it was


def test_a_mean_is_refused_though_the_first_sample_has_no_loss():
    loss, labels = SummedLoss(user_tasks.mean_squared_error), torch.ones(2, 3)
    outputs = torch.stack([torch.ones(3), torch.zeros(3)])
    with pytest.raises(InputError, match="give a sum over the samples"):
        loss(outputs, labels)
    loss = SummedLoss(user_tasks.mean_squared_error)
    loss(labels.clone(), labels)  # 0 is the sum and the mean of nothing
    with pytest.raises(InputError, match="give a sum over the samples"):
        loss(torch.zeros(2, 3), labels)


def test_a_loss_of_weights_that_it_holds_is_refused():
    model = user_tasks.build_plain()

    def penalized(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return (outputs - labels).square().sum() + model[0].weight.square().sum() * len(labels)

    with pytest.raises(InputError, match="the loss depends on parameters of its own"):
        SummedLoss(penalized)(torch.zeros(2, 3), torch.ones(2, 3))


def test_the_trained_model_is_evaluated_and_asked(tmp_path: Path):
    held_out = user_tasks.samples(21)
    trained = trainer(tmp_path, save=True, eval_data=held_out)
    with pytest.raises(InputError, match="there is no checkpoint of a trained model"):
        trained.evaluate()
    trained.fit(2)
    model = module()
    load_weights(trained.checkpoint, model)
    x, y = (torch.stack(each) for each in zip(*held_out, strict=True))
    with torch.no_grad():
        outputs = model(x)
    assert trained.evaluate() == pytest.approx(user_tasks.squared_error(outputs, y).item() / 21, rel=1e-12)
    assert torch.allclose(trained.predict(held_out), outputs, rtol=1e-12)
    assert trained.evaluate(held_out[:4]) != trained.evaluate()
    with pytest.raises(InputError, match="give a data set with a length"):
        trained.predict(lambda first, count: held_out)
