"""The classes of transformers behind a model: some by a table, others by what they say of themselves."""

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

from torch import nn

from cost_model.errors import InputError
from hetpipe.models.huggingface_folder import ARCHITECTURES, CONFIG_FILE, ModelFolder
from hetpipe.models.splittable import check_norms, splittable
from hetpipe.models.tasks import Task

LOADING = (
    *("model_type", "dtype", "torch_dtype", "architectures", "auto_map", "transformers_version"),
    "quantization_config",
)
"""Keys of config.json that say how to load the model, not what it is."""

NO_LIMIT = 1 << 20
"""The longest sequence of a model that has no positions to run out of: ALiBi, state spaces."""

SMALL_VOCABULARY = 128
_SMALL_POSITIONS = 64
_SMALL_PATCH, _SMALL_PATCHES, _SMALL_IMAGE = 4, 3, 64
_LONGEST_REASON = 300

_SHRUNK_TOKENS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}

ATTENTION_DROPOUTS = ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "dropout_rate")

_POSITIONS = ("max_position_embeddings", "max_seq_len")

_STORED_BUFFERS = ("final_logits_bias",)
"""Buffers that BART and its like store with their weights, and add to the logits."""


def attention_dropout_of(config: Any, keys: Sequence[str]) -> tuple[str, float]:
    """Return the name of the probability of attention's dropout, and it; 0 where there is none.

    keys: the names that it may have; the first that the configuration has counts.
    """
    for key in keys:
        probability = getattr(config, key, None)
        if isinstance(probability, int | float):
            return key, probability
    return "", 0.0


@dataclass(frozen=True, slots=True)
class Family:
    """A class of transformers, and how its configuration spells the sizes.

    module: its folder in transformers.models. config, model: names of the classes of configuration and model.
    attention_dropout: names of its probability; of several the first that the configuration has counts.
    max_positions: None where sequences may be of any length.
    fixed: what the models of the table have in common.
    shrunk: what makes a tiny copy.
    tested: whether it is of the table; if not, its split has to be proven before it is used.
    """

    module: str
    config: str
    model: str
    attention_dropout: tuple[str, ...]
    max_positions: str | None
    fixed: Mapping[str, object]
    shrunk: Mapping[str, object]
    tested: bool = True

    @property
    def modeling(self) -> str:
        """Return the module of transformers in which the model is."""
        return f"transformers.models.{self.module}.modeling_{self.module}"

    def configuration(self, config: Mapping[str, object]) -> Any:
        """Return the configuration of these values; imports this family's files of transformers alone.

        Raises: InputError if they cannot be used.
        """
        try:
            module = importlib.import_module(f"transformers.models.{self.module}.configuration_{self.module}")
            return getattr(module, self.config)(**config)
        except Exception as error:  # what a configuration raises of a wrong value is of many kinds
            raise InputError(
                f"the configuration of this {self.config} cannot be used: {reason_of(error)}"
            ) from error

    def build(self, model: str, sizes: Mapping[str, object]) -> nn.Module:
        """Construct a model of the family, of these values of the configuration."""
        made = self.whole(model, sizes)
        check_norms(made, f"{model} is not taken; choose one with layer norms, as ViT or ConvNext")
        return splittable(_stored_as_weights(made))

    def whole(self, model: str, sizes: Mapping[str, object]) -> nn.Module:
        """Construct a model as its class does, without what lets it be cut: to be saved."""
        config = self.configuration(sizes)
        found = getattr(importlib.import_module(self.modeling), model)
        # NOTE: masks that the fused kernel draws inside cannot be keyed, see hetpipe.models.keyed_dropout.
        fused = attention_dropout_of(config, self.attention_dropout)[1] <= 0 and getattr(
            found, "_supports_sdpa", True
        )
        config._attn_implementation = "sdpa" if fused else "eager"
        return cast(nn.Module, found(config))

    def small(self, config: Mapping[str, object], *, fixed_tokens: bool, task: Task) -> dict[str, object]:
        """Return the configuration of a tiny copy of a model of the family.

        fixed_tokens: whether the configuration names ids of tokens, which the copy's vocabulary lacks.
        """
        # one kind of layer for each layer, and token ids within the vocabulary: not those of the folder
        whole = self.configuration(config)
        stages = _small_stages(whole)
        num_blocks = None if stages else getattr(whole, "num_hidden_layers", None)
        by_layer = {
            key for key, value in config.items() if isinstance(value, list) and len(value) == num_blocks
        }
        small = {key: value for key, value in config.items() if key not in by_layer | {"layer_types"}}
        small |= {**self.shrunk, **stages}
        if not task.reads_text:
            return small | _small_image(whole)
        small["vocab_size"] = SMALL_VOCABULARY
        if self.max_positions is not None:
            small[self.max_positions] = _SMALL_POSITIONS + (0 if self.tested else SMALL_VOCABULARY)
        padding = None if self.tested else getattr(whole, "pad_token_id", None)
        if fixed_tokens:
            small |= _SHRUNK_TOKENS | {"pad_token_id": None if padding is None else min(padding, 1)}
        return small | (_small_translator(whole) if task.translates else {})

    def offset(self, whole: nn.Module) -> int:
        """Return how many positions no token can have: RoBERTa's begin after that of the padding token."""
        if self.tested:
            return 0
        tables = (part for name, part in whole.named_modules() if name.endswith("position_embeddings"))
        paddings = [table.padding_idx for table in tables if isinstance(table, nn.Embedding)]
        return max((1 + padding for padding in paddings if padding is not None), default=0)


def _small_translator(config: Any) -> dict[str, object]:
    """Return the vocabulary and the tokens of a tiny copy: the decoder begins with padding where it did."""
    begins_padded = config.decoder_start_token_id == config.pad_token_id
    sizes = {
        "pad_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 1 if begins_padded else 3,
        "forced_bos_token_id": None,
        "forced_eos_token_id": None,
        "decoder_vocab_size": SMALL_VOCABULARY,
    }
    return {key: value for key, value in sizes.items() if hasattr(config, key)}


def _stored_as_weights(model: nn.Module) -> nn.Module:
    """Return the model whose buffers among `_STORED_BUFFERS` are frozen parameters from now on.

    They are stored with the weights, and like them they come from a folder, lie on the rank that uses them
    alone, and go into checkpoints.
    """
    for name, buffer in list(model.named_buffers()):
        path, _, key = name.rpartition(".")
        if key in _STORED_BUFFERS:
            owner = model.get_submodule(path)
            del owner._buffers[key]
            owner.register_parameter(key, nn.Parameter(buffer, requires_grad=False))
    return model


def _small_stages(config: Any) -> dict[str, object]:
    """Return the sizes of a tiny copy of a model of stages of blocks (`depths`); nothing of another one."""
    depths, widths = getattr(config, "depths", None), getattr(config, "hidden_sizes", None)
    if not isinstance(depths, list) or not isinstance(widths, list):
        return {}
    sizes = {
        "depths": [min(depth, 2) for depth in depths],
        "hidden_sizes": [8 * (stage + 1) for stage in range(len(widths))],
        "num_stages": len(depths),
    }
    return {key: value for key, value in sizes.items() if hasattr(config, key)}


def _small_image(config: Any) -> dict[str, object]:
    """Return the size of tiny images: a few patches of a tiny size where a model cuts images into such.

    Where stages of blocks halve the images again and again (`depths`), a size that they leave something of.
    """
    patch, size = getattr(config, "patch_size", None), getattr(config, "image_size", None)
    if not isinstance(size, int):
        return {}
    if isinstance(getattr(config, "depths", None), list):
        return {"image_size": min(size, _SMALL_IMAGE)}
    if not isinstance(patch, int):
        return {"image_size": 16}
    side = min(patch, _SMALL_PATCH)
    return {"image_size": _SMALL_PATCHES * side, "patch_size": side}


def reason_of(error: Exception) -> str:
    """Return the beginning of what an error of somebody else's code says, on one line."""
    return " ".join(str(error).split())[:_LONGEST_REASON]


def build_keyed(build: Callable[[], nn.Module]) -> nn.Module:
    """Build a model with `keyed_attention` and as `splittable` makes it."""
    return splittable(keyed_attention(build()))


def keyed_attention(model: nn.Module) -> nn.Module:
    """Return the model, which takes eager attention from now on if it is of transformers, with dropout there.

    What the fused kernel draws cannot be keyed by sample. The result is the same, to rounding and the masks.
    """
    config = getattr(model, "config", None)
    is_fused = getattr(config, "_attn_implementation", "eager") != "eager"
    if is_fused and attention_dropout_of(config, ATTENTION_DROPOUTS)[1] > 0:
        cast(Any, model).set_attn_implementation("eager")
    return model


_NARROW = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 32}
_NARROW_GROUPED = {**_NARROW, "num_key_value_heads": 2, "head_dim": 8}
_NARROW_OTHERS = {
    **_NARROW_GROUPED,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "embedding_size": 32,
    "word_embed_proj_dim": 32,
    "ffn_dim": 32,
    "n_inner": 32,
    "rotary_dim": 4,
    "dim": 32,
    "hidden_dim": 32,
    "encoder_ffn_dim": 32,
    "decoder_layers": 3,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 32,
    "num_decoder_layers": 3,
    "d_ff": 32,
    "attention_types": [[["global", "local"], 2]],
}
"""Sizes of a tiny copy of any other model: those that its configuration has."""


_DATA = ("input_ids", "pixel_values")
"""Arguments of models that data of the command line fill."""


def _like_llama(module: str, name: str) -> Family:
    return Family(
        module=module,
        config=f"{name}Config",
        model=f"{name}ForCausalLM",
        attention_dropout=("attention_dropout",),
        max_positions="max_position_embeddings",
        fixed={"use_cache": False, "tie_word_embeddings": False},
        shrunk=_NARROW_GROUPED,
    )


FAMILIES = {
    "bert": Family(
        module="bert",
        config="BertConfig",
        model="BertForPreTraining",
        attention_dropout=("attention_probs_dropout_prob",),
        max_positions="max_position_embeddings",
        fixed={"use_cache": False},
        shrunk=_NARROW,
    ),
    "gpt2": Family(
        module="gpt2",
        config="GPT2Config",
        model="GPT2LMHeadModel",
        attention_dropout=("attn_pdrop",),
        max_positions="n_positions",
        fixed={"use_cache": False, "bos_token_id": 0, "eos_token_id": 0},
        shrunk={"n_embd": 16, "n_layer": 4, "n_head": 2},
    ),
    "gpt_neox": Family(
        module="gpt_neox",
        config="GPTNeoXConfig",
        model="GPTNeoXForCausalLM",
        attention_dropout=("attention_dropout",),
        max_positions="max_position_embeddings",
        fixed={"use_cache": False},
        shrunk=_NARROW,
    ),
    "llama": _like_llama("llama", "Llama"),
    "mistral": _like_llama("mistral", "Mistral"),
    "qwen2": _like_llama("qwen2", "Qwen2"),
    "qwen3": _like_llama("qwen3", "Qwen3"),
}


def family_of(folder: ModelFolder) -> Family:
    """Return the classes behind a folder's model.

    Raises: InputError if transformers has no such class, or stores its weights under names other than the
    model's.
    """
    if folder.architecture in ARCHITECTURES:
        return FAMILIES[folder.family]
    try:
        return _found(folder.family, folder.architecture)
    except InputError as error:
        raise InputError(f"{folder.path / CONFIG_FILE}: {error}") from None


@lru_cache
def _found(module: str, architecture: str) -> Family:
    import transformers
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    try:
        modeling = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    except ModuleNotFoundError:
        raise InputError(
            f"transformers {transformers.__version__} has no model type {module!r}, and code of a folder's "
            "own is not run"
        ) from None
    model = getattr(modeling, architecture, None)
    if model is None:
        raise InputError(
            f"transformers {transformers.__version__} has no {architecture} of model type {module!r}; look "
            "at config.json"
        )
    if (reads := getattr(model, "main_input_name", _DATA[0])) not in _DATA:
        raise InputError(
            f"{architecture} reads {reads}, and data here are texts ({_DATA[0]}) and images ({_DATA[1]}); "
            "train it from Python: hetpipe.Trainer"
        )
    config = model.config_class
    if get_checkpoint_conversion_mapping(config.model_type):
        raise InputError(
            f"transformers stores the weights of {architecture} under other names than the model's, "
            "which is not done here; train it from Python: hetpipe.Trainer"
        )
    known = {*inspect.signature(config).parameters, *getattr(config, "__dataclass_fields__", ())}
    spelt = config.attribute_map
    positions = (spelt.get(key, key) for key in _POSITIONS)
    narrow = {spelt.get(key, key): value for key, value in _NARROW_OTHERS.items()}
    return Family(
        module=module,
        config=config.__name__,
        model=architecture,
        attention_dropout=ATTENTION_DROPOUTS,
        max_positions=next((key for key in positions if key in known), None),
        fixed={"use_cache": False},
        shrunk={key: value for key, value in narrow.items() if key in known},
        tested=False,
    )
