"""How two launchers talk: each says every second that it is alive, and who is silent for too long is lost."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from hetpipe.trust.channel import Channel, ChannelError

ALIVE_S = 1.0
"""So often each side says that it is alive."""
SILENT_S = 8.0
"""Who has said nothing for so long is lost: hung, stopped, or behind a link that is cut."""

MEMBER = "member"
"""The purpose that the channel of a launcher which follows names."""

Message = dict[str, Any]
Answer = tuple[Message, bytes]


class Conversation:
    """A channel whose messages are taken in a thread of its own, until the other side is lost or done.

    Owns the channel. heard_s: when the other side has last said something, on the monotonic clock.
    """

    def __init__(
        self,
        channel: Channel,
        name: str,
        on_message: Callable[[Message, bytes], None],
        on_lost: Callable[[str], None],
    ) -> None:
        """Begin to listen; on_lost: told, once, how the other side was lost. name: of it, for messages."""
        self.name, self.channel = name, channel
        self._on_message, self._on_lost = on_message, on_lost
        self.heard_s = time.monotonic()
        self._closed = threading.Event()
        threading.Thread(target=self._listen, daemon=True, name=f"from {name}").start()
        threading.Thread(target=self._stay_alive, daemon=True, name=f"alive to {name}").start()

    def say(self, what: str, blob: bytes = b"", **rest: Any) -> None:
        """Send a message; that the other side is gone is told to `on_lost` alone."""
        with suppress(ChannelError):
            self.channel.send({"do": what, **rest}, blob)

    def close(self) -> None:
        """End the conversation: nobody is lost any more."""
        self._closed.set()
        self.channel.close()

    def _listen(self) -> None:
        while True:
            try:
                message, blob = self.channel.receive(SILENT_S)
            except ChannelError as error:
                if not self._closed.is_set():
                    self._on_lost(str(error))
                return
            self.heard_s = time.monotonic()
            if message.get("do") != "alive":
                self._on_message(message, blob)

    def _stay_alive(self) -> None:
        while not self._closed.wait(ALIVE_S):
            self.say("alive")
