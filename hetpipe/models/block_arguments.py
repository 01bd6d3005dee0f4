"""What a model hands to its blocks beside the tensors between them, worked out once for each shape.

Masks, positions and rotary tables are made by the model's own code before its blocks, which every stage
would run again for every microbatch. Where they depend on nothing but the shapes of the inputs, the blocks
are called with those of an earlier forward. That they do is found out by following the values of the inputs,
and of what the blocks give, through the operations of one forward (information flow: Denning and Denning,
"Certification of programs for secure information flow", CACM 1977):

    ids ~ embedding ~ hidden -> block 0        marked, but it is a tensor between blocks
    ids.shape ~ arange ~ cos, sin -> block 0   not marked: kept
    attention_mask ~ 4D mask -> block 0        marked: made anew in each forward

The decision is made by facts that the host has; it never waits for a device.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hetpipe.models.block_structure import Inputs

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""What a block is called with: by position and by keyword."""

MOST_SHAPES = 16
"""For inputs of more shapes than that, arguments are made anew in each forward."""

_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)


class BlockArguments:
    """The arguments of a model's blocks that depend on shapes alone; owns those tensors."""

    def __init__(self) -> None:
        self._known: dict[object, dict[int, Arguments] | None] = {}  # None: they depend on values

    def find(self, key: object, layers: Collection[int]) -> Mapping[int, Arguments] | None:
        """Return the arguments of all of these layers, None if they are not all known; not to be changed."""
        known = self._known.get(key)
        return known if known is not None and all(layer in known for layer in layers) else None

    def may_record(self, key: object) -> bool:
        """Return whether a forward of these shapes is worth being recorded."""
        known = self._known.get(key, {})
        return known is not None and (key in self._known or len(self._known) < MOST_SHAPES)

    def keep(self, key: object, found: "Recorder") -> None:
        """Keep what a whole recorded forward found."""
        if found.depends:
            self._known[key] = None
        elif (known := self._known.setdefault(key, {})) is not None:
            known.update(found.arguments)

    def forget(self) -> None:
        """Let go of all."""
        self._known.clear()

    def tensors(self) -> list[Tensor]:
        """Return the tensors that are kept."""
        leaves = tree_leaves([list(known.values()) for known in self._known.values() if known])
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def shape_key(inputs: Inputs, *, training: bool) -> object:
    """Return what arguments that do not depend on values depend on."""
    return (training, *((name, value.shape, value.dtype) for name, value in inputs.items()))


class Recorder:
    """A record of what the blocks of one forward are called with.

    depends: whether any of it may depend on more than shapes: on a value, on what a block gave, on state
    that is not a tensor, or on a context that the model opens around its blocks.
    """

    def __init__(self, inputs: Inputs, device_type: str) -> None:
        self.depends = False
        self.arguments: dict[int, Arguments] = {}
        self._device_type = device_type
        self._before = _ambient(device_type)
        self._marked: set[int] = set()
        self._modes = ExitStack()
        self._alive: list[Tensor] = []  # else another storage might take the place of a marked one
        self.mark(inputs.values())

    def __enter__(self) -> Self:
        """Follow values through the operations inside."""
        self._modes.enter_context(_Operations(self))
        self._modes.enter_context(_HostReads(self))
        return self

    def __exit__(self, *_: object) -> None:
        self._modes.close()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Follow nothing inside, where a block computes."""
        self._modes.close()
        try:
            yield
        finally:
            self.__enter__()

    def mark(self, values: Any) -> None:
        """Mark tensors as dependent on values."""
        for leaf in tree_leaves(list(values)):
            if isinstance(leaf, Tensor):
                self._alive.append(leaf)
                self._marked.add(leaf.untyped_storage()._cdata)

    def is_marked(self, values: Any) -> bool:
        """Return whether a tensor among these depends on values."""
        return any(
            isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata in self._marked
            for leaf in tree_leaves(values)
        )

    def note(self, layer: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take the arguments of a block, without the tensors between blocks."""
        leaves = tree_leaves((args, kwargs))
        self.depends |= self.is_marked(leaves) or _ambient(self._device_type, own_modes=1) != self._before
        self.depends |= any(not isinstance(leaf, (Tensor, *_PLAIN)) for leaf in leaves)
        self.arguments[layer] = args, kwargs


def _ambient(device_type: str, own_modes: int = 0) -> tuple[object, ...]:
    """Return what a context that a model opens around its blocks may have changed."""
    return (
        torch.is_autocast_enabled(device_type),
        torch.get_autocast_dtype(device_type),
        torch.get_default_dtype(),
        torch._C._len_torch_function_stack() - own_modes,
        torch._C._get_flash_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(),
        torch._C._get_math_sdp_enabled(),
        torch._C._get_cudnn_sdp_enabled(),
    )


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not annotate it
    """Marks the results of operations on what is marked."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._recorder.is_marked((args, kwargs)):
            asks = func.namespace != "prim"  # prim.device is asked for of tensors without memory
            gives_tensors = any(isinstance(leaf, Tensor) for leaf in tree_leaves(result))
            if (asks and not gives_tensors) or not _SHOWS_VALUES.isdisjoint(func.tags):
                self._recorder.depends = True  # the host knows something of a value now
            self._recorder.mark([result, args, kwargs] if func._schema.is_mutable else [result])
        return result


_SHOWS_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}

_READ_BY_HOST: frozenset[Callable[..., Any]] = frozenset(
    (Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.data_ptr, Tensor.__dlpack__)
)


class _HostReads(TorchFunctionMode):
    """Notices what reads values past the dispatcher."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _READ_BY_HOST and self._recorder.is_marked(args):
            self._recorder.depends = True
        return func(*args, **(kwargs or {}))
