"""What transformers' Trainer would compute otherwise than ours is refused, or said."""

import copy
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from torch import Tensor
from torch.nn import functional
from transformers import (
    BertForSequenceClassification,
    BertForTokenClassification,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    TrainerCallback,
    TrainerState,
    ViTImageProcessorPil,
    default_data_collator,
)
from transformers.data.data_collator import DataCollatorWithPadding

from cost_model.errors import InputError
from hetpipe.training.transformers_callbacks import Intervals, TransformersCallbacks
from hetpipe.training.transformers_data import CollatedData, loss_of, taken_columns
from hetpipe.training.transformers_trainer import TransformersTrainer
from runs import cluster_file
from transformers_runs import LENGTH, arguments, causal, classifier, ours, texts, two_pipelines


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("compute_loss", "Mine has compute_loss, .* not here; give hetpipe.Trainer a loss of your own"),
        ("create_optimizer", "give optimizer_cls_and_kwargs"),
        ("get_train_dataloader", "leave it out"),
        ("evaluate", "give eval_strategy='no'"),
    ],
)
def test_methods_that_nothing_would_call_are_refused(tmp_path: Path, name: str, said: str):
    own = type("Mine", (TransformersTrainer,), {name: lambda self, *given: None, "mine": len})
    args = arguments(tmp_path / "out", eval_strategy="steps", eval_steps=1)
    with pytest.raises(InputError, match=said):
        own(causal(), args, train_dataset=texts(), eval_dataset=texts(), cluster=cluster_file(tmp_path))


def test_only_what_has_texts_or_sounds_pads_them(tmp_path: Path):
    def collator(processing: Any) -> Any:
        args, cluster = arguments(tmp_path / "out"), cluster_file(tmp_path)
        return TransformersTrainer(causal(), args, processing_class=processing, cluster=cluster).data_collator

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    assert isinstance(collator(tokenizer), DataCollatorWithPadding)
    assert hasattr(ViTImageProcessorPil, "pad")  # of pictures
    assert collator(ViTImageProcessorPil()) is default_data_collator


class OfSamples(BertForSequenceClassification):
    """Each sample counts as its weight says, which is 1 for the first ones."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, weights: Tensor | None = None) -> Any:
        output = super().forward(input_ids)
        if labels is not None:
            output.loss = (functional.cross_entropy(output.logits, labels, reduction="none") * weights).mean()
        return output


class Regularized(BertForSequenceClassification):
    """Large logits count against it as it trains."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        output = super().forward(input_ids, labels=labels)
        if labels is not None and self.training:
            output.loss = output.loss + output.logits.square().mean()
        return output


class Masked(BertForTokenClassification):
    """The labels of what is filled up do not count, though they are not -100."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> Any:
        output = super().forward(input_ids, attention_mask)
        if labels is not None:
            there = attention_mask == 1
            output.loss = functional.cross_entropy(output.logits[there], labels[there])
        return output


class WithoutOne(GPT2LMHeadModel):
    """Labels of one class do not count, which none of the first has."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        output = super().forward(input_ids)
        if labels is not None:
            scores = output.logits[:, :-1].flatten(0, 1)
            output.loss = functional.cross_entropy(scores, labels[:, 1:].flatten(), ignore_index=2)
        return output


def rows(*, labels: Any = None, **others: Any) -> list[dict[str, Any]]:
    of_row = {"input_ids": [1] * LENGTH, "attention_mask": [1] * LENGTH, **others}
    given = [{**of_row, "labels": place % 3 if labels is None else labels} for place in range(8)]
    half = LENGTH // 2
    return [*given, {**given[-1], "attention_mask": [1] * half + [0] * (LENGTH - half)}]


@pytest.mark.parametrize(
    ("kind", "made", "data"),
    [
        (OfSamples, classifier, rows(weights=1.0)),
        (Regularized, classifier, rows()),
        (Masked, classifier, rows(labels=[place % 3 for place in range(LENGTH)])),
        (WithoutOne, causal, rows(labels=[5] * LENGTH)),
    ],
)
def test_a_loss_that_shows_in_other_samples_alone_is_refused(kind: Any, made: Any, data: Any):
    model = kind(made().config)
    taken = CollatedData.of(data, default_data_collator, 0, columns=taken_columns(model, ()), batch=4)
    with pytest.raises(InputError, match=f"the loss of a {kind.__name__} is not the cross-entropy"):
        loss_of(model, taken)


def test_a_model_stays_as_it_is_when_its_loss_is_looked_at():
    model, data = classifier().train(), CollatedData(rows(), default_data_collator, None, batch=4)
    before, drawn = copy.deepcopy(model.state_dict()), torch.random.get_rng_state()
    assert not loss_of(model, data).shifts
    assert model.training and all(
        torch.equal(value, before[name]) for name, value in model.state_dict().items()
    )
    assert torch.equal(drawn, torch.random.get_rng_state())


@pytest.mark.parametrize(
    ("num_labels", "said"),
    [(1, "is not the cross-entropy"), (2, "does not take the samples: Target 2 is out")],
)
def test_labels_without_a_class_are_refused(num_labels: int, said: str):
    config = copy.deepcopy(classifier().config)
    config.num_labels = num_labels  # one: a regression
    data = CollatedData(rows()[1:], default_data_collator, None, batch=4)
    with pytest.raises(InputError, match=said):
        loss_of(BertForSequenceClassification(config), data)


def test_where_transformers_adds_up_means_it_is_said(tmp_path: Path):
    args = arguments(tmp_path / "out", per_device_train_batch_size=4, gradient_accumulation_steps=2)
    with pytest.warns(UserWarning, match="transformers adds up 2 means, and so has 2 times the losses"):
        ours(tmp_path / "ours", classifier(), args, two_pipelines(8), train_dataset=texts(16))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours(tmp_path / "ours", causal(), args, two_pipelines(8), train_dataset=texts(16))


class Drawn:
    """Each time a sample is read it is another one."""

    def __init__(self, draw: Callable[[], float]) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return 8

    def __getitem__(self, place: int) -> dict[str, Any]:
        return {"values": [self.draw() for _ in range(4)], "labels": place % 3}


@pytest.mark.parametrize("draw", [random.random, np.random.rand, lambda: float(torch.rand(()))])
def test_what_a_dataset_draws_is_the_same_for_all_who_read_a_step(draw: Callable[[], float]):
    data = CollatedData.of(Drawn(draw), default_data_collator, 0, columns=None, batch=4)
    (first, _), (again, _), (later, _) = data(0, 4), data(0, 4), data(8, 4)
    assert torch.equal(first["values"], again["values"])
    assert not torch.equal(first["values"], later["values"])


def test_what_makes_the_model_may_take_a_trial(tmp_path: Path):
    given = {"args": arguments(tmp_path / "out"), "cluster": cluster_file(tmp_path)}
    for made in (causal, lambda trial: causal()):
        assert isinstance(TransformersTrainer(model_init=made, **given).model, GPT2LMHeadModel)


class LogsThird(TrainerCallback):
    """Asks for a log of one step more."""

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        control.should_log = control.should_log or state.global_step == 3


def test_a_callback_may_ask_for_a_log(tmp_path: Path):
    state, intervals = TrainerState(max_steps=8), Intervals(epoch=8, logging=4, logs_first=False)
    told = TransformersCallbacks([LogsThird()], arguments(tmp_path / "out"), state, intervals, {})
    for step in range(1, 9):
        told.on_step_end({"step": step, "loss": float(step), "gradient_norm": 1.0, "learning_rate": 0.1})
    assert [(row["step"], row["loss"]) for row in state.log_history] == [(3, 2.0), (4, 4.0), (8, 6.5)]


def test_metrics_of_other_labels_are_refused(tmp_path: Path):
    def made(names: list[str]) -> TransformersTrainer:
        args, cluster = arguments(tmp_path / "out", label_names=names), cluster_file(tmp_path)
        return TransformersTrainer(causal(), args, compute_metrics=lambda found: {}, cluster=cluster)

    assert made(["labels"]).compute_metrics is not None
    with pytest.raises(InputError, match=r"label_names=\['labels', 'place'\]: its metrics get 'labels'"):
        made(["labels", "place"])
