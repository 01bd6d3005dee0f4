"""What is asked of a device of any maker: its name, memory, events and streams. Loads torch.

CUDA, ROCm (which torch calls CUDA) and XPU answer alike, by the same names in their module of torch; Apple's
devices, which share the host's memory, have fewer and other ones. `cost_model.vendors` has what does not need
torch.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from cost_model.vendors import AMD, APPLE, INTEL, NVIDIA, Vendor

_ALIKE = ("cuda", "xpu")


class Event(Protocol):
    """The methods that are needed of a device's event."""

    def record(self) -> None: ...
    def synchronize(self) -> None: ...
    def elapsed_time(self, end_event: Any) -> float: ...


@dataclass(frozen=True, slots=True)
class MemoryFigures:
    """A device's memory, in bytes: what tensors have now and had at most, and what lies beyond them.

    reserved_bytes: of torch's allocator, with what it keeps to give out again; peak_: since `restart_peaks`.
    free_bytes: what the driver could still give to anybody.
    """

    allocated_bytes: float
    reserved_bytes: float
    peak_allocated_bytes: float
    peak_reserved_bytes: float
    free_bytes: float
    total_bytes: float

    @property
    def driver_bytes(self) -> float:
        """What is used and torch's allocator does not know: contexts, communicators, other processes."""
        return max(0.0, self.total_bytes - self.free_bytes - self.reserved_bytes)

    @property
    def attainable_bytes(self) -> float:
        """What torch's allocator has or could get."""
        return self.free_bytes + self.reserved_bytes


def vendor_here() -> Vendor | None:
    """Return who makes the devices that this torch was built for, if any is here."""
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return None
    if device.type == "cuda":
        return AMD if torch.version.hip else NVIDIA
    return {"xpu": INTEL, "mps": APPLE}.get(device.type)


def names_here() -> list[str]:
    """Return the name of each device that this torch sees, with its maker's."""
    vendor = vendor_here()
    if vendor is None:
        return []
    if vendor is APPLE:
        return [_with_maker(torch.backends.mps.get_name(), vendor)]
    module = _module(torch.device(vendor.device_type))
    properties = [module.get_device_properties(index) for index in range(module.device_count())]
    # ROCm knows no name of some cards, but what they are compiled for
    return [_with_maker(each.name or getattr(each, "gcnArchName", "GPU"), vendor) for each in properties]


def _with_maker(name: str, vendor: Vendor) -> str:
    """Return a name with the maker's, as "AMD Radeon RX 7900 XTX" has it and "Tesla T4" has not."""
    return name if vendor.name.lower() in name.lower() else f"{vendor.name} {name}"


def memory_figures(device: torch.device) -> MemoryFigures | None:
    """Return the memory of a device; None of the host's, and of what has no such figures."""
    module = _module(device)
    if device.type == "mps":
        total, reserved = module.recommended_max_memory(), module.driver_allocated_memory()
        allocated = module.current_allocated_memory()  # Metal tells no peaks
        return MemoryFigures(
            allocated, reserved, allocated, reserved, max(0.0, total - reserved), max(total, reserved)
        )
    if device.type == "cpu" or not hasattr(module, "mem_get_info"):
        return None
    free, total = module.mem_get_info(device)
    return MemoryFigures(
        module.memory_allocated(device),
        module.memory_reserved(device),
        module.max_memory_allocated(device),
        module.max_memory_reserved(device),
        free,
        total,
    )


def has_peaks(device: torch.device) -> bool:
    """Return whether the device's own figures tell the most that tensors had."""
    return device.type != "cpu" and hasattr(_module(device), "reset_peak_memory_stats")


def restart_peaks(device: torch.device) -> None:
    """Begin anew with what tensors had at most, where the device tells it."""
    if has_peaks(device):
        _module(device).reset_peak_memory_stats(device)


def empty_cache(device: torch.device) -> None:
    """Give back to the driver what torch's allocator keeps and no tensor needs."""
    if device.type != "cpu" and hasattr(_module(device), "empty_cache"):
        _module(device).empty_cache()


def has_events(device: torch.device) -> bool:
    """Return whether a device works on by itself, and its events tell when it was where."""
    return device.type in (*_ALIKE, "mps")


def new_event(device: torch.device) -> Event:
    """Return an event that tells times, of the device's current stream."""
    module = _module(device)
    event: Event = (module.event.Event if device.type == "mps" else module.Event)(enable_timing=True)
    return event


def synchronize(device: torch.device) -> None:
    """Wait until the device is done with all that it was given; the host always is."""
    if has_events(device):
        torch.accelerator.synchronize(device)


def synchronize_stream(device: torch.device) -> None:
    """Wait for the current stream alone: not for a receive that is posted on another one."""
    if device.type in _ALIKE:
        current_stream(device).synchronize()
    else:
        synchronize(device)


def has_streams(device: torch.device) -> bool:
    """Return whether a device's collectives and computations run on streams, beside each other."""
    return device.type in _ALIKE


def new_stream(device: torch.device, *, urgent: bool = False) -> Any:
    """Return another stream of a device that has streams; urgent: it goes before others where it can."""
    return _module(device).Stream(device, priority=-1 if urgent else 0)


def current_stream(device: torch.device) -> Any:
    """Return the stream on which what is handed in runs."""
    return _module(device).current_stream(device)


def on_stream(stream: Any, device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which work is given to a stream."""
    context: AbstractContextManager[Any] = _module(device).stream(stream)
    return context


def following(stream: Any, device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which work is given to a stream, after what the current one has been given."""
    stream.wait_stream(current_stream(device))
    return on_stream(stream, device)


def use(device: torch.device) -> None:
    """Make it the device of this process."""
    torch.accelerator.set_device_index(device.index)


def widest_float(device: torch.device) -> torch.dtype:
    """Return the most exact floating dtype of a device: Metal has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def pins(device: torch.device) -> bool:
    """Return whether copies from pinned memory of the host go on beside the work of host and device."""
    return device.type in _ALIKE


def _module(device: torch.device) -> Any:
    """Return torch's module of a type of device, such as torch.cuda."""
    return torch.get_device_module(device)
