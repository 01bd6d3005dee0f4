"""What `torch.sim` offers, by the names that `torch.cuda` has."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any

import torch

import sim_streams
from sim_memory import Memory
from sim_streams import CURRENT, Event, Stream

KINDS = ("Sim-A", "Sim-B")
"""The names of the devices, of which a cluster file may make two kinds."""


class SimModule:
    """The devices as torch's module for them, of which it asks some."""

    Event = Event

    def __init__(self, memories: Sequence[Memory], waits: Sequence[Callable[[], None]]) -> None:
        self._memories, self._waits = memories, waits

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        """Do nothing: there are no generators."""

    def device_count(self) -> int:
        return len(self._memories)

    def current_device(self) -> int:
        return CURRENT.device

    def set_device(self, device: Any) -> None:
        CURRENT.device = self.index_of(device)

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        before, CURRENT.device = CURRENT.device, self.index_of(device)
        try:
            yield
        finally:
            CURRENT.device = before

    def index_of(self, device: Any) -> int:
        if isinstance(device, int):
            return device
        index = None if device is None else torch.device(device).index
        return CURRENT.device if index is None else index

    def Stream(self, device: Any = None, priority: int = 0) -> Stream:  # noqa: N802  # as torch.cuda calls it
        del priority
        return Stream(self.index_of(device))

    def current_stream(self, device: Any = None) -> Stream:
        return sim_streams.current_stream(self.index_of(device))

    def stream(self, chosen: Stream) -> AbstractContextManager[None]:
        return sim_streams.stream(chosen)

    def synchronize(self, device: Any = None) -> None:
        sim_streams.synchronize(self.index_of(device))

    def get_device_properties(self, device: Any = None) -> SimpleNamespace:
        index = self.index_of(device)
        return SimpleNamespace(name=KINDS[index], total_memory=self._memories[index].capacity_bytes)

    def memory_allocated(self, device: Any = None) -> int:
        return self._memories[self.index_of(device)].live_bytes

    def max_memory_allocated(self, device: Any = None) -> int:
        return self._memories[self.index_of(device)].peak_bytes

    def memory_reserved(self, device: Any = None) -> int:
        return self._memories[self.index_of(device)].reserved_bytes

    def max_memory_reserved(self, device: Any = None) -> int:
        return self._memories[self.index_of(device)].peak_reserved_bytes

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        self._memories[self.index_of(device)].restart()

    def mem_get_info(self, device: Any = None) -> tuple[float, float]:
        memory = self._memories[self.index_of(device)]
        used = memory.driver_bytes + memory.reserved_bytes
        return memory.capacity_bytes - used, memory.capacity_bytes

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        memory = self._memories[self.index_of(device)]
        return {"num_alloc_retries": memory.num_retries, "num_ooms": memory.num_refused}

    def empty_cache(self) -> None:
        self._waits[CURRENT.device]()
        for memory in self._memories:
            memory.give_back()
