"""Dropout whose masks belong to samples, not to microbatches, devices or the order of execution."""

import hashlib
from collections.abc import Callable, Container, Iterable, Sequence
from functools import lru_cache, wraps
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from cost_model.errors import InputError
from hetpipe.models import philox
from hetpipe.models.philox_torch import Draw, draw

PREFIX = -1
"""The layer of code that is repeated only for masks and positions: see hetpipe.models.partial_model."""


class KeyedDropout:
    """Dropout masks drawn per sample from (seed, step, sample, layer, call within the layer).

    Replaces `torch.nn.functional.dropout`, hence `nn.Dropout`, in every forward inside the context; the
    backward needs no context. nn.MultiheadAttention that drops is eager there. The masks are
    the same for every device, dtype and microbatch size: see `philox`. Whatever else draws random
    numbers inside is refused, since it would depend on the plan.

    In the first forward of a layer all calls of torch are looked at, and in later ones where that was needed,
    as it slows each down. Else `torch.nn.functional.dropout` is another function inside the context.

    traces: whether layers may be compiled, whose graphs take what masks depend on as a tensor.

    >>> with KeyedDropout(seed=0) as dropout:
    ...     dropout.at(step=0, samples=(7, 8))
    ...     dropout.enter_layer(3)
    ...     both = functional.dropout(torch.ones(2, 5))
    ...     dropout.at(step=0, samples=(8,))
    ...     dropout.enter_layer(3)
    ...     torch.equal(functional.dropout(torch.ones(1, 5)), both[1:])
    True
    """

    traces: bool = False

    def __init__(self, seed: int, device: torch.device | None = None) -> None:
        """device: where layers compute, if not on the CPU; its generator is looked after, too."""
        self._key_and_samples = torch.zeros(1, dtype=torch.int64)
        self._seed = seed
        self._generators = _Generators(device)
        self._mode = _Interception({_DROPOUT, self._dropout}, self._unexpected)
        self._replaced_attention = functional.multi_head_attention_forward
        self._watching = False
        self._quiet: set[int] = set()  # layers in which no call went past the attribute
        self._replaced = functional.dropout
        self._step = 0
        self._samples: tuple[int, ...] = ()
        self._layers: frozenset[int] | None = None
        self._layer = PREFIX
        self._call = 0

    def at(self, step: int, samples: Sequence[int], layers: Iterable[int] | None = None) -> None:
        """Announce a microbatch: the training step, and the identity of each of its samples.

        layers: those that compute in the next context, if no others do.
        """
        self._step = step
        self._samples = tuple(samples)
        self._layers = None if layers is None else frozenset((PREFIX, *layers))
        self._layer = PREFIX

    def enter_layer(self, layer: int) -> None:
        """Announce the layer that computes next (`LayerModel.on_layer`); PREFIX turns dropout off."""
        if self._watching:
            self._leave_layer()
            self._quiet.add(layer)
        self._layer = layer
        self._call = 0
        if self.traces and layer != PREFIX:
            self._key_and_samples = torch.tensor((_key(self._seed, self._step, layer), *self._samples))

    def __enter__(self) -> Self:
        self._generators.remember()
        self._watching = self._layers is None or not self._layers <= self._quiet
        self._replaced, functional.dropout = functional.dropout, self._dropout
        self._replaced_attention = functional.multi_head_attention_forward
        functional.multi_head_attention_forward = _eager_attention
        if self._watching:
            self._quiet.add(PREFIX)
            self._mode.__enter__()  # type: ignore[no-untyped-call]  # torch
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._watching:
            self._mode.__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]  # torch
        functional.dropout = self._replaced
        functional.multi_head_attention_forward = self._replaced_attention
        if error is None:
            self._leave_layer()
        self._watching = False

    def _leave_layer(self) -> None:
        """Check that the layer drew nothing by a generator.

        Raises:
            InputError: it did.
        """
        if not self._generators.moved():
            return
        if self._watching:
            where = "the model before its first layer" if self._layer == PREFIX else f"layer {self._layer}"
            what = "draws random numbers other than by torch.nn.functional.dropout"
        else:
            where = f"a layer up to {self._layer}"
            what = "draws random numbers and drew none in its first forward"
        raise InputError(
            f"{where} {what}, so they would depend on the plan; take them out, or use nn.Dropout"
        )

    def _unexpected(self, *args: Any, **kwargs: Any) -> Tensor:
        """Do what `_dropout` does where torch's function was called by another name than its own.

        Raises: InputError if layers are to be compiled: all calls of this one have to be looked at.
        """
        if self.traces:
            raise InputError(
                f"layer {self._layer} calls torch.nn.functional.dropout by another name than this, which a "
                "compiled layer would hide; use nn.Dropout, or leave out --compile"
            )
        self._quiet.discard(self._layer)
        return self._dropout(*args, **kwargs)

    def _dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0.0:
            return input
        if torch.compiler.is_compiling():
            return self._traced(input, p, inplace=inplace)
        if self._layer == PREFIX:
            return input
        if p == 1.0:
            return input.mul_(0.0) if inplace else input * 0.0
        drawn = self._draw(input, 1.0 - p)
        if inplace:
            mask = philox.kept(drawn, input.numel() // len(drawn.samples), input.device).view(input.shape)
            return input.mul_(mask).mul_(drawn.scale)
        return philox.dropped(input, drawn)

    def _traced(self, x: Tensor, p: float, *, inplace: bool) -> Tensor:
        """Do what `_dropout` does, in a graph that is to serve all layers, steps and samples."""
        dropped = x * 0.0
        if p != 1.0:
            operation = torch.ops.hetpipe.keyed_dropout.default
            dropped = operation(x, self._key_and_samples, self._call, 1.0 - p)
            self._call += 1
        return x.copy_(dropped) if inplace else dropped

    def _draw(self, x: Tensor, keep_probability: float) -> Draw:
        num_samples = len(self._samples)
        if x.dim() == 0 or num_samples == 0 or x.shape[0] % num_samples:
            raise InputError(
                f"layer {self._layer} drops entries of a tensor of shape {tuple(x.shape)}, whose first "
                f"dimension is not made of the {num_samples} samples of the microbatch; set its dropout to 0"
            )
        # [samples, ...]; some models flatten samples and tokens, which leaves each sample's rows together.
        drawn = draw(_key(self._seed, self._step, self._layer), self._call, self._samples, keep_probability)
        self._call += 1
        return drawn


class _Interception(TorchFunctionMode):
    """Calls another dropout instead of torch's, and refuses what draws masks of its own."""

    def __init__(self, names: Container[Callable[..., Any]], dropout: Callable[..., Tensor]) -> None:
        """names: functions in place of which `dropout` is called; torch passes that of its attribute."""
        super().__init__()
        self._names, self._dropout = names, dropout

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in self._names:
            return self._dropout(*args, **kwargs)
        if func in _FORBIDDEN:
            _FORBIDDEN[func](func.__name__, args, kwargs)
        return func(*args, **kwargs)


class _Generators:
    """The states of torch's generators, from which nothing may be drawn."""

    def __init__(self, device: torch.device | None) -> None:
        known = device is not None and device.type in ("cuda", "xpu", "mps")
        self._device = device if known else None
        self._state: tuple[bytes, object] = (b"", 0)

    def remember(self) -> None:
        self._state = self._now()

    def moved(self) -> bool:
        """Return whether anything was drawn since the last `remember`."""
        return self._now() != self._state

    def _now(self) -> tuple[bytes, object]:
        """Return the state of the CPU's generator, and how far the device's has gone; waits for nothing."""
        with _disable_current_modes():  # where tensors have no memory it is noise
            state = torch.default_generator.get_state().numpy().tobytes()
            return state, 0 if self._device is None else _drawn_on(self._device)


def _drawn_on(device: torch.device) -> object:
    """Return how far the generator of a GPU has gone, by what the host knows of it."""
    if device.type == "mps":
        return torch.mps.get_rng_state().numpy().tobytes()
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    return torch.get_device_module(device).default_generators[index].get_offset()


@lru_cache(maxsize=256)
def _key(seed: int, step: int, layer: int) -> int:
    return stable_hash(f"{seed},{step},{layer}")


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


_MULTI_HEAD_ATTENTION = functional.multi_head_attention_forward


@wraps(_MULTI_HEAD_ATTENTION)
def _eager_attention(*args: Any, **kwargs: Any) -> Any:
    """Attend as nn.MultiheadAttention does when its weights are asked for, whose dropout can be keyed."""
    drops = _argument(args, kwargs, 10, "dropout_p", 0.0) > 0.0
    if not drops or not _argument(args, kwargs, 13, "training", True) or kwargs.get("need_weights", True):
        return _MULTI_HEAD_ATTENTION(*args, **kwargs)
    attended, _ = _MULTI_HEAD_ATTENTION(*args, **{**kwargs, "need_weights": True})
    return attended, None


def _refuse_other_dropout(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if _argument(args, kwargs, 1, "p", 0.5) > 0.0 and _argument(args, kwargs, 2, "training", True):
        raise InputError(
            f"{name} draws a mask that cannot be keyed by sample; use torch.nn.functional.dropout"
        )


_DROPOUT = functional.dropout

_FORBIDDEN: dict[Callable[..., Any], Callable[[str, tuple[Any, ...], dict[str, Any]], None]] = {
    functional.scaled_dot_product_attention: _refuse_attention_dropout,
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
