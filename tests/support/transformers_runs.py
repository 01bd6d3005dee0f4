"""The same training by transformers' Trainer and by ours, of models and data that are made up here."""

import copy
import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
)

from hetpipe.models.chain import ChainModel
from hetpipe.training.transformers_trainer import TransformersTrainer
from partition.plan import Pipeline, Plan, Stage
from runs import chain_plan, cluster_file, made_up_profile_of

VOCABULARY, LENGTH, COUNT = 40, 12, 22
CLOSE = 2e-6


def causal() -> nn.Module:
    torch.manual_seed(5)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=32, n_layer=3, n_head=2, resid_pdrop=0.0,
            embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip


def classifier() -> nn.Module:
    torch.manual_seed(5)
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=3, num_attention_heads=2,
            intermediate_size=64, max_position_embeddings=LENGTH, num_labels=3,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


def texts(count: int = COUNT) -> list[dict[str, Any]]:
    """Texts of unequal lengths; an entry that no model takes is among theirs."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for index in range(count):
        size = int(torch.randint(4, LENGTH + 1, (1,), generator=generator)) if index else LENGTH
        ids = torch.randint(1, VOCABULARY, (size,), generator=generator).tolist()
        found.append({"input_ids": ids, "label": index % 3, "place": index})
    return found


class Padding:
    """Pads the samples of a batch to its longest; labels: as of the ids, or what the samples have."""

    def __init__(self, *, causal: bool) -> None:
        self.causal = causal

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        longest = max(len(row["input_ids"]) for row in rows)
        ids = torch.zeros(len(rows), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for place, row in enumerate(rows):
            assert "place" not in row
            ids[place, : len(row["input_ids"])] = torch.tensor(row["input_ids"])
            mask[place, : len(row["input_ids"])] = 1
        labels = ids.masked_fill(mask == 0, -100)
        if not self.causal:
            labels = torch.tensor([row["label"] for row in rows])
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def arguments(place: Path, **others: Any) -> TrainingArguments:
    given: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "num_train_epochs": 2,
        "learning_rate": 3e-3,
        "weight_decay": 0.05,
        "max_grad_norm": 0.8,
        "warmup_steps": 2,
        "logging_steps": 1,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        **others,
    }
    return TrainingArguments(str(place), **given)


def two_pipelines(batch: int) -> Plan:
    first = Pipeline(2, batch - 2, (Stage(("here/0",), (0, 2), 2), Stage(("here/1",), (2, 5), 1)))
    second = Pipeline(2, 2, (Stage(("here/2",), (0, 5), 1),))
    return Plan("manual", "mine", batch, (first, second))


ONE, TWO = chain_plan("mine", [0, 5], 2, 8), chain_plan("mine", [0, 2, 5], 2, 8)


def ours(place: Path, model: nn.Module, args: TrainingArguments, plan: Plan, **others: Any) -> Any:
    place.mkdir(exist_ok=True)
    example = {"input_ids": torch.ones(1, LENGTH, dtype=torch.long)}
    example["attention_mask"] = torch.ones_like(example["input_ids"])
    profile = made_up_profile_of(ChainModel.from_module(model, example), "mine", sequence_length=LENGTH)
    args = dataclasses.replace(
        args, per_device_train_batch_size=plan.global_batch_size // 4 // args.gradient_accumulation_steps
    )
    others = {"data_collator": Padding(causal=isinstance(model, GPT2LMHeadModel)), **others}
    return TransformersTrainer(model, args, cluster=cluster_file(place), plan=plan, profile=profile, **others)


def theirs(model: nn.Module, args: TrainingArguments, **others: Any) -> Trainer:
    others = {"data_collator": Padding(causal=isinstance(model, GPT2LMHeadModel)), **others}
    return Trainer(copy.deepcopy(model), args, **others)


def logged(trainer: Any, key: str) -> list[float]:
    return [row[key] for row in trainer.state.log_history if key in row]
