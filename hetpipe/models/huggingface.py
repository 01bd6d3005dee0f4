"""Models by name, built from Hugging Face configurations in code, or from a folder: nothing is downloaded."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from torch import nn

from cost_model.errors import InputError
from cost_model.units import format_bytes
from hetpipe.models.huggingface_folder import ModelFolder, read_model_folder
from hetpipe.models.names import Task, model_entry, registered_models
from hetpipe.runs.quantization import Quantization

__all__ = ["ModelSpec", "Task", "model_spec", "registered_models"]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model that can be built at full size, or shrunken for checks.

    build: constructs the model under whatever torch.device context is active.
    build_shrunk: the same class and flags with 4 blocks, a tiny width and shrunken_vocabulary_size tokens.
    folder: where the weights come from; None for weights drawn from the seed.
    base: the same without the adapters that this one has (`hetpipe.models.adapters`); None: it has none.
    quantization: of its frozen matrices; None: they are held as they are given.
    """

    name: str
    task: Task
    vocabulary_size: int
    max_sequence_length: int
    build: Callable[[], nn.Module]
    build_shrunk: Callable[[], nn.Module]
    shrunken_vocabulary_size: int = 128
    folder: ModelFolder | None = None
    base: "ModelSpec | None" = None
    quantization: Quantization | None = None

    def shrunk(self) -> "ModelSpec":
        """Return the tiny model of the same class: what holds for its structure holds for this one's."""
        return replace(
            self,
            vocabulary_size=self.shrunken_vocabulary_size,
            max_sequence_length=64,
            build=self.build_shrunk,
            folder=None,
        )


@dataclass(frozen=True, slots=True)
class _Family:
    """A Hugging Face class, and how its configuration spells the sizes.

    fixed: what the models of the table have in common.
    """

    module: str
    config: str
    model: str
    attention_dropout: str
    max_positions: str
    fixed: Mapping[str, object]
    shrunk: Mapping[str, object]


_NARROW = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 32}
_NARROW_GROUPED = {**_NARROW, "num_key_value_heads": 2, "head_dim": 8}


def _like_llama(module: str, name: str) -> _Family:
    return _Family(
        module=module,
        config=f"{name}Config",
        model=f"{name}ForCausalLM",
        attention_dropout="attention_dropout",
        max_positions="max_position_embeddings",
        fixed={"use_cache": False, "tie_word_embeddings": False},
        shrunk=_NARROW_GROUPED,
    )


_FAMILIES = {
    "bert": _Family(
        module="bert",
        config="BertConfig",
        model="BertForPreTraining",
        attention_dropout="attention_probs_dropout_prob",
        max_positions="max_position_embeddings",
        fixed={"use_cache": False},
        shrunk=_NARROW,
    ),
    "gpt2": _Family(
        module="gpt2",
        config="GPT2Config",
        model="GPT2LMHeadModel",
        attention_dropout="attn_pdrop",
        max_positions="n_positions",
        fixed={"use_cache": False, "bos_token_id": 0, "eos_token_id": 0},
        shrunk={"n_embd": 16, "n_layer": 4, "n_head": 2},
    ),
    "gpt_neox": _Family(
        module="gpt_neox",
        config="GPTNeoXConfig",
        model="GPTNeoXForCausalLM",
        attention_dropout="attention_dropout",
        max_positions="max_position_embeddings",
        fixed={"use_cache": False},
        shrunk=_NARROW,
    ),
    "llama": _like_llama("llama", "Llama"),
    "mistral": _like_llama("mistral", "Mistral"),
    "qwen2": _like_llama("qwen2", "Qwen2"),
    "qwen3": _like_llama("qwen3", "Qwen3"),
}


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
    family_name, sizes = _SIZES[name]
    family = _FAMILIES[family_name]
    config = {**family.fixed, **sizes}
    return _spec(name, known.task, family, family.model, config, None)


def folder_spec(folder: ModelFolder) -> ModelSpec:
    """Return the model of a folder's configuration, with its weights.

    Raises: InputError if the configuration cannot be used.
    """
    family = _FAMILIES[folder.family]
    config = {key: value for key, value in folder.config.items() if key not in _LOADING}
    sizes = _config(family, config)
    config |= {"vocab_size": sizes.vocab_size, family.max_positions: getattr(sizes, family.max_positions)}
    spec = _spec(folder.name, Task(folder.task), family, folder.architecture, config, folder)
    return replace(spec, quantization=folder.quantization)


_LOADING = (
    *("model_type", "dtype", "torch_dtype", "architectures", "auto_map", "transformers_version"),
    "quantization_config",
)
"""Keys of config.json that say how to load the model, not what it is."""

_SHRUNK_TOKENS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}


def _spec(
    name: str,
    task: Task,
    family: _Family,
    model: str,
    config: Mapping[str, object],
    folder: ModelFolder | None,
) -> ModelSpec:
    shrunken_vocabulary_size = 128
    # one kind of layer for each layer, and token ids within the vocabulary: not those of the folder
    small = {key: value for key, value in config.items() if key != "layer_types"}
    small |= {**family.shrunk, "vocab_size": shrunken_vocabulary_size, family.max_positions: 64}
    small |= {} if folder is None else _SHRUNK_TOKENS
    return ModelSpec(
        name=name,
        task=task,
        vocabulary_size=cast(int, config["vocab_size"]),
        max_sequence_length=cast(int, config[family.max_positions]),
        build=partial(_build, family, model, dict(config)),
        build_shrunk=partial(_build, family, model, small),
        shrunken_vocabulary_size=shrunken_vocabulary_size,
        folder=folder,
    )


LONGEST_REASON = 300


def _config(family: _Family, config: Mapping[str, object]) -> Any:
    """Return the family's configuration; import only that family's file of transformers."""
    module = importlib.import_module(f"transformers.models.{family.module}.configuration_{family.module}")
    try:
        return getattr(module, family.config)(**config)
    except Exception as error:  # what a configuration raises of a wrong value is of many kinds
        reason = " ".join(str(error).split())[:LONGEST_REASON]
        raise InputError(f"the configuration of this {family.config} cannot be used: {reason}") from error


def _build(family: _Family, model: str, sizes: Mapping[str, object]) -> nn.Module:
    """Construct a model of a family; import only that family's files of transformers."""
    config = _config(family, sizes)
    modeling = importlib.import_module(f"transformers.models.{family.module}.modeling_{family.module}")
    # NOTE: the masks that the fused kernel draws inside cannot be keyed, see hetpipe.models.keyed_dropout.
    config._attn_implementation = "eager" if getattr(config, family.attention_dropout) > 0 else "sdpa"
    return cast(nn.Module, getattr(modeling, model)(config))


def attention_sentence(name: str, folder: str | Path | None, sequence_length: int) -> str | None:
    """Say what attention dropout costs a model, and how to do without; None where it has none."""
    known = model_entry(name if folder is None else str(folder))
    family_name, sizes = _SIZES[name] if known.folder is None else (known.folder.family, known.folder.config)
    family = _FAMILIES[family_name]
    config = _config(family, {key: value for key, value in sizes.items() if key not in _LOADING})
    key, heads = family.attention_dropout, config.num_attention_heads
    probability = getattr(config, key)
    if not probability > 0:
        return None
    scores_bytes = 4 * heads * sequence_length**2  # in float32
    return (
        f"{key} of {name} is {probability:g}, and dropout inside the fused attention kernel cannot be drawn "
        f"for each sample: each block keeps {heads} x {sequence_length} x {sequence_length} scores of a "
        f"sample, {format_bytes(scores_bytes)}, several times over; to train by the fused one, give a model "
        f'folder whose config.json has "{key}": 0'
    )


def preload_modules(name: str, folder: str | Path | None = None) -> tuple[str, ...]:
    """Return the modules that building the model imports, for a server that forks ranks.

    Raises: InputError if there is no such model.
    """
    known = model_entry(name if folder is None else str(folder))
    family = _SIZES[name][0] if known.folder is None else known.folder.family
    module = _FAMILIES[family].module
    return (f"transformers.models.{module}.modeling_{module}",)
