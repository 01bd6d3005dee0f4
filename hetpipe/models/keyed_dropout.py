"""Dropout whose masks belong to samples, not to microbatches, devices or the order of execution."""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from cost_model.errors import InputError

PREFIX = -1
"""The layer of code that is repeated only for masks and positions: see hetpipe.models.partial_model."""


class KeyedDropout(TorchFunctionMode):
    """Dropout masks drawn per sample from (seed, step, sample, layer, call within the layer).

    Replaces `torch.nn.functional.dropout`, hence `nn.Dropout`, in every forward inside the context; the
    backward needs no context. Masks are drawn on the CPU in float32, so they are the same for every device
    and dtype.

    >>> with KeyedDropout(seed=0) as dropout:
    ...     dropout.at(step=0, samples=(7, 8))
    ...     dropout.enter_layer(3)
    ...     both = functional.dropout(torch.ones(2, 5))
    ...     dropout.at(step=0, samples=(8,))
    ...     dropout.enter_layer(3)
    ...     torch.equal(functional.dropout(torch.ones(1, 5)), both[1:])
    True
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed
        self._step = 0
        self._samples: tuple[int, ...] = ()
        self._layer = PREFIX
        self._call = 0
        self._generator = torch.Generator()

    def at(self, step: int, samples: Sequence[int]) -> None:
        """Announce a microbatch: the training step, and the identity of each of its samples."""
        self._step = step
        self._samples = tuple(samples)
        self._layer = PREFIX

    def enter_layer(self, layer: int) -> None:
        """Announce the layer that computes next (`LayerModel.on_layer`); PREFIX turns dropout off."""
        self._layer = layer
        self._call = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.dropout:
            return self._dropout(*args, **kwargs)
        if func in _FORBIDDEN:
            _FORBIDDEN[func](func.__name__, args, kwargs)
        return func(*args, **kwargs)

    def _dropout(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0.0 or self._layer == PREFIX:
            return x
        keep_probability = 1.0 - p
        if x.dtype.itemsize < 4 and keep_probability > 0.0:  # the scale itself would be rounded
            x = x.div_(keep_probability) if inplace else x / keep_probability
            keep = self._masks(x, keep_probability).sign_()
        else:
            keep = self._masks(x, keep_probability)
        return x.mul_(keep) if inplace else x * keep

    def _masks(self, x: Tensor, keep_probability: float) -> Tensor:
        num_samples = len(self._samples)
        if x.dim() == 0 or num_samples == 0 or x.shape[0] % num_samples:
            raise InputError(
                f"layer {self._layer} drops entries of a tensor of shape {tuple(x.shape)}, whose first "
                f"dimension is not made of the {num_samples} samples of the microbatch; set its dropout to 0"
            )
        # [samples, ...]; some models flatten samples and tokens, which leaves each sample's rows together.
        masks = torch.empty((num_samples, x.numel() // num_samples), dtype=torch.float32, device="cpu")
        key = f"{self._seed},{self._step},{self._layer},{self._call},"
        self._call += 1
        for mask, sample in zip(masks, self._samples, strict=True):
            self._generator.manual_seed(stable_hash(f"{key}{sample}"))
            mask.bernoulli_(keep_probability, generator=self._generator)
        if keep_probability > 0.0:
            masks /= keep_probability
        return masks.view(x.shape).to(device=x.device, dtype=x.dtype)


def stable_hash(key: str) -> int:
    """Return a seed in [0, 2 ** 63) that depends on the text only (BLAKE2b)."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little") >> 1


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], position: int, name: str, default: Any) -> Any:
    return kwargs.get(name, args[position] if len(args) > position else default)


def _refuse_attention_dropout(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if _argument(args, kwargs, 4, "dropout_p", 0.0) > 0.0:
        raise InputError(
            f"{name} draws a dropout mask that cannot be keyed by sample; "
            "use eager attention or set its dropout to 0"
        )


def _refuse_multi_head_dropout(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if _argument(args, kwargs, 10, "dropout_p", 0.0) > 0.0 and _argument(args, kwargs, 13, "training", True):
        raise InputError(f"{name} draws a dropout mask that cannot be keyed by sample; set its dropout to 0")


def _refuse_other_dropout(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if _argument(args, kwargs, 1, "p", 0.5) > 0.0 and _argument(args, kwargs, 2, "training", True):
        raise InputError(
            f"{name} draws a mask that cannot be keyed by sample; use torch.nn.functional.dropout"
        )


_FORBIDDEN: dict[Callable[..., Any], Callable[[str, tuple[Any, ...], dict[str, Any]], None]] = {
    functional.scaled_dot_product_attention: _refuse_attention_dropout,
    functional.multi_head_attention_forward: _refuse_multi_head_dropout,
    **dict.fromkeys(
        (
            functional.dropout1d,
            functional.dropout2d,
            functional.dropout3d,
            functional.alpha_dropout,
            functional.feature_alpha_dropout,
            torch.dropout,
        ),
        _refuse_other_dropout,
    ),
}
