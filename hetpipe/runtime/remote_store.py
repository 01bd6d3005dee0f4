"""The store at which the ranks of several hosts meet, reached over channels that prove the token.

torch's own store answers whoever connects. This one lives in the launcher that leads; each rank reaches it
over a `Channel`. It holds what torch's process groups ask of a store: addresses, and counters of barriers.
"""

import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, ClassVar

from torch._C._distributed_c10d import Store

from hetpipe.trust.channel import Address, Channel, ChannelError, connect

STORE = "store"
"""The purpose that a channel to the store names."""
MOST_KEYS = 1_000_000
_THAT_ADD_KEYS = ("set", "add", "compare")
_ANSWER_S = 30.0


class StoreServer:
    """The values of a run, and the answers to its ranks."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._channels: list[Channel] = []

    def serve(self, channel: Channel) -> None:
        """Answer one rank until it is gone, or asks what is no question; called in a thread of its own."""
        with self._changed:
            self._channels.append(channel)
        with suppress(ChannelError, LookupError, TypeError, ValueError):
            while True:
                message, blob = channel.receive()
                channel.send(*self._answer(message, blob))
        channel.close()

    def close(self) -> None:
        """End all connections; a rank that waits here gets an error."""
        with self._changed:
            channels, self._channels = self._channels, []
        for channel in channels:
            channel.close()

    def _answer(self, message: dict[str, Any], blob: bytes) -> tuple[dict[str, Any], bytes]:
        keys, wait_s = message["keys"], float(message.get("wait_s", 0.0))
        with self._changed:
            is_full = len(self._values) >= MOST_KEYS
            if is_full and message["do"] in _THAT_ADD_KEYS and keys[0] not in self._values:
                return {"ok": False}, b""
            match message["do"]:
                case "set":
                    self._values[keys[0]] = blob
                case "get":
                    if self._comes(keys, wait_s):
                        return {"ok": True}, self._values[keys[0]]
                    return {"ok": False}, b""
                case "wait":
                    return {"ok": self._comes(keys, wait_s)}, b""
                case "check":
                    return {"ok": all(key in self._values for key in keys)}, b""
                case "add":
                    total = int(self._values.get(keys[0], b"0")) + int(message["amount"])
                    self._values[keys[0]] = str(total).encode()
                    self._changed.notify_all()
                    return {"ok": True, "total": total}, b""
                case "compare":
                    expected, desired = blob[: message["cut"]], blob[message["cut"] :]
                    found = self._values.get(keys[0])
                    if found == expected or (found is None and not expected):
                        self._values[keys[0]] = desired
                        self._changed.notify_all()
                    return {"ok": True}, self._values.get(keys[0], expected)
                case "delete":
                    return {"ok": self._values.pop(keys[0], None) is not None}, b""
                case "count":
                    return {"ok": True, "total": len(self._values)}, b""
                case _:
                    return {"ok": False}, b""
            self._changed.notify_all()
            return {"ok": True}, b""

    def _comes(self, keys: list[str], wait_s: float) -> bool:
        return self._changed.wait_for(lambda: all(key in self._values for key in keys), wait_s)


class RemoteStore(Store):
    """The end of a rank: what torch asks, one question at a time.

    A wait for a key is asked in pieces, so that other threads of the rank get their turn.

    NOTE: torch keeps the half in C++ alone, which finds no method once this one is collected; so it is kept
    here until it is closed.
    """

    PIECE_S = 0.2
    _open: ClassVar[set["RemoteStore"]] = set()

    def __init__(self, address: Address, token: bytes, timeout_s: float) -> None:
        super().__init__()
        self._channel = connect(address, token, timeout_s, "the leader")
        self._channel.send({"purpose": STORE})
        self._asking = threading.Lock()
        self._timeout_s = timeout_s
        self._open.add(self)

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", [key], _as_bytes(value))

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._ask("get", [key])[1]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        wait_s = self._timeout_s if timeout is None else timeout.total_seconds()
        end_s = time.monotonic() + wait_s
        while not self._ask("wait", keys, wait_s=self.PIECE_S)[0]["ok"]:
            if time.monotonic() > end_s:
                raise ChannelError(f"nobody gave {', '.join(keys)} within {wait_s:.3g} s")

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask("check", keys)[0]["ok"])

    def add(self, key: str, amount: int) -> int:
        return int(self._ask("add", [key], amount=amount)[0]["total"])

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        first, second = _as_bytes(expected), _as_bytes(desired)
        return self._ask("compare", [key], first + second, cut=len(first))[1]

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete", [key])[0]["ok"])

    def num_keys(self) -> int:
        return int(self._ask("count", [])[0]["total"])

    def close(self) -> None:
        """End the connection."""
        self._channel.close()
        self._open.discard(self)

    def _ask(self, do: str, keys: list[str], blob: bytes = b"", **rest: Any) -> tuple[dict[str, Any], bytes]:
        with self._asking:
            self._channel.send({"do": do, "keys": keys, **rest}, blob)
            answer, found = self._channel.receive(_ANSWER_S)
        if do in _THAT_ADD_KEYS and not answer["ok"]:
            raise ChannelError(f"the leader holds {MOST_KEYS:,} keys, and takes no more")
        return answer, found


@dataclass(frozen=True, slots=True)
class LeadersStore:
    """Opens, in a rank, the store of the launcher that leads (`RankGroup.store`)."""

    address: Address
    token: bytes = field(repr=False)
    timeout_s: float

    def __call__(self, world: int) -> RemoteStore:
        return RemoteStore(self.address, self.token, self.timeout_s)


def _as_bytes(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode()
