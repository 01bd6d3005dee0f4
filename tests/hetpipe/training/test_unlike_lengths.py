"""Samples of unlike lengths train from beginning to end: the model is measured by the longest."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor, nn
from torch.nn import functional
from transformers import DataCollatorWithPadding, PreTrainedTokenizerFast
from transformers import Trainer as TrainerOfTransformers

from hetpipe.training.trainer import AdamW, Trainer
from hetpipe.training.transformers_trainer import TransformersTrainer
from runs import EMULATED_CLUSTER, cluster_file
from transformers_runs import (
    CLOSE,
    LENGTH,
    ONE,
    VOCABULARY,
    Padding,
    arguments,
    causal,
    classifier,
    logged,
    ours,
    theirs,
)

LENGTHS = (4, 7, 5, 6, 9, 10, 8, LENGTH)
BATCH = 6


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return cluster_file(tmp_path, EMULATED_CLUSTER)


def words() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"[PAD]": 0, "a": 1})), pad_token="[PAD]"
    )


def rows() -> list[dict[str, Any]]:
    return [
        {"input_ids": [1 + index] * size, "attention_mask": [1] * size, "label": index % 3}
        for index, size in enumerate(LENGTHS * 2)
    ]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the times of")  # of a busy machine
@pytest.mark.parametrize("make", [classifier, causal])
def test_a_model_without_a_profile_trains_as_transformers_trains_it(tmp_path: Path, cluster: Path, make: Any):
    classifies = make is classifier
    given = {"processing_class": words()} if classifies else {"data_collator": Padding(causal=True)}
    args = arguments(tmp_path / "theirs", per_device_train_batch_size=BATCH, max_steps=3)
    alone = TrainerOfTransformers(
        make(), args, train_dataset=rows(), data_collator=DataCollatorWithPadding(words())
        if classifies else Padding(causal=True),
    )  # fmt: skip
    alone.train()
    args = arguments(tmp_path / "ours", per_device_train_batch_size=BATCH // 3, max_steps=3)
    trainer = TransformersTrainer(make(), args, train_dataset=rows(), cluster=cluster, **given)
    trainer.train()
    for key in ("loss", "grad_norm", "learning_rate"):
        assert logged(trainer, key) == pytest.approx(logged(alone, key), rel=CLOSE), key


@dataclass
class Sample:
    ids: list[int]


def ids_of(sample: Any) -> list[int]:
    """The ids in a sample that is no mapping: a text, a pair, or an object."""
    if isinstance(sample, str):
        return [ord(letter) - ord("a") for letter in sample]
    return sample.ids if isinstance(sample, Sample) else sample[0]


def text_of(ids: list[int]) -> str:
    return "".join(chr(ord("a") + each) for each in ids)


def pair_of(ids: list[int]) -> tuple[list[int], str]:
    return ids, "a name"


def filled_up(samples: list[Any]) -> dict[str, Tensor]:
    return Padding(causal=True)([{"input_ids": ids_of(sample)} for sample in samples])


@pytest.mark.slow
@pytest.mark.parametrize("make", [text_of, pair_of, Sample])
def test_samples_that_are_no_mappings_train_as_with_transformers(tmp_path: Path, make: Any):
    data = [make(row["input_ids"]) for row in rows()]
    args = arguments(
        tmp_path / "out", per_device_train_batch_size=8, max_steps=3, remove_unused_columns=False
    )
    given = {"train_dataset": data, "data_collator": filled_up}
    alone = theirs(causal(), args, **given)
    alone.train()
    trainer = ours(tmp_path / "ours", causal(), args, ONE, **given)
    assert trainer._data.longest()(0, 1)[1].shape == (1, LENGTH)
    trainer.train()
    assert logged(trainer, "loss") == pytest.approx(logged(alone, "loss"), rel=CLOSE)


class PaddedByStep:
    """Texts, each as long as the longest of its step."""

    def __len__(self) -> int:
        return len(LENGTHS)

    def __call__(self, first: int, count: int) -> tuple[dict[str, Tensor], Tensor]:
        begin = first // BATCH * BATCH
        size = max(LENGTHS[place % len(self)] for place in range(begin, begin + BATCH))
        ids = torch.arange(1, 1 + size).repeat(count, 1)
        return {"input_ids": ids}, ids


def next_token_loss(outputs: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(
        outputs[:, :-1].reshape(-1, VOCABULARY), labels[:, 1:].reshape(-1), reduction="sum"
    )


def predicted_tokens(labels: Tensor) -> int:
    return labels[:, 1:].numel()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the times of")  # of a busy machine
def test_a_model_is_measured_by_the_example(tmp_path: Path, cluster: Path):
    longest = torch.arange(1, 1 + LENGTH)
    model: nn.Module = causal()
    trainer = Trainer(
        model, PaddedByStep(), AdamW(1e-3), next_token_loss, cluster=cluster, batch_size=BATCH,
        count_terms=predicted_tokens, example=[{"input_ids": longest, "labels": longest}],
        folder=tmp_path / "run", progress=False,
    )  # fmt: skip
    trainer.fit(2)
    assert trainer.profile is not None and trainer.profile.sequence_length == LENGTH
    ids = PaddedByStep()(0, BATCH)[1]
    assert ids.shape == (BATCH, 10)
    with torch.no_grad():
        expected = next_token_loss(model(input_ids=ids).logits, ids) / predicted_tokens(ids)
    first = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["loss"] == pytest.approx(float(expected), rel=1e-6)
