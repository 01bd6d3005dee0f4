"""The messages and sums that pass through the host's memory: those of GPUs and CPUs together."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from cost_model.cluster import Device, is_emulated
from cost_model.errors import InputError
from cost_model.vendors import NVIDIA, VENDORS, Vendor, vendor_of
from hetpipe.runtime.accelerators import pins, widest_float

ON_HOST = "gloo"
TIMES = 3
"""How much longer than the executor a collective between devices waits; then its library ends the process."""


@dataclass(frozen=True, slots=True)
class Staging:
    """The ranks that are on GPUs, and so what passes through the host; on_gpu: by rank.

    Ranks on GPUs of one maker meet over its library: NCCL, RCCL, XCCL. Where a CPU takes part, or makers
    differ, or theirs has no library (Apple), all meet over gloo, on the host, and those on GPUs copy what
    they give and get.

    makers: by rank, of those on GPUs, None of others; () where all GPUs are NVIDIA's.
    """

    on_gpu: tuple[bool, ...]
    makers: tuple[Vendor | None, ...] = ()

    @classmethod
    def of(cls, devices: Sequence[Device]) -> "Staging":
        """Return the staging of ranks with these devices.

        Raises: InputError for GPUs beside emulated devices.
        """
        kinds = {device.kind for device in devices}
        if any(map(is_emulated, kinds)) and any(device.is_gpu for device in devices):
            raise InputError(
                f"the plan mixes GPUs with emulated devices ({', '.join(sorted(kinds))}), whose seconds are "
                "made up; leave one of them out with --exclude"
            )
        return cls(
            tuple(device.is_gpu for device in devices), tuple(vendor_of(device.kind) for device in devices)
        )

    @property
    def backend(self) -> str:
        """Return the backend of the default process group: "cpu:gloo,cuda:nccl", for one."""
        makers = dict.fromkeys(self._maker(rank) for rank in range(len(self.on_gpu)))
        parts = dict.fromkeys(f"{one.device_type}:{one.backend}" for one in makers if one and one.backend)
        return ",".join((f"cpu:{ON_HOST}", *parts)) if parts else ON_HOST

    def on_host(self, ranks: Iterable[int]) -> bool:
        """Return whether these ranks meet on the host."""
        makers = [self._maker(rank) for rank in ranks]
        libraries = {None if maker is None else maker.library for maker in makers}
        return None in libraries or len(libraries) > 1

    def _maker(self, rank: int) -> Vendor | None:
        if not self.on_gpu[rank]:
            return None
        return self.makers[rank] if self.makers else NVIDIA

    def copies(self, rank: int, ranks: Iterable[int]) -> bool:
        """Return whether a rank copies what it exchanges with these ranks, one of which it is."""
        return self.on_gpu[rank] and self.on_host(ranks)

    def in_streams(self, ranks: Iterable[int]) -> bool:
        """Return whether these ranks sum over NCCL or its kin, whose sums wait for each other on the GPU."""
        return not self.on_host(ranks) and _between_devices()

    def new_group(
        self, ranks: Sequence[int], timeout: timedelta, *, on_host: bool = False, urgent: bool = False
    ) -> dist.ProcessGroup:
        """Open a process group; on all ranks together, members or not.

        ranks: in the order in which a ring goes over them. on_host: GPUs alone meet on the host too, in a sum
        of which others are no GPUs. urgent: between GPUs it goes before computations and sums, where a GPU
        has both to begin.

        Between GPUs it has more time: NCCL ends the process then, and counts from when something is handed
        in, while the executor, which knows what it waits for, counts from when it waits.
        """
        if on_host or self.on_host(ranks):
            group: dist.ProcessGroup = dist.new_group(
                list(ranks), timeout=timeout, backend="gloo", sort_ranks=False
            )
        else:
            limit = (TIMES if _between_devices() else 1) * timeout
            options = _urgent(limit) if urgent and "nccl" in dist.get_backend_config() else None
            group = dist.new_group(list(ranks), timeout=limit, sort_ranks=False, pg_options=options)
        return group


def _between_devices() -> bool:
    """Return whether the default group has a library for messages between devices."""
    return any(vendor.backend in dist.get_backend_config() for vendor in VENDORS if vendor.backend)


def _urgent(timeout: timedelta) -> object:
    """Return the options of a group of NCCL whose stream has priority."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout
    return options


def room_on_host(buffer: Tensor) -> Tensor:
    """Return memory of the host for a copy of a tensor, pinned where that makes the copy faster."""
    return torch.empty_like(buffer, device="cpu", pin_memory=pins(buffer.device))


def numbers_on_host(*values: Tensor) -> list[float]:
    """Return scalars that may be on a device, for all of which the host waits once."""
    place = next((value.device for value in values if not value.is_cpu), torch.device("cpu"))
    together = torch.stack([value.to(widest_float(place)).to(place, non_blocking=True) for value in values])
    found: list[float] = together.cpu().tolist()
    return found
