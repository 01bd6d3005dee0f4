"""Models by name, built from Hugging Face configurations in code: nothing is downloaded."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

from torch import nn

from hetpipe.model_names import Task, model_entry, registered_models

__all__ = ["ModelSpec", "Task", "model_spec", "registered_models"]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model that can be built at full size, or shrunken for checks.

    build: constructs the model under whatever torch.device context is active.
    build_shrunk: the same class and flags with 4 blocks, a tiny width and shrunken_vocabulary_size tokens.
    """

    name: str
    task: Task
    vocabulary_size: int
    max_sequence_length: int
    build: Callable[[], nn.Module]
    build_shrunk: Callable[[], nn.Module]
    shrunken_vocabulary_size: int = 128

    def shrunk(self) -> "ModelSpec":
        """The tiny model of the same class: what holds for its structure holds for this one's."""
        return replace(
            self,
            vocabulary_size=self.shrunken_vocabulary_size,
            max_sequence_length=64,
            build=self.build_shrunk,
        )


@dataclass(frozen=True, slots=True)
class _Family:
    """A Hugging Face class, and how its configuration spells the sizes."""

    module: str
    config: str
    model: str
    attention_dropout: str
    max_positions: str
    fixed: Mapping[str, object]
    shrunk: Mapping[str, object]


_FAMILIES = {
    "bert": _Family(
        module="bert",
        config="BertConfig",
        model="BertForPreTraining",
        attention_dropout="attention_probs_dropout_prob",
        max_positions="max_position_embeddings",
        fixed={"use_cache": False},
        shrunk={
            "hidden_size": 16,
            "num_hidden_layers": 4,
            "num_attention_heads": 2,
            "intermediate_size": 32,
        },
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
    "llama": _Family(
        module="llama",
        config="LlamaConfig",
        model="LlamaForCausalLM",
        attention_dropout="attention_dropout",
        max_positions="max_position_embeddings",
        fixed={"use_cache": False, "tie_word_embeddings": False},
        shrunk={
            "hidden_size": 16,
            "num_hidden_layers": 4,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "intermediate_size": 32,
        },
    ),
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


def model_spec(name: str) -> ModelSpec:
    """The registered model of that name.

    Raises:
        InputError: no such model.
    """
    entry = model_entry(name)
    family_name, sizes = _SIZES[name]
    family = _FAMILIES[family_name]
    shrunken_vocabulary_size = 128
    small = {**sizes, **family.shrunk, "vocab_size": shrunken_vocabulary_size, family.max_positions: 64}
    return ModelSpec(
        name=name,
        task=entry.task,
        vocabulary_size=cast(int, sizes["vocab_size"]),
        max_sequence_length=cast(int, sizes[family.max_positions]),
        build=partial(_build, family_name, tuple(sizes.items())),
        build_shrunk=partial(_build, family_name, tuple(small.items())),
        shrunken_vocabulary_size=shrunken_vocabulary_size,
    )


def _build(family_name: str, sizes: tuple[tuple[str, object], ...]) -> nn.Module:
    """Construct a model of a family; imports only that family's files of transformers."""
    family = _FAMILIES[family_name]
    package = f"transformers.models.{family.module}"
    configuration = importlib.import_module(f"{package}.configuration_{family.module}")
    modeling = importlib.import_module(f"{package}.modeling_{family.module}")
    config: Any = getattr(configuration, family.config)(**family.fixed, **dict(sizes))
    # NOTE: the masks that the fused kernel draws inside cannot be keyed, see hetpipe.dropout.
    config._attn_implementation = "eager" if getattr(config, family.attention_dropout) > 0 else "sdpa"
    return cast(nn.Module, getattr(modeling, family.model)(config))


def preload_modules(name: str) -> tuple[str, ...]:
    """Modules that building the model imports, for a server that forks ranks.

    Raises:
        InputError: no such model.
    """
    model_entry(name)
    module = _FAMILIES[_SIZES[name][0]].module
    return (f"transformers.models.{module}.modeling_{module}",)
