"""The bytes of live tensors, counted operation by operation, with an emulated device's limit."""

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cost_model.cluster import Device, is_emulated


class ByteCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not annotate it
    """A count of the bytes of all tensors made while it is active; owns the count.

    A tensor counts from the operation that makes its storage until the storage dies. Costs about a tenth of
    the CPU time, so it runs in the first step only. What existed before is added by `add`.

    cap_bytes: exceeding it raises torch.OutOfMemoryError, as a device of that memory would.
    """

    def __init__(self, cap_bytes: float = float("inf"), name: str = "device") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cap_bytes = cap_bytes
        self.name = name
        self.live_bytes = 0
        self.peak_bytes = 0
        self._known: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.add(leaf)
        return result

    def add(self, tensor: torch.Tensor) -> None:
        """Count the tensor's storage, unless it is known."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        self._take(storage, storage.nbytes())

    def leave_out(self, tensor: torch.Tensor) -> None:
        """Never count the tensor's storage: it is memory of the host."""
        self._take(tensor.untyped_storage(), 0)

    def _take(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        key = storage._cdata
        self._known[key] = num_bytes
        weakref.finalize(storage, self._release, key)
        self.live_bytes += num_bytes
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes = self.live_bytes
        if self.live_bytes > self.cap_bytes:
            raise torch.OutOfMemoryError(
                f"{self.name}: {self.live_bytes:,} bytes are needed, the device has {self.cap_bytes:,.0f}"
            )

    def _release(self, key: int) -> None:
        self.live_bytes -= self._known.pop(key)

    def restart_peak(self) -> int:
        """Return the peak since the last call, and begin a new one at what is alive now."""
        peak, self.peak_bytes = self.peak_bytes, self.live_bytes
        return peak


def counter_on(
    device: Device, held: Iterable[torch.Tensor], on_host: Iterable[torch.Tensor] = ()
) -> ByteCounter | None:
    """Return a counter for a device, of what it holds already; None for a GPU, which counts itself.

    on_host: tensors that are the host's, and never count.
    """
    if device.is_gpu:
        return None
    counter = ByteCounter(device.memory_bytes if is_emulated(device.kind) else float("inf"), device.name)
    for tensor in held:
        counter.add(tensor)
    for tensor in on_host:
        counter.leave_out(tensor)
    return counter
