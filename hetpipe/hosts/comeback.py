"""Hosts that were lost and are here again, while the run goes on: they wait until the leader lets them in."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from cost_model.errors import InputError
from hetpipe.hosts.agreement import Facts, compare
from hetpipe.hosts.conversation import ALIVE_S, SILENT_S, Answer, Conversation
from hetpipe.trust.channel import Channel, ChannelError

NOT_YET = "the run has not begun to train"


@dataclass(slots=True)
class Member:
    """Another host, as the leader knows it."""

    facts: Facts
    conversation: Conversation
    answer: Answer | None = None
    done: bool = False


class Comebacks:
    """Who waits; every method that changes it is to be called with the lock of the leader.

    refusal: why nobody is let in, "" if hosts are.
    """

    def __init__(self, facts: Facts, changed: threading.Condition, tell: Callable[[str], None]) -> None:
        """Begin with nobody; facts: of the leader, which those of a host that comes back have to be like."""
        self.refusal = NOT_YET
        self._facts, self._changed, self._tell = facts, changed, tell
        self._waiting: dict[str, Member] = {}

    @property
    def nodes(self) -> frozenset[str]:
        """Return the names of the nodes that wait."""
        return frozenset(self._waiting)

    def wait_until_lost(self, channel: Channel, is_here: Callable[[], bool]) -> None:
        """Give the leader the time to notice that the launcher before, of the same node, is gone.

        One whose link was cut is not missed before it was silent for long.
        """
        end_s = time.monotonic() + SILENT_S + 2 * ALIVE_S
        while is_here() and time.monotonic() < end_s:
            with suppress(ChannelError):
                channel.send({"do": "alive"})
            with self._changed:
                self._changed.wait(ALIVE_S / 4)

    def refused(self, facts: Facts) -> str:
        """Return why a host is not let in again; "" if it is, and what may differ is told."""
        if self.refusal:
            return f"node {facts.node} was lost, and is not let in again: {self.refusal}"
        try:
            told = compare([self._facts, facts])
        except InputError as error:
            return str(error)
        for each in told:
            self._tell(each)
        return ""

    def add(self, member: Member) -> None:
        """Have a host wait, and say so on both sides."""
        self._waiting[member.facts.node] = member
        self._tell(f"node {member.conversation.name} is back; it joins at the next checkpoint")
        text = f"{member.facts.node} waits for the run to let it in: it joins at the next checkpoint"
        member.conversation.say("told", text=text)

    def lose(self, node: str) -> bool:
        """Forget a host that is gone again; return whether it was one that waited."""
        member = self._waiting.pop(node, None)
        if member is None:
            return False
        self._tell(f"node {member.conversation.name} is gone again")
        member.conversation.close()
        return True

    def take(self) -> dict[str, Member]:
        """Return who waits, by node; from now on they take part."""
        taken, self._waiting = self._waiting, {}
        return taken
