"""Models of transformers that no longer look into their inputs in each forward, which waits for a GPU."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

_FAMILIES = ("gpt2", "gpt_neox", "llama", "mistral", "qwen2", "qwen3")
_MODULES = {f"transformers.models.{family}.modeling_{family}" for family in _FAMILIES}
_FUNCTION = "find_packed_sequence_indices"
_WARNING = "warn_if_padding_and_no_attention_mask"

_replaced: list[Callable[[Tensor], Tensor | None]] = []
"""What is put back at the end of each forward under way."""


def keep_unpacked(model: nn.Module) -> None:
    """Spare the causal models of `hetpipe.models.huggingface` the search for packed sequences.

    Without positions of the caller's they number the tokens of each sample from 0, in which there is nothing
    to find (transformers 5, masking_utils.py); on a GPU the host waits for the answer, once in each forward.
    The same for the search for padding, of which a warning is all that comes.
    """
    for module in model.modules():
        if hasattr(type(module), _WARNING):
            module.__dict__[_WARNING] = _nothing_found
        if type(module).__module__ in _MODULES and type(module).__name__.endswith("Model"):
            module.register_forward_pre_hook(_begin, with_kwargs=True)
            # a stage leaves the forward by an exception
            module.register_forward_hook(_end, always_call=True)


def _begin(_: nn.Module, __: tuple[Any, ...], options: Mapping[str, object]) -> None:
    masks = _masks()
    _replaced.append(masks[_FUNCTION])
    if options.get("position_ids") is None:
        masks[_FUNCTION] = _nothing_found


def _end(*_: object) -> None:
    _masks()[_FUNCTION] = _replaced.pop()


def _masks() -> dict[str, Any]:
    return vars(importlib.import_module("transformers.masking_utils"))


def _nothing_found(*_: object) -> None:
    return None
