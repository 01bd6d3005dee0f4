"""When chosen messages of a step were sent, and when they came."""

from dataclasses import dataclass, field

from hetpipe.program.instructions import Message

WAITED_S = 2e-4
"""A receiver that waited less may have come after the message, so that nobody knows when that came."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """When a receive was posted, when its message was here, and whether the receiver had waited for it."""

    posted_s: float
    came_s: float
    waited: bool


@dataclass(slots=True)
class MessageTimes:
    """The moments of the messages in `watched`, on the monotonic clock; those of the last step.

    sent: when one was handed to torch.
    """

    watched: frozenset[Message] = frozenset()
    sent: dict[Message, float] = field(default_factory=dict)
    arrived: dict[Message, Arrival] = field(default_factory=dict)

    def has_come(self, message: Message, posted_s: float, began_s: float, came_s: float) -> None:
        """Note that a message is here; began_s: when its receiver began to wait."""
        if message in self.watched:
            self.arrived[message] = Arrival(posted_s, came_s, came_s - began_s > WAITED_S)
