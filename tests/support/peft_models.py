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
from hetpipe.runs.quantization import load_in_suffix
from hetpipe.runs.settings import Settings, TaskSettings

TARGETS = {
    "LlamaForCausalLM": ("q_proj", "v_proj", "down_proj"),
    "GPT2LMHeadModel": ("c_attn", "attn.c_proj"),
    "BertForMaskedLM": ("query", "value"),
}


def peft_model(base: nn.Module, lora: LoraSettings, seed: int = 3, blocks: Any = None) -> Any:
    """A model that peft made, with adapters that are random, B too; blocks: that get any, None for all."""
    import peft

    config = peft.LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=list(lora.targets),
        use_rslora=lora.rslora,
        layers_to_transform=blocks,
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


def quantized_base(folder: Path, architecture: str, load_in: str, **others: Any) -> Any:
    """What transformers and bitsandbytes load from a folder, or have in it already."""
    import transformers

    config = transformers.BitsAndBytesConfig(
        load_in_4bit=load_in == "4bit", load_in_8bit=load_in == "8bit",
        **{"bnb_4bit_quant_type": "nf4", **others},
    )  # fmt: skip
    return model_class(architecture).from_pretrained(
        folder, quantization_config=config, device_map="cpu", dtype=torch.float32
    )


def loaded(folder: Path, architecture: str, adapter: Path, base: Any = None) -> Any:
    """What peft loads from a PEFT folder; base: where it is not the folder's."""
    import peft

    base = loaded_base(folder, architecture) if base is None else base
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that GPT-2's layers lie transposed
        return peft.PeftModel.from_pretrained(base, str(adapter), is_trainable=True)


def adapters_of(model: nn.Module) -> dict[str, Tensor]:
    """The adapters of a peft model by their names in hetpipe's."""
    return {
        name.removeprefix("base_model.model."): value
        for name, value in model.named_parameters()
        if "lora_" in name
    }


def settings_of(folder: Path, lora: LoraSettings, **others: Any) -> Settings:
    return Settings(model_folder=str(folder), lora=lora, **others)


def name_of(folder: Path, lora: LoraSettings, load_in: str | None = None) -> str:
    return read_model_folder(folder).name + load_in_suffix(load_in) + lora.suffix


def chain_of(folder: Path, lora: LoraSettings, load_in: str | None = None) -> ChainModel:
    settings = settings_of(folder, lora, steps=1, load_in=load_in)
    return ChainModel.from_spec(task_spec(TaskSettings(name_of(folder, lora, load_in), run=settings)))


def train_alone(
    model: Any, task: TrainingTask, settings: Settings, batch: int, steps: Sequence[int], microbatch: int = 0
) -> list[float]:
    """The training of the settings by torch and peft alone, in place; gives the losses.

    microbatch: samples at once, 0 for all of a step.
    """
    trained = [value for value in model.parameters() if value.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, lr=0.0, betas=settings.betas, eps=settings.epsilon, weight_decay=settings.weight_decay
    )
    model.train()
    losses = []
    for step in steps:
        inputs, labels = task.batch(step * batch, batch)
        optimizer.zero_grad()
        total = 0.0
        for first in range(0, batch, microbatch or batch):
            part = slice(first, first + (microbatch or batch))
            logits = model(**{name: value[part] for name, value in inputs.items()}).logits
            loss = task.loss(logits, labels[part]) * task.term_weight(labels)
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(trained, settings.clip_norm)
        optimizer.param_groups[0]["lr"] = settings.learning_rate_at(step)
        optimizer.step()
        losses.append(total)
    return losses
