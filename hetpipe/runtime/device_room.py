"""Whether a plan fits a real device, once its driver has taken what it takes."""

import math

import torch

from cost_model.cluster import Device
from cost_model.errors import InfeasibleError
from hetpipe.runtime.accelerators import memory_figures


def check_room(device: Device, place: torch.device, need_bytes: float) -> float | None:
    """Return what is used of a device and torch's allocator does not know; None where no figures are.

    Asked after the stages have run once and all communicators are open, before the first step: then the
    driver has taken what it takes. Other processes count too.

    need_bytes: what the plan needs on it.

    Raises: InfeasibleError if the plan does not fit beside it.
    """
    figures = memory_figures(place)
    if figures is None:
        return None
    missing = need_bytes - figures.attainable_bytes
    if missing > 0:
        mib = math.ceil(figures.driver_bytes / 2**20)
        raise InfeasibleError(
            f"{device.name!r}: contexts, communicators and other processes take {figures.driver_bytes:,.0f} "
            f"of its {figures.total_bytes:,.0f} bytes, {device.driver_bytes:,.0f} were planned; the plan "
            f"needs {need_bytes:,.0f}, {math.ceil(missing):,} bytes are missing: give the device "
            f'driver_memory = "{mib} MiB" in the cluster file, and plan again',
            device=device.name,
            missing_bytes=missing,
        )
    return figures.driver_bytes
