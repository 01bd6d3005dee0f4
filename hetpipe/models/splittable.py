"""What a model does in a way that cannot be cut, done in one that can: the same numbers and parameters."""

from functools import partial
from typing import Any, cast

from torch import Tensor, nn

from cost_model.errors import InputError
from hetpipe.models.cut_refusals import refuse_uncuttable

_SHARED_BIAS = ("T5Stack", "MT5Stack")
"""Stacks of transformers whose first block makes a bias of its parameters for all blocks after it."""


def splittable(model: nn.Module) -> nn.Module:
    """Return the model, which computes the same, be it cut anywhere.

    T5's position bias, [1, heads, seq, seq], is made anew by each block from the first one's table, so that
    it need not travel. nn.TransformerEncoder leaves out no padding by nested tensors, in which samples differ
    in shape.

    Raises: InputError for what cannot be cut without a change, see `refuse_uncuttable`.
    """
    refuse_uncuttable(model)
    for module in list(model.modules()):
        if isinstance(module, nn.TransformerEncoder):
            module.enable_nested_tensor = module.use_nested_tensor = False
        elif type(module).__name__ in _SHARED_BIAS:
            blocks = list(cast(nn.ModuleList, module.block))
            table = _attention(blocks[0]).relative_attention_bias
            for block in blocks:
                _attention(block).relative_attention_bias = table
                block.__dict__["forward"] = partial(_with_own_bias, block)
    return model


def _attention(block: nn.Module) -> Any:
    layers: Any = block.layer
    return layers[0].SelfAttention


def _with_own_bias(
    block: nn.Module, hidden_states: Tensor, attention_mask: Tensor | None, _: None, *args: Any, **kwargs: Any
) -> tuple[Tensor, None, None]:
    """Compute a T5 block with a position bias of its own, and return none for the next one."""
    length = hidden_states.shape[1]
    bias = _attention(block).compute_bias(length, length, device=hidden_states.device)
    forward: Any = type(block).forward
    hidden_states, *_ = forward(block, hidden_states, attention_mask, bias, *args, **kwargs)
    return hidden_states, None, None


def check_norms(model: nn.Module, remedy: str) -> None:
    """Refuse a model with batch normalisation; remedy: what to do instead, in a sentence.

    Raises: InputError naming the layer.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise InputError(
                f"layer {name!r} is a {type(module).__name__}, whose result depends on the microbatch; "
                f"{remedy}"
            )
