"""The models known by name, as a table that loads without torch, and those of folders."""

import difflib
from dataclasses import dataclass, replace
from typing import Any

from cost_model.errors import InputError
from hetpipe.models.huggingface_folder import ModelFolder, names_folder, read_model_folder
from hetpipe.models.tasks import Task
from hetpipe.runs.lora import MARK, LoraSettings
from hetpipe.runs.quantization import load_in_suffix


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A line of the table of models, or a model of a folder, with adapters or without.

    folder: where a model comes from that is not of the table. lora: of its adapters, None where it has none.
    adapter: the PEFT folder that they begin with, None for new ones. load_in: as `Settings` hold it.
    """

    name: str
    task: Task
    description: str
    folder: ModelFolder | None = None
    lora: LoraSettings | None = None
    adapter: str | None = None
    load_in: str | None = None

    def with_adapters(
        self, lora: LoraSettings, adapter: str | None = None, load_in: str | None = None
    ) -> "ModelEntry":
        """Return the model with adapters, which goes by another name than its base.

        load_in: "4bit" or "8bit", in which the matrices of the base are held; None: as they are given.

        Raises: InputError if they are given in another way.
        """
        given = None if self.folder is None else self.folder.quantization
        if self.task.translates and (given is not None or load_in is not None):
            raise InputError(
                f"{self.name} has an encoder and a decoder, whose weights are not held in 4 or 8 bits here; "
                "leave --load-in out, and give weights that are not quantized"
            )
        if given is not None and load_in not in (None, given.load_in):
            raise InputError(
                f"--load-in {load_in}: {self.name} is in {given.load_in} already; leave the option out"
            )
        chosen = load_in if given is None else None
        name = f"{self.name}{load_in_suffix(chosen)}{lora.suffix}"
        return replace(self, name=name, lora=lora, adapter=adapter, load_in=chosen)

    @property
    def place(self) -> str | None:
        """Return the folder as `Settings.model_folder` holds it."""
        return None if self.folder is None else str(self.folder.path)

    @property
    def in_settings(self) -> dict[str, Any]:
        """Return what `Settings` hold of the model beside its name."""
        return {
            "model_folder": self.place,
            "lora": self.lora,
            "adapter": self.adapter,
            "load_in": self.load_in,
        }


_ALIKE = 0.85
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
        return ModelEntry(folder.name, folder.task, folder.architecture, folder)
    if MARK in name:
        raise InputError(f"model {name!r} has adapters; give its base by --model, and --lora or --adapter")
    if "@" in name:
        raise InputError(f"model {name!r} comes from a folder; give it with --model FOLDER")
    names = registered_models()
    family = name.lower().partition("-")[0]
    alike = [known for known in names if _is_misspelt(family, known.partition("-")[0])]
    close = difflib.get_close_matches(name.lower(), alike, n=1)
    remedy = f"did you mean {close[0]!r}?" if close else f"known models: {', '.join(names)}"
    raise InputError(f"unknown model {name!r}; {remedy}")


def _is_misspelt(word: str, known: str) -> bool:
    """Return whether two families may be meant to be one: "lama" and "llama", not "albert" and "bert"."""
    return sorted(word) == sorted(known) or difflib.SequenceMatcher(None, word, known).ratio() > _ALIKE
