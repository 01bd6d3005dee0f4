"""A device made of Python: its tensors say that they are on "sim" and hold one of the CPU each.

Host and device never meet silently, and every wait of the host is counted. Registered with torch's hooks for
backends in Python (PrivateUse1, experimental in torch 2.13), for good: import it in a process of its own
(`run_ranks`). Tensors are wrapper subclasses, so views, strides and autograd are torch's.
"""

import time
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)


class SimModule(_DummyBackendModule):  # type: ignore[misc]
    """Its memory, asked as of torch.cuda; torch's allocator here keeps nothing to give out again."""

    def mem_get_info(self, _: object = None) -> tuple[float, float]:
        return SIM.capacity_bytes - SIM.driver_bytes - SIM.live_bytes, SIM.capacity_bytes

    def memory_allocated(self, _: object = None) -> int:
        return SIM.live_bytes

    def max_memory_allocated(self, _: object = None) -> int:
        return SIM.peak_bytes

    def reset_peak_memory_stats(self, _: object = None) -> None:
        SIM.peak_bytes = SIM.live_bytes

    memory_reserved, max_memory_reserved = memory_allocated, max_memory_allocated


_setup_privateuseone_for_python_backend("sim", backend_module=SimModule())
torch.__future__.set_overwrite_module_params_on_conversion(True)

DEVICE = torch.device("sim", 0)
WAITS, OPERATIONS, TO_HOST, FROM_HOST = "waits", "operations", "to host", "from host"
aten = torch.ops.aten


class Sim:
    """What the device did since `restart`, and its memory; there is one device.

    capacity_bytes: what may be allocated at once, with driver_bytes, which no tensor has. where: who waited,
    by the innermost function of hetpipe.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.live_bytes = self.peak_bytes = 0
        self.capacity_bytes, self.driver_bytes = 2.0**40, 0.0
        self._held: Counter[int] = Counter()

    def restart(self) -> None:
        self.counts.clear()
        self.peak_bytes = self.live_bytes

    def take(self, raw: torch.Tensor) -> None:
        """Note the memory of a tensor, once for all of its views.

        Raises: torch.OutOfMemoryError if the device has less left.
        """
        storage = raw.untyped_storage()
        key, size = storage.data_ptr(), storage.nbytes()
        if not key:
            return
        if not self._held[key]:
            if self.live_bytes + size > self.capacity_bytes - self.driver_bytes:
                raise torch.OutOfMemoryError(
                    f"sim: {size} bytes do not fit beside {self.live_bytes} of {self.capacity_bytes}"
                )
            self.live_bytes += size
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self._held[key] += 1
        weakref.finalize(raw, self._release, key, size)

    def _release(self, key: int, size: int) -> None:
        self._held[key] -= 1
        if not self._held[key]:
            self.live_bytes -= size


SIM = Sim()


class SimTensor(torch.Tensor):
    """A tensor of the device; raw: the one of the CPU that it holds."""

    raw: torch.Tensor

    @staticmethod
    def __new__(cls, raw: torch.Tensor) -> "SimTensor":
        made: SimTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, raw.shape, strides=raw.stride(), storage_offset=raw.storage_offset(), dtype=raw.dtype,
            device=DEVICE, requires_grad=False,
        )  # fmt: skip
        return made

    def __init__(self, raw: torch.Tensor) -> None:
        SIM.take(raw)
        self.raw = raw

    def __repr__(self, **_: Any) -> str:
        return f"SimTensor({self.raw})"

    @classmethod
    def __torch_dispatch__(
        cls, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        SIM.counts[OPERATIONS] += 1
        if torch.Tag.data_dependent_output in op.tags or torch.Tag.dynamic_output_shape in op.tags:
            SIM.counts[WAITS] += 1
        if op is aten._to_copy.default:
            return _copied(op, args[0], kwargs)
        if op is aten.copy_.default:
            return _copied_into(*args, **kwargs)
        leaves = tree_leaves((args, kwargs))
        if any(_is_of_host(leaf) and leaf.dim() for leaf in leaves):
            raise RuntimeError(f"{op}: tensors of the host and of the device in one operation")
        known = {id(leaf.raw): leaf for leaf in leaves if isinstance(leaf, SimTensor)}
        result = op(*tree_map(_here, args), **tree_map(_here, kwargs))
        return tree_map(lambda value: known.get(id(value), _there(value)), result)


def _is_of_host(value: object) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, SimTensor)


def _here(value: Any) -> Any:
    if isinstance(value, SimTensor):
        return value.raw
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == "sim" else value


def _there(value: Any) -> Any:
    return SimTensor(value) if isinstance(value, torch.Tensor) else value


def _copied(op: Any, source: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    assert isinstance(source, SimTensor)
    to = torch.device(options.pop("device", None) or source.device)
    raw: torch.Tensor = op(source.raw, **options)
    if to.type == "sim":
        return SimTensor(raw)
    SIM.counts[TO_HOST] += 1
    SIM.counts[WAITS] += not options.get("non_blocking", False)
    return raw


def _copied_into(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    SIM.counts[FROM_HOST] += _is_of_host(source)
    SIM.counts[TO_HOST] += _is_of_host(target)
    SIM.counts[WAITS] += not non_blocking and (_is_of_host(target) or _is_of_host(source))
    _here(target).copy_(_here(source))
    return target


def _made(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Make a tensor where no argument is of the device: by a factory, or as a copy from the host."""
    kwargs.pop("device", None), kwargs.pop("pin_memory", None)
    SIM.counts[OPERATIONS] += 1
    if args and isinstance(args[0], torch.Tensor):
        SIM.counts[FROM_HOST] += 1
        SIM.counts[WAITS] += not kwargs.get("non_blocking", False)
    place = {"device": "cpu"} if any(each.name == "device" for each in op._schema.arguments) else {}
    return _there(op(*args, **place, **kwargs))


_FALLBACK = torch.library.Library("_", "IMPL")
_FALLBACK.fallback(_made, "PrivateUse1")


class SimEvent:
    """A timed event of the device's only stream, on which all is done at once."""

    waits = 0

    def record(self) -> None:
        self._when_s = time.monotonic()

    def synchronize(self) -> None:
        SimEvent.waits += 1

    def elapsed_time(self, end_event: "SimEvent") -> float:
        return 1e3 * (end_event._when_s - self._when_s)


def waits_in(work: Callable[[], object]) -> int:
    """Return how often the host waits for the device in a piece of work."""
    SIM.restart()
    work()
    return SIM.counts[WAITS]
