"""The models known by name, as a table that loads without torch, and those of folders."""

import difflib
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from cost_model.errors import InputError
from hetpipe.models.huggingface_folder import ModelFolder, names_folder, read_model_folder
from hetpipe.runs.lora import MARK, LoraSettings


class Task(StrEnum):
    """The quantity that a model is trained to predict."""

    MASKED_LM = "masked-lm"
    CAUSAL_LM = "causal-lm"


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A line of the table of models, or a model of a folder, with adapters or without.

    folder: where a model comes from that is not of the table. lora: of its adapters, None where it has none.
    adapter: the PEFT folder that they begin with, None for new ones.
    """

    name: str
    task: Task
    description: str
    folder: ModelFolder | None = None
    lora: LoraSettings | None = None
    adapter: str | None = None

    def with_adapters(self, lora: LoraSettings, adapter: str | None = None) -> "ModelEntry":
        """Return the model with adapters, which goes by another name than its base."""
        return replace(self, name=self.name + lora.suffix, lora=lora, adapter=adapter)

    @property
    def place(self) -> str | None:
        """Return the folder as `Settings.model_folder` holds it."""
        return None if self.folder is None else str(self.folder.path)

    @property
    def in_settings(self) -> dict[str, Any]:
        """Return what `Settings` hold of the model beside its name."""
        return {"model_folder": self.place, "lora": self.lora, "adapter": self.adapter}


MODEL_ENTRIES = (
    ModelEntry("bert-base", Task.MASKED_LM, "BERT, 12 blocks of width 768, 110 million parameters"),
    ModelEntry("bert-large", Task.MASKED_LM, "BERT, 24 blocks of width 1024, 336 million parameters"),
    ModelEntry("bert-medium-24", Task.MASKED_LM, "BERT, 24 narrow blocks of width 512, for laptops"),
    ModelEntry("bert-tiny", Task.MASKED_LM, "BERT, 6 blocks of width 64, for tests"),
    ModelEntry("gpt2", Task.CAUSAL_LM, "GPT-2, 12 blocks of width 768, 124 million parameters"),
    ModelEntry("gpt2-medium", Task.CAUSAL_LM, "GPT-2, 24 blocks of width 1024, 355 million parameters"),
    ModelEntry("gpt2-tiny", Task.CAUSAL_LM, "GPT-2, 4 blocks of width 64, for tests"),
    ModelEntry("llama-small", Task.CAUSAL_LM, "Llama, 16 blocks of width 512, untied embeddings"),
    ModelEntry("llama-tiny", Task.CAUSAL_LM, "Llama, 4 blocks of width 64, for tests"),
)


def registered_models() -> tuple[str, ...]:
    """Return the names of all models of the registry, in the order of the table."""
    return tuple(model.name for model in MODEL_ENTRIES)


def model_entry(name: str) -> ModelEntry:
    """Return what a --model means: a line of the table, or a folder that holds a Hugging Face model.

    A name of the table wins over a folder that is called so; "./bert-tiny" is the folder.

    Raises: InputError if there is no such model (names the closest one, else all), or the folder cannot be
    used.
    """
    for model in MODEL_ENTRIES:
        if model.name == name:
            return model
    if names_folder(name):
        folder = read_model_folder(name)
        return ModelEntry(folder.name, Task(folder.task), folder.architecture, folder)
    if MARK in name:
        raise InputError(f"model {name!r} has adapters; give its base by --model, and --lora or --adapter")
    if "@" in name:
        raise InputError(f"model {name!r} comes from a folder; give it with --model FOLDER")
    names = registered_models()
    close = difflib.get_close_matches(name.lower(), names, n=1)
    remedy = f"did you mean {close[0]!r}?" if close else f"known models: {', '.join(names)}"
    raise InputError(f"unknown model {name!r}; {remedy}")
