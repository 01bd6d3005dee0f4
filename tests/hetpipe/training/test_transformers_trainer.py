"""transformers' Trainer and ours, given the same: the same losses."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    BertForSequenceClassification,
    EarlyStoppingCallback,
    GPT2LMHeadModel,
    TrainerCallback,
    default_data_collator,
    get_scheduler,
)

from cost_model.errors import InputError
from hetpipe.training.transformers_arguments import Arguments
from hetpipe.training.transformers_data import accepts_count, loss_of, taken_columns
from partition.plan import Plan
from places import ROOT
from runs import EMULATED_CLUSTER, cluster_file
from transformers_runs import (
    CLOSE,
    COUNT,
    LENGTH,
    ONE,
    TWO,
    arguments,
    causal,
    classifier,
    logged,
    ours,
    texts,
    theirs,
    two_pipelines,
)


@pytest.mark.slow
@pytest.mark.parametrize(("sampling", "plan"), [("random", two_pipelines(8)), ("sequential", TWO)])
def test_losses_rates_and_norms_are_those_of_transformers(tmp_path: Path, sampling: str, plan: Plan):
    args = arguments(tmp_path / "out", per_device_train_batch_size=8, train_sampling_strategy=sampling)
    model, data = causal(), texts()
    alone = theirs(model, args, train_dataset=data)
    alone.train()
    trainer = ours(tmp_path / "ours", model, args, plan, train_dataset=data)
    output = trainer.train()
    assert output.global_step == 6  # 22 samples, 8 a step, the last step of each epoch with 6
    for key in ("loss", "grad_norm", "learning_rate", "epoch", "train_loss"):
        assert logged(trainer, key) == pytest.approx(logged(alone, key), rel=CLOSE), key
    for name, value in alone.model.named_parameters():
        assert torch.allclose(trainer.model.get_parameter(name), value, atol=2e-6), name
    assert output.training_loss == pytest.approx(math.fsum(logged(alone, "loss")) / 6, rel=CLOSE)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:gradient_accumulation_steps=2. a BertFor")
def test_accumulated_classes_cosine_and_the_trained_model_are_those_of_transformers(tmp_path: Path):
    def right(prediction: Any) -> dict[str, float]:
        return {"right": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}

    args = arguments(
        tmp_path / "out", per_device_train_batch_size=8, max_steps=4, lr_scheduler_type="cosine",
        optim="sgd", adam_beta2=0.9, max_grad_norm=0.0, seed=7, per_device_eval_batch_size=5,
    )  # fmt: skip
    model, data = classifier(), texts(16)
    given = {"train_dataset": data, "eval_dataset": texts(11), "compute_metrics": right}
    alone = theirs(model, args, **given)
    alone.train()
    expected, outputs = alone.evaluate(), alone.predict(texts(11)).predictions
    accumulated = dataclasses.replace(args, gradient_accumulation_steps=2)
    trainer = ours(tmp_path / "ours", model, accumulated, TWO, **given)
    trainer.train()
    assert logged(trainer, "loss") == pytest.approx(logged(alone, "loss"), rel=CLOSE)
    found = trainer.evaluate()
    assert found["eval_right"] == expected["eval_right"]
    assert found["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-5)  # one label a sample
    predicted = trainer.predict(texts(11))
    assert predicted.predictions == pytest.approx(outputs, abs=1e-5)
    trainer.save_model(str(tmp_path / "saved"))
    saved = BertForSequenceClassification.from_pretrained(tmp_path / "saved")
    assert torch.equal(saved.classifier.weight, trainer.model.get_parameter("classifier.weight"))


class Told(TrainerCallback):
    def __init__(self) -> None:
        self.told: list[str] = []

    def on_train_begin(self, args, state, control, **kwargs):
        self.told.append("begin")

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        self.told.append(f"evaluate {state.global_step}")

    def on_save(self, args, state, control, **kwargs):
        self.told.append("save")

    def on_train_end(self, args, state, control, **kwargs):
        self.told.append(f"end {state.global_step}")


@pytest.mark.slow
def test_callbacks_early_stopping_and_the_best_model(tmp_path: Path):
    args = arguments(
        tmp_path / "out", per_device_train_batch_size=8, max_steps=60, learning_rate=0.02, warmup_steps=0,
        eval_strategy="steps", eval_steps=2, save_steps=2, load_best_model_at_end=True, save_total_limit=2,
        metric_for_best_model="eval_loss",
    )  # fmt: skip
    told, data = Told(), texts()
    trainer = ours(
        tmp_path / "ours", causal(), args, TWO, train_dataset=data, eval_dataset=texts(40)[COUNT:],
        callbacks=[told, EarlyStoppingCallback(2)],
    )  # fmt: skip
    trainer.train()
    losses = logged(trainer, "eval_loss")
    best = losses.index(min(losses))
    assert len(losses) == best + 3 < 30  # two after the best were worse
    assert trainer.state.best_global_step == 2 * (best + 1)
    assert told.told[0] == "begin" and told.told[-1] == f"end {2 * len(losses)}"
    assert told.told.count("save") >= 2
    assert trainer.evaluate()["eval_loss"] == pytest.approx(min(losses), rel=1e-5)


@pytest.mark.slow
def test_a_run_goes_on_from_its_newest_checkpoint(tmp_path: Path):
    args = arguments(tmp_path / "out", per_device_train_batch_size=8, max_steps=6, save_steps=2)
    data, model = texts(), causal()
    whole = ours(tmp_path / "ours", model, args, ONE, train_dataset=data)
    whole.train()
    expected = logged(whole, "loss")

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 3

    again = dataclasses.replace(args, output_dir=str(tmp_path / "again"))
    begun = ours(tmp_path / "ours", causal(), again, ONE, train_dataset=data, callbacks=[Stop()])
    begun.train()
    with pytest.warns(UserWarning, match=f"num_samples is 9, before the checkpoint it was {COUNT}"):
        other = dataclasses.replace(again, output_dir=str(tmp_path / "other"))
        grown = ours(tmp_path / "ours", causal(), other, ONE, train_dataset=data[:9], every=0)
        grown.train(resume_from_checkpoint=str(begun._folder.path))
    resumed = ours(tmp_path / "ours", causal(), again, ONE, train_dataset=data)
    resumed.train(resume_from_checkpoint=True)
    assert logged(begun, "loss") == pytest.approx(expected[:3], rel=CLOSE)
    assert logged(resumed, "loss") == pytest.approx(expected, rel=CLOSE)  # with those of before
    empty = dataclasses.replace(args, output_dir=str(tmp_path / "empty"))
    with pytest.raises(InputError, match="empty/run holds no checkpoint to go on from; leave it out"):
        ours(tmp_path / "ours", causal(), empty, ONE, train_dataset=data).train(resume_from_checkpoint=True)


@pytest.mark.slow
def test_a_run_that_goes_on_remembers_what_was_best(tmp_path: Path):
    args = arguments(
        tmp_path / "out", per_device_train_batch_size=8, max_steps=12, learning_rate=0.05, warmup_steps=0,
        eval_strategy="steps", eval_steps=1, save_steps=1, load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
    )  # fmt: skip
    held_out = [{**row, "input_ids": row["input_ids"][::-1]} for row in texts(8)]  # whose loss soon rises

    def trained(callbacks: list[TrainerCallback], **resume: bool) -> Any:
        trainer = ours(
            tmp_path / "ours", causal(), args, ONE, train_dataset=texts(), eval_dataset=held_out,
            callbacks=callbacks,
        )  # fmt: skip
        trainer.train(**resume)
        return trainer

    class Stop(TrainerCallback):
        def on_evaluate(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step > (state.best_global_step or 12) + 1

    begun = trained([Stop()])
    best = begun.state.best_global_step
    assert best is not None and begun.state.global_step == best + 2
    resumed = trained([EarlyStoppingCallback(1)], resume_from_checkpoint=True)
    losses = logged(resumed, "eval_loss")
    assert min(losses) == losses[best - 1]
    assert resumed.state.global_step == best + 3  # the first one that is worse
    assert (resumed.state.best_global_step, resumed.state.best_metric) == (best, min(losses))
    assert resumed.state.best_model_checkpoint.endswith(f"step-{best:06d}")
    assert len(losses) == resumed.state.global_step


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("polynomial", {"lr_end": 0.005, "power": 1.0}),
        ("polynomial", {}),
        ("cosine_with_min_lr", {"min_lr": 0.005}),
        ("cosine_warmup_with_min_lr", {"min_lr": 0.005}),
        ("cosine", {}),
    ],
)
def test_rates_that_schedules_name_are_those_of_transformers(
    tmp_path: Path, kind: str, options: dict[str, Any]
):
    args = arguments(
        tmp_path / "out", learning_rate=0.01, max_steps=5, warmup_steps=1, lr_scheduler_type=kind,
        lr_scheduler_kwargs=options,
    )  # fmt: skip
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.01)
    schedule = get_scheduler(kind, optimizer, 1, 5, options)
    rate = Arguments(args, 1).rates(5)
    for step in range(5):
        assert 0.01 * rate(step) == pytest.approx(schedule.get_last_lr()[0], rel=1e-9), step
        optimizer.step()
        schedule.step()


def test_the_rates_of_a_given_optimizer_are_of_its_own(tmp_path: Path):
    args = arguments(
        tmp_path / "out", learning_rate=0.01, max_steps=5, warmup_steps=0,
        lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs={"min_lr": 0.005},
    )  # fmt: skip
    assert Arguments(args, 1).rates(5, (torch.optim.SGD, {"lr": 0.05}))(5) == pytest.approx(0.1)
    with pytest.raises(InputError, match="lr_end"):
        polynomial = {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"lr_end": 0.02}}
        Arguments(dataclasses.replace(args, **polynomial), 1).rates(5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "decay"),
    [({"lr": 4e-3}, 0.5), ({}, 0.0), ({"lr": 4e-3, "weight_decay": 0.5}, 0.0)],
)
def test_rates_and_decay_of_a_given_optimizer_are_those_of_transformers(
    tmp_path: Path, options: dict[str, Any], decay: float
):
    args = arguments(
        tmp_path / "out", per_device_train_batch_size=8, learning_rate=1e-2, weight_decay=decay, max_steps=4
    )
    model, data, given = causal(), texts(), {"optimizer_cls_and_kwargs": (torch.optim.Adamax, options)}
    alone = theirs(model, args, train_dataset=data, **given)
    alone.train()
    trainer = ours(tmp_path / "ours", model, args, ONE, train_dataset=data, **given)
    trainer.train()
    for key in ("loss", "learning_rate"):
        assert logged(trainer, key) == pytest.approx(logged(alone, key), rel=CLOSE), key


def test_an_optimizer_that_cannot_be_made_is_refused(tmp_path: Path):
    args = arguments(tmp_path / "out", max_steps=5)
    with pytest.raises(
        InputError, match=r"optimizer_cls_and_kwargs: .*'power'; give a class of torch\.optim"
    ):
        Arguments(args, 1).rates(5, (torch.optim.SGD, {"power": 1.0}))


@pytest.mark.slow
@pytest.mark.parametrize("count", [22, 23, 16])
def test_what_is_dropped_at_an_epoch_s_end_is_what_transformers_drops(tmp_path: Path, count: int):
    args = arguments(
        tmp_path / "out", per_device_train_batch_size=4, gradient_accumulation_steps=2,
        dataloader_drop_last=True, num_train_epochs=2, max_steps=-1,
    )  # fmt: skip
    model, data = causal(), texts(count)
    alone = theirs(model, args, train_dataset=data)
    alone.train()
    trainer = ours(
        tmp_path / "ours", model, args, dataclasses.replace(TWO, global_batch_size=8), train_dataset=data
    )
    assert trainer._arguments.batch_size == 8
    trainer.train()
    for key in ("loss", "learning_rate"):
        assert logged(trainer, key) == pytest.approx(logged(alone, key), rel=CLOSE), key


def test_labels_may_be_numbers_of_torch(tmp_path: Path):
    data = [{**row, "label": torch.tensor(row["label"])} for row in texts()]
    args = arguments(tmp_path / "out", per_device_train_batch_size=8)
    trainer = ours(tmp_path / "ours", classifier(), args, two_pipelines(8), train_dataset=data)
    assert trainer._data.longest().count == 1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor=0.1 cannot be kept"),
        ({"optim": "adafactor"}, "optim='adafactor' cannot be kept; give adamw_torch"),
        (
            {"lr_scheduler_type": "greedy", "eval_strategy": "steps", "eval_steps": 1},
            "lr_scheduler_type='greedy' cannot be kept",
        ),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha=5.0 cannot be kept"),
        ({"train_sampling_strategy": "group_by_length"}, "give random or sequential"),
        ({"eval_on_start": True}, "eval_on_start=True cannot be kept"),
        ({"save_strategy": "best", "metric_for_best_model": "loss"}, "save_strategy='best' cannot be kept"),
        ({"eval_strategy": "steps", "eval_steps": 2}, "needs an eval_dataset"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(tmp_path: Path, given: dict[str, Any], said: str):
    args = arguments(tmp_path / "out", per_device_train_batch_size=8, **given)
    with pytest.raises(InputError, match=said):
        evaluates = None if "needs" in said else texts(8)
        ours(
            tmp_path / "ours", causal(), args, two_pipelines(8), train_dataset=texts(), eval_dataset=evaluates
        )


@pytest.mark.parametrize(
    ("others", "said"),
    [
        ({"compute_loss_func": len}, "compute_loss_func cannot be kept"),
        ({"optimizers": (object(), None)}, "optimizer_cls_and_kwargs"),
        ({"train_dataset": iter([])}, "give samples by index"),
        ({"batchsize": 3}, "batchsize"),
        ({"eval_dataset": {"a": texts()}}, None),
    ],
)
def test_what_is_no_argument_is_refused(tmp_path: Path, others: dict[str, Any], said: str | None):
    args = arguments(tmp_path / "out", per_device_train_batch_size=8)
    given = {"train_dataset": texts(), **others}
    if said is None:
        trainer = ours(tmp_path / "ours", causal(), args, two_pipelines(8), **given)
        with pytest.raises(InputError, match="eval_dataset is a dict"):
            trainer.evaluate()
        return
    with pytest.raises(InputError, match=said):
        ours(tmp_path / "ours", causal(), args, two_pipelines(8), **given)


def without_labels(count: int) -> list[dict[str, Any]]:
    return [{"input_ids": [1] * LENGTH, "labels": [-100] * LENGTH} for _ in range(count)]


def with_labels(count: int) -> list[dict[str, Any]]:
    return [{**row, "labels": row["input_ids"]} for row in without_labels(count)]


def test_the_loss_is_found_by_samples_that_have_labels(tmp_path: Path):
    args, given = arguments(tmp_path / "out"), {"data_collator": default_data_collator}
    data = [*without_labels(3), *with_labels(5)]
    trainer = ours(tmp_path / "ours", causal(), args, ONE, train_dataset=data, **given)
    assert loss_of(trainer.model, trainer._data).shifts
    with pytest.raises(InputError, match="the first 8 samples have no label that counts, all are -100; give"):
        ours(tmp_path / "ours", causal(), args, ONE, train_dataset=without_labels(8), **given)


class Weighted(BertForSequenceClassification):
    """The mean over its labels is weighted by class, which does not show where all are of one class."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **others: Any) -> Any:
        output = super().forward(input_ids=input_ids, **others)
        if labels is not None:
            weight = torch.linspace(1, 9, output.logits.shape[-1])
            output.loss = functional.cross_entropy(output.logits, labels, weight)
        return output


def test_a_loss_weighted_by_class_is_refused_though_the_first_samples_are_of_one(tmp_path: Path):
    data = [{"input_ids": [1] * LENGTH, "labels": 0} for _ in range(8)]
    args, given = arguments(tmp_path / "out"), {"data_collator": default_data_collator}
    trainer = ours(tmp_path / "ours", classifier(), args, ONE, train_dataset=data, **given)
    assert not loss_of(trainer.model, trainer._data).shifts
    with pytest.raises(InputError, match="the loss of a Weighted is not the cross-entropy of its logits"):
        ours(tmp_path / "ours", Weighted(classifier().config), args, ONE, train_dataset=data, **given)


def test_the_columns_of_a_model_in_peft_are_those_of_the_model():
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    made = peft.get_peft_model(causal(), config)  # no task_type: its forward takes anything
    assert taken_columns(made, ()) == taken_columns(made.get_base_model(), ())
    assert accepts_count(made) == accepts_count(made.get_base_model())


def test_means_of_means_are_refused(tmp_path: Path):
    args = arguments(tmp_path / "out", per_device_train_batch_size=8, gradient_accumulation_steps=2)
    model = classifier()
    model.accepts_loss_kwargs = False
    with pytest.raises(InputError, match="gradient_accumulation_steps=2: transformers takes the mean of 2"):
        ours(tmp_path / "ours", model, args, two_pipelines(16), train_dataset=texts())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the times of")  # of a busy machine
def test_the_example_of_the_page_runs_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    page = (ROOT / "docs" / "library.md").read_text(encoding="utf-8")
    code = page.split("from hetpipe import TransformersTrainer")[1].partition("```")[0]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cluster_file(tmp_path, EMULATED_CLUSTER)
    causal().save_pretrained("my-model")
    data = [{"input_ids": [1, 2, 3, 4, 5, 6], "labels": [1, 2, 3, 4, 5, 6]} for _ in range(48)]
    exec(f"from hetpipe import TransformersTrainer{code}", {"train": data, "held_out": data[:5]})
    assert GPT2LMHeadModel.from_pretrained("trained").config.n_layer == 3
