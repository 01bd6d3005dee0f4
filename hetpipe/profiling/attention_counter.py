"""The arithmetic of attention: products of activations with each other, which no weight takes part in."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

FUSED_BACKWARD = 2.5
"""Of the forward: a fused kernel keeps no scores, and multiplies five times in its backward, once to have
them again, where it multiplied twice in its forward (Dao, FlashAttention-2, ICLR 2024, section 4.1)."""
PLAIN_BACKWARD = 2.0
"""Of the forward: a gradient for each of the two factors."""

_PRODUCTS = ("matmul", "__matmul__", "bmm", "baddbmm")


class AttentionCounter(TorchFunctionMode):
    """A count of the FLOP of attention while it is active, and of those of its backward; owns the count.

    Of queries [samples, heads, length, size] and as many keys, scores and what they weigh take
    2 * length^2 * heads * size each: 4 * length^2 * width in all (Narayanan et al., Efficient large-scale
    language model training on GPU clusters using Megatron-LM, SC 2021, appendix). What a causal mask hides is
    counted, as there and by torch's FlopCounterMode. Outer products (rotary angles) are none.
    NOTE: not seen are torch.einsum and kernels of others.
    """

    def __init__(self) -> None:
        super().__init__()
        self.forward_flops = 0.0
        self.backward_flops = 0.0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func is functional.scaled_dot_product_attention:
            query, key, value = (_argument(args, kwargs, *place) for place in enumerate(_FACTORS))
            width = query.shape[-1] + value.shape[-1]
            self._add(2.0 * query.shape[:-1].numel() * key.shape[-2] * width, FUSED_BACKWARD)
        elif func is functional.multi_head_attention_forward:  # [length, samples, width], or no samples
            query, key = (_argument(args, kwargs, *place) for place in enumerate(_FACTORS[:2]))
            is_fused = not _argument(args, kwargs, 15, "need_weights", True)
            flops = 4.0 * query.numel() * key.shape[0]
            self._add(flops, FUSED_BACKWARD if is_fused else PLAIN_BACKWARD)
        elif getattr(func, "__name__", "") in _PRODUCTS:
            one, two = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)][-2:]
            if min(one.dim(), two.dim()) > 2 and one.shape[-1] > 1:
                self._add(2.0 * result.numel() * one.shape[-1], PLAIN_BACKWARD)
        return result

    def _add(self, flops: float, backward: float) -> None:
        self.forward_flops += flops
        self.backward_flops += backward * flops


_FACTORS = ("query", "key", "value")


def _argument(
    args: tuple[Any, ...], kwargs: dict[str, Any], position: int, name: str, default: Any = None
) -> Any:
    return kwargs.get(name, args[position] if len(args) > position else default)
