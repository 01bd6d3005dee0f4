"""What a rank knows after a step, and how other ranks are told of it."""

from dataclasses import dataclass, fields
from typing import Any

from hetpipe.program.trace import Event, events_of_json


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """The knowledge of a rank after a step: all ranks' loss and gradient norm, its own times and events.

    start_s and end_s are read off the host's clock when the rank really starts and ends. Events are on the
    device's clock, which is the host's but for emulated devices (`EmulatedPace`) and GPUs (`GpuPace`); a
    message lasts from its dispatch to its due time on the emulated link. host_events: the same on the host's
    clock where the device is emulated, () elsewhere. loss_scale: of this step, None where
    losses are not scaled; loss and norm are without it.
    """

    loss: float
    gradient_norm: float
    finite: bool
    loss_scale: float | None
    start_s: float
    end_s: float
    busy_s: float
    over_budget_s: float
    events: tuple[Event, ...]
    host_events: tuple[Event, ...] = ()

    @property
    def measured_events(self) -> tuple[Event, ...]:
        """The events on the host's clock, whatever the device's."""
        return self.host_events or self.events

    def to_json(self) -> dict[str, Any]:
        plain = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return plain | {
            name: [event.to_json() for event in getattr(self, name)] for name in ("events", "host_events")
        }

    @classmethod
    def of_json(cls, data: dict[str, Any]) -> "StepOutcome":
        """Return the outcome that `to_json` was made of."""
        return cls(**data | {name: events_of_json(data[name]) for name in ("events", "host_events")})
