"""Models with adapters as peft makes them, and peft's own training loop. Shared by tests."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from folders import model_class, save_model
from hetpipe.data.task import TrainingTask
from hetpipe.models.adapters import task_spec
from hetpipe.models.chain import ChainModel
from hetpipe.models.huggingface_folder import read_model_folder
from hetpipe.runs.lora import LoraSettings
from hetpipe.runs.settings import Settings, TaskSettings

TARGETS = {
    "LlamaForCausalLM": ("q_proj", "v_proj", "down_proj"),
    "GPT2LMHeadModel": ("c_attn", "attn.c_proj"),
    "BertForMaskedLM": ("query", "value"),
}


def peft_model(base: nn.Module, lora: LoraSettings, seed: int = 3) -> Any:
    """A model that peft made, with adapters that are random, B too."""
    import peft

    config = peft.LoraConfig(
        r=lora.r, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=list(lora.targets)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that GPT-2's layers lie transposed
        model = peft.get_peft_model(base, config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "lora_" in name:
                value.copy_(0.1 * torch.randn(value.shape, generator=generator))
    return model


def base_folder(place: Path, architecture: str) -> Path:
    """A tiny Hugging Face folder without dropout."""
    folder = place / "base"
    if not folder.exists():
        save_model(folder, architecture)
    return folder


def loaded_base(folder: Path, architecture: str) -> Any:
    return model_class(architecture).from_pretrained(folder)


def loaded(folder: Path, architecture: str, adapter: Path) -> Any:
    """What peft loads from a PEFT folder."""
    import peft

    return peft.PeftModel.from_pretrained(loaded_base(folder, architecture), str(adapter), is_trainable=True)


def adapters_of(model: nn.Module) -> dict[str, Tensor]:
    """The adapters of a peft model by their names in hetpipe's."""
    return {
        name.removeprefix("base_model.model."): value
        for name, value in model.named_parameters()
        if "lora_" in name
    }


def settings_of(folder: Path, lora: LoraSettings, **others: Any) -> Settings:
    return Settings(model_folder=str(folder), lora=lora, **others)


def name_of(folder: Path, lora: LoraSettings) -> str:
    return read_model_folder(folder).name + lora.suffix


def chain_of(folder: Path, lora: LoraSettings) -> ChainModel:
    return ChainModel.from_spec(
        task_spec(TaskSettings(name_of(folder, lora), run=settings_of(folder, lora, steps=1)))
    )


def train_alone(
    model: Any, task: TrainingTask, settings: Settings, batch: int, steps: Sequence[int]
) -> list[float]:
    """The training of the settings by torch and peft alone, in place; gives the losses."""
    trained = [value for value in model.parameters() if value.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, lr=0.0, betas=settings.betas, eps=settings.epsilon, weight_decay=settings.weight_decay
    )
    model.train()
    losses = []
    for step in steps:
        inputs, labels = task.batch(step * batch, batch)
        loss = task.loss(model(**inputs).logits, labels) * task.term_weight(labels)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, settings.clip_norm)
        optimizer.param_groups[0]["lr"] = settings.learning_rate_at(step)
        optimizer.step()
        losses.append(loss.item())
    return losses
