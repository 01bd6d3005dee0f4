"""What drivers of GPUs take of their memory, as planned and as measured, for people."""

from collections.abc import Iterable

from cost_model.cluster import Device
from cost_model.units import format_bytes
from hetpipe.runs.run_report import RunReport


def driver_sentences(devices: Iterable[Device]) -> list[str]:
    """Say what is kept for the drivers of GPUs, beside the reserve; [] where nothing is."""
    kept = dict.fromkeys((device.kind, device.driver_bytes) for device in devices if device.driver_bytes)
    if not kept:
        return []
    named = ", ".join(f"{format_bytes(num_bytes)} on each {kind}" for kind, num_bytes in kept)
    return [f"kept for the driver, contexts and communicators: {named}"]


def beyond_tensors(report: RunReport) -> list[tuple[str, str, str, str]]:
    """Return a row for each device that tells it: name, reserved bytes, the driver's planned and measured."""
    return [
        (
            name,
            format_bytes(found.reserved_bytes or 0.0),
            format_bytes(found.planned_driver_bytes),
            format_bytes(found.driver_bytes),
        )
        for name, found in report.devices.items()
        if found.driver_bytes is not None
    ]
