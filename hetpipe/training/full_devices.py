"""A device whose memory did not hold what the plan put there: what is said of it, and what it may hold."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cost_model.units import format_bytes
from hetpipe.simulation.prediction import Prediction
from partition.plan import Plan

SMALLER = 0.8
"""What a device is planned with, once it was full, of what it had been planned with."""


@dataclass(frozen=True, slots=True)
class FullDevice:
    """A device that was full. place: the stages and layers there; need_bytes: of the plan."""

    name: str
    place: str
    need_bytes: float
    usable_bytes: float
    memory_bytes: float

    @classmethod
    def of(cls, prediction: Prediction, report: Mapping[str, Any]) -> "FullDevice | None":
        """Return the device that an event of a rank's error says was full; None if it is another error.

        What the kernel killed for want of the host's memory was full where that is the device's.
        """
        names, rank = prediction.program.device_names, int(report["rank"])
        if not report.get("full") or not 0 <= rank < len(names):
            return None
        device = prediction.costs.devices[rank]
        if not report["type"] and device.is_gpu:
            return None
        return cls(
            device.name,
            _place(prediction.program.plan, device.name),
            prediction.costs.memory_bytes(rank),
            device.usable_bytes,
            device.memory_bytes,
        )

    @property
    def room_bytes(self) -> float:
        """The bytes that it is to be planned with from now on."""
        return SMALLER * min(self.need_bytes, self.usable_bytes)

    @property
    def words(self) -> str:
        """Say what was planned there, and what there is."""
        return (
            f"{self.place} on {self.name} was planned with {self.need_bytes:,.0f} bytes of its "
            f"{self.memory_bytes:,.0f} bytes, of which a plan may fill {self.usable_bytes:,.0f} bytes"
        )

    @property
    def remedy(self) -> str:
        """Say what the user can do."""
        return (
            f'give {self.name} less in the cluster file (memory = "{format_bytes(self.room_bytes)}"), a '
            f"smaller --global-batch-size or --sequence-length, or leave it out: --exclude {self.name}"
        )


def _place(plan: Plan, device: str) -> str:
    """Return what runs on a device: "stage 1, layers 3 to 5", and its pipeline where there are several."""
    places, layers = plan.places[device], plan.layers_of(device)
    several = len(plan.pipelines) > 1
    stages = ", ".join(
        f"stage {stage} of pipeline {pipeline}" if several else f"stage {stage}" for pipeline, stage in places
    )
    words = f"layers {layers[0]} to {layers[-1]}" if len(layers) > 1 else f"layer {layers[0]}"
    return f"{stages}, {words},"
