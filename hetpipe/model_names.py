"""The models known by name, as a table that loads without torch."""

import difflib
from dataclasses import dataclass
from enum import StrEnum

from cost_model.errors import InputError


class Task(StrEnum):
    """What a model is trained to predict."""

    MASKED_LM = "masked-lm"
    CAUSAL_LM = "causal-lm"


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """One line of the table of models."""

    name: str
    task: Task
    description: str


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
    """Names of all models of the registry, in the order of the table."""
    return tuple(entry.name for entry in MODEL_ENTRIES)


def model_entry(name: str) -> ModelEntry:
    """The line of the table for a name.

    Raises:
        InputError: no such model; names the closest one, else all.
    """
    for entry in MODEL_ENTRIES:
        if entry.name == name:
            return entry
    names = registered_models()
    close = difflib.get_close_matches(name.lower(), names, n=1)
    remedy = f"did you mean {close[0]!r}?" if close else f"known models: {', '.join(names)}"
    raise InputError(f"unknown model {name!r}; {remedy}")
