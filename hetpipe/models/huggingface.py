"""Models by name, built from Hugging Face configurations in code, or from a folder: nothing is downloaded."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import cast

import torch
from torch import nn

from cost_model.errors import InputError
from cost_model.units import format_bytes
from hetpipe.models.families import (
    FAMILIES,
    LOADING,
    NO_LIMIT,
    SMALL_VOCABULARY,
    Family,
    attention_dropout_of,
    family_of,
    reason_of,
)
from hetpipe.models.huggingface_folder import CONFIG_FILE, ModelFolder, read_model_folder
from hetpipe.models.labels import labels_of
from hetpipe.models.names import model_entry, registered_models
from hetpipe.models.task_inputs import InputShape
from hetpipe.models.tasks import Task
from hetpipe.runs.quantization import Quantization

__all__ = ["ModelSpec", "Task", "model_spec", "registered_models"]


_TOKENS_ALONE = InputShape(Task.CAUSAL_LM)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model that can be built at full size, or shrunken for checks.

    build: constructs the model under whatever torch.device context is active.
    build_shrunk: the same class and flags with 4 blocks, a tiny width and shrunken_vocabulary_size tokens.
    build_whole: the same as build, as its class does it, without what lets it be cut; None: build does.
    folder: where the weights come from; None for weights drawn from the seed.
    base: the same without the adapters that this one has (`hetpipe.models.adapters`); None: it has none.
    quantization: of its frozen matrices; None: they are held as they are given.
    tested: whether the tests prove the split of its class; of others it is proven before they are used.
    inputs: what it takes; shrunken_inputs: the same of its tiny copy. labels: those that a classifier tells
    apart, by their numbers.
    proof: what decides whether the split is exact, as text: class and configuration of the tiny copy; ""
    where that is not known.
    """

    name: str
    task: Task
    vocabulary_size: int
    max_sequence_length: int
    build: Callable[[], nn.Module]
    build_shrunk: Callable[[], nn.Module]
    shrunken_vocabulary_size: int = SMALL_VOCABULARY
    folder: ModelFolder | None = None
    base: "ModelSpec | None" = None
    quantization: Quantization | None = None
    tested: bool = True
    inputs: InputShape = _TOKENS_ALONE
    shrunken_inputs: InputShape = _TOKENS_ALONE
    labels: tuple[str, ...] = ()
    proof: str = ""
    build_whole: Callable[[], nn.Module] | None = None

    def build_as_saved(self) -> nn.Module:
        """Construct the model as its class does: with the names and buffers that transformers saves."""
        return (self.build_whole or self.build)()

    def shrunk(self) -> "ModelSpec":
        """Return the tiny model of the same class: what holds for its structure holds for this one's."""
        return replace(
            self,
            vocabulary_size=self.shrunken_vocabulary_size,
            max_sequence_length=64,
            build=self.build_shrunk,
            folder=None,
            inputs=self.shrunken_inputs,
        )


def _bert(vocabulary_size: int, width: int, blocks: int, heads: int, inner: int) -> dict[str, object]:
    return {
        "vocab_size": vocabulary_size,
        "hidden_size": width,
        "num_hidden_layers": blocks,
        "num_attention_heads": heads,
        "intermediate_size": inner,
        "max_position_embeddings": 512,
    }


def _gpt2(vocabulary_size: int, width: int, blocks: int, heads: int, positions: int) -> dict[str, object]:
    return {
        "vocab_size": vocabulary_size,
        "n_embd": width,
        "n_layer": blocks,
        "n_head": heads,
        "n_positions": positions,
    }


def _llama(vocabulary_size: int, width: int, blocks: int, heads: int, inner: int) -> dict[str, object]:
    return {**_bert(vocabulary_size, width, blocks, heads, inner), "max_position_embeddings": 2048}


_SIZES: dict[str, tuple[str, dict[str, object]]] = {
    "bert-base": ("bert", _bert(30522, 768, 12, 12, 3072)),
    "bert-large": ("bert", _bert(30522, 1024, 24, 16, 4096)),
    "bert-medium-24": ("bert", _bert(8192, 512, 24, 8, 2048)),
    "bert-tiny": ("bert", _bert(1024, 64, 6, 4, 256)),
    "gpt2": ("gpt2", _gpt2(50257, 768, 12, 12, 1024)),
    "gpt2-medium": ("gpt2", _gpt2(50257, 1024, 24, 16, 1024)),
    "gpt2-tiny": ("gpt2", _gpt2(1024, 64, 4, 4, 512)),
    "llama-small": ("llama", _llama(16000, 512, 16, 8, 1376)),
    "llama-tiny": ("llama", _llama(1024, 64, 4, 4, 172)),
}


def model_spec(name: str, folder: str | Path | None = None) -> ModelSpec:
    """Return the model of that name in the table, or of a folder.

    folder: the folder of a model that is not of the table (`Settings.model_folder`); the name may be its path
        as well.

    Raises: InputError if there is no such model, or the folder cannot be used or is not that of the name.
    """
    if folder is not None:
        found = read_model_folder(folder)
        if found.name != name:
            raise InputError(
                f"{folder}: its configuration is that of {found.name!r}, not of {name!r}; it has changed, or "
                "is of another model"
            )
        return folder_spec(found)
    known = model_entry(name)
    if known.folder is not None:
        return folder_spec(known.folder)
    return _registered(name)


@cache
def _registered(name: str) -> ModelSpec:
    family_name, sizes = _SIZES[name]
    family = FAMILIES[family_name]
    config = {**family.fixed, **sizes}
    return _spec(name, model_entry(name).task, family, family.model, config, None)


def folder_spec(folder: ModelFolder) -> ModelSpec:
    """Return the model of a folder's configuration, with its weights.

    Raises: InputError if the configuration cannot be used.
    """
    family, where = family_of(folder), folder.path / CONFIG_FILE
    config = {key: value for key, value in folder.config.items() if key not in LOADING}
    try:
        sizes = family.configuration(config)
    except InputError as error:
        raise InputError(f"{where}: {error}") from error
    if folder.task.reads_text:
        config["vocab_size"] = getattr(sizes, "vocab_size", None)
        if not isinstance(config["vocab_size"], int):
            raise InputError(
                f"{where}: names no vocab_size, so {folder.architecture} does not take text; train it from "
                "Python: hetpipe.Trainer"
            )
    if family.max_positions is not None:
        config[family.max_positions] = getattr(sizes, family.max_positions)
    for key in filter(None, ("vocab_size", family.max_positions)):
        if key in config and (not isinstance(config[key], int) or config[key] < 1):
            raise InputError(f"{where}: {key} is {config[key]!r}; give how many there are, 1 or more")
    spec = _spec(folder.name, folder.task, family, folder.architecture, config, folder)
    return replace(spec, quantization=folder.quantization)


def _spec(
    name: str,
    task: Task,
    family: Family,
    model: str,
    config: Mapping[str, object],
    folder: ModelFolder | None,
) -> ModelSpec:
    small = family.small(config, fixed_tokens=folder is not None, task=task)
    where = name if folder is None else folder.path / CONFIG_FILE
    offset = 0 if folder is None else family.offset(_built(family, model, config, where))
    inputs, shrunken_inputs = (
        InputShape.of(task, family.configuration(sizes), where)
        if task.classifies or task.pads
        else InputShape(task)
        for sizes in (config, small)
    )
    most = NO_LIMIT if family.max_positions is None else cast(int, config[family.max_positions])
    return ModelSpec(
        name=name,
        task=task,
        vocabulary_size=cast(int, config.get("vocab_size", 0)),
        max_sequence_length=most - offset,
        build=partial(family.build, model, dict(config)),
        build_shrunk=partial(family.build, model, small),
        build_whole=partial(family.whole, model, dict(config)),
        shrunken_vocabulary_size=SMALL_VOCABULARY,
        folder=folder,
        tested=family.tested,
        inputs=inputs,
        shrunken_inputs=shrunken_inputs,
        labels=labels_of(config, where) if task.classifies else (),
        proof=json.dumps([family.module, model, task, small], sort_keys=True, default=str),
    )


def _built(family: Family, model: str, config: Mapping[str, object], where: object) -> nn.Module:
    """Return a model without room for its weights: what its class has against its sizes, it says here.

    Raises: InputError with what it says; where: the file of the sizes.
    """
    try:
        with torch.device("meta"):
            return family.build(model, config)
    except InputError as error:
        raise InputError(f"{where}: {error}") from error
    except Exception as error:  # of many kinds
        raise InputError(f"{where}: {model} cannot be built so: {unusable(error, config)}") from error


def unusable(error: Exception, config: Mapping[str, object] | None = None) -> str:
    """Return what a model's own code says of its configuration, in a line.

    A name that is missing in a table of transformers is said with the key that gives it.
    """
    name = error.args[0] if isinstance(error, KeyError) and error.args else None
    keys = [key for key, value in (config or {}).items() if isinstance(value, str) and value == name]
    if keys:
        return f"transformers knows no {name!r}, which is its {' and '.join(keys)}"
    return f"{type(error).__name__}: {reason_of(error)}"


def attention_sentence(name: str, folder: str | Path | None, sequence_length: int) -> str | None:
    """Say what attention dropout costs a model, and how to do without; None where it has none."""
    known = model_entry(name if folder is None else str(folder))
    family, sizes = _family_and_sizes(name, known.folder)
    config = family.configuration({key: value for key, value in sizes.items() if key not in LOADING})
    key, probability = attention_dropout_of(config, family.attention_dropout)
    heads = getattr(config, "num_attention_heads", 1)
    if not probability > 0:
        return None
    scores_bytes = 4 * heads * sequence_length**2  # in float32
    return (
        f"{key} of {name} is {probability:g}, and dropout inside the fused attention kernel cannot be drawn "
        f"for each sample: each block keeps {heads} x {sequence_length} x {sequence_length} scores of a "
        f"sample, {format_bytes(scores_bytes)}, several times over; to train by the fused one, give a model "
        f'folder whose config.json has "{key}": 0'
    )


def _family_and_sizes(name: str, folder: ModelFolder | None) -> tuple[Family, Mapping[str, object]]:
    if folder is not None:
        return family_of(folder), folder.config
    family, sizes = _SIZES[name]
    return FAMILIES[family], sizes
