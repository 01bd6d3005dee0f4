"""Models that peft made, trained by ranks under a program. Shared by tests."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import peft_models
import user_tasks
from cost_model.cluster import Cluster
from cost_model.profile import ModelProfile
from folders import tiny_model
from hetpipe.models.chain import ChainModel
from hetpipe.models.initialization import private_random_stream
from hetpipe.program.instructions import Program
from hetpipe.runs.lora import LoraSettings
from hetpipe.runtime.processes import Emit
from hetpipe.training.user_loop import RankStages, execute

SEED, BATCH, STEPS, RATE = 5, 8, 3, 0.01
EXAMPLE = {"input_ids": user_tasks.sequences(1)[0]["input_ids"][None]}
BLOCKS = {"GPT2LMHeadModel": {"n_layer": 4}}


@dataclass(frozen=True)
class Setting:
    """A model with random adapters beside four blocks, six layers in all, and how it is trained."""

    architecture: str
    dropout: float
    dtype: torch.dtype

    def model(self) -> Any:
        lora = LoraSettings(4, 8.0, peft_models.TARGETS[self.architecture], self.dropout)
        blocks = BLOCKS.get(self.architecture, {"num_hidden_layers": 4})
        with private_random_stream(SEED):
            base = tiny_model(self.architecture, **blocks)
        return peft_models.peft_model(base, lora).to(self.dtype)

    def chain(self) -> ChainModel:
        return ChainModel.from_module(self.model(), EXAMPLE, name="mine")


def batch(step: int) -> Tensor:
    rows = user_tasks.sequences((step + 1) * BATCH)[step * BATCH :]
    return torch.stack([row["input_ids"] for row in rows])


def optimizer_of(parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=RATE)


def train_settings(
    cases: Sequence[tuple[str, Setting, Program, ModelProfile]], cluster: Cluster, *, rank: int, emit: Emit
) -> None:
    """Gradients of the first step, or losses of a few steps; every rank emits them and what it holds."""
    for name, setting, program, profile in cases:
        try:
            stages = RankStages(
                program, setting.chain(), user_tasks.next_token_loss, profile=profile, cluster=cluster,
                seed=SEED, dtype=setting.dtype,
            )  # fmt: skip
            event: dict[str, Any] = {}
            ids = batch(0)
            execute(program, stages, {"input_ids": ids}, ids)
            event["gradients"] = {
                key: value.grad.clone() for key, value in stages.named_parameters().items()
                if value.grad is not None
            }  # fmt: skip
            optimizer = optimizer_of(stages.parameters()) if stages.parameters() else None
            event["losses"] = []
            for step in range(STEPS):
                ids = batch(step)
                found = execute(program, stages, {"input_ids": ids}, ids, optimizer=optimizer, step=step)
                event["losses"].append(found.loss)
            held = stages.model.owned_parameters()
            event["weights"] = {key: value.detach().clone() for key, value in held.items()}
        except Exception as error:
            raise AssertionError(f"{name} {setting}: {type(error).__name__}: {error}") from error
        emit({"event": "case", "rank": rank, "name": name, "setting": setting, **event})
        stages.close()
