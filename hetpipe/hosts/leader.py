"""The launcher that leads: it waits for the others, compares them with itself, and has them do their part."""

import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from cost_model.cluster import Device
from cost_model.errors import InputError
from hetpipe.hosts.agreement import Facts, compare
from hetpipe.hosts.comeback import Comebacks, Member
from hetpipe.hosts.conversation import MEMBER, Answer, Conversation, Message
from hetpipe.hosts.interruption import Interrupted, Interruption
from hetpipe.hosts.job import Job
from hetpipe.hosts.leader_store import LeaderStore
from hetpipe.hosts.own_interface import interface_of
from hetpipe.hosts.verdict import alarm_of, error_in, error_of, found_in, placed, verdict_of
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.settings import read_settings
from hetpipe.runtime.processes import Emit, RankGroup, run_ranks
from hetpipe.trust.channel import Address, Channel, Listener, listening_socket

if TYPE_CHECKING:
    from hetpipe.runtime.remote_store import StoreServer
    from hetpipe.runtime.stopping import Stopping

T = TypeVar("T")

FIRST_WORD_S = 10.0
LOOK_S = 0.5
CLOSING_S = 3.0
"""So long may other launchers take to close their channels."""
ENDING_S = 30.0
"""So long may the ranks of other hosts take to end after those here."""


class Leader:
    """The other hosts of a run; owns the listener, their channels, and the store of the ranks.

    A context: what ends it, an error or a signal, ends the launchers of all hosts in the same way.
    """

    def __init__(
        self, facts: Facts, nodes: Sequence[str], address: Address, token: bytes, tell: Callable[[str], None]
    ) -> None:
        """Prepare; nobody is listened to before the context is entered.

        nodes: the names of those that take part, this one among them. tell: takes sentences for the user.
        """
        self.facts, self.tell = facts, tell
        self._nodes = self._others = tuple(name for name in nodes if name != facts.node)
        self._address, self.token = address, token
        self._members: dict[str, Member] = {}
        self._changed = threading.Condition()
        self._back = Comebacks(facts, self._changed, tell)
        self._failures: list[dict[str, Any]] = []
        self._alarm: Connection | None = None
        self._stopping: Stopping | None = None
        self._store: StoreServer | None = None
        self._attempt = -1
        self._interruption = Interruption()
        self._closed = False
        self._known: set[str] = set()  # who has ever come
        self._settling = False  # who is lost now is left out of the next attempt
        self._between = False  # two attempts: who is lost now ends the next one

    def __enter__(self) -> Self:
        self._listener = Listener(listening_socket(self._address), self.token, self._take)
        self._interruption.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._interruption.end()
        with self._changed:
            self._closed = True
            self._members |= self._back.take()
        if isinstance(error, Interrupted):
            error = error_in(self._failures[0])
        for member in list(self._members.values()):
            if error is None:
                member.conversation.say("end")
            else:
                member.conversation.say("abort", verdict=verdict_of(error))
        with self._changed:  # who closes first may lose what is on its way
            end_s = time.monotonic() + CLOSING_S
            while self._members and time.monotonic() < end_s:
                self._changed.wait(LOOK_S)
        for member in list(self._members.values()):
            member.conversation.close()
        self._listener.close()
        if kind is Interrupted and error is not None:
            raise error from None

    @property
    def address(self) -> Address:
        """Return the number and port on which others are listened to."""
        return self._listener.address

    @property
    def others(self) -> tuple[str, ...]:
        """Return the names of the other nodes that take part."""
        return self._others

    def ended(self, node: str, how: str) -> bool:
        """Hear that the launcher of a node has ended; return whether one that comes back is let in.

        Where it had never come, nobody waits for it.
        """
        if node not in self._known:
            self._fail(alarm_of({"type": "InputError", "text": how}))
            return False
        return not (self._back.refusal or self._closed)

    def gather(self, wait_s: float) -> None:
        """Wait for all nodes, and compare them with this one.

        Raises: InputError if one does not come in time, or what has to be alike is not.
        """
        end_s, said = time.monotonic() + wait_s, ""
        with self._changed:
            while missing := [name for name in self._others if name not in self._members]:
                here = len(self._others) + 1 - len(missing)
                text = f"waiting for {', '.join(missing)} ({here} of {len(self._others) + 1} nodes are here)"
                if text != said:
                    self.tell(text)
                    said = text
                if time.monotonic() > end_s:
                    raise InputError(
                        f"{', '.join(missing)} did not come within {wait_s:.4g} s; start the same line "
                        "there, or leave the node out with --exclude"
                    )
                self._changed.wait(LOOK_S)
                self._check()
        found = [self._members[name].facts for name in self._others]
        for told in compare([self.facts, *found]):
            self.tell(told)

    def ask(
        self, question: str, nodes: Sequence[str], meanwhile: Callable[[], T], **rest: Any
    ) -> tuple[T, dict[str, Answer]]:
        """Have some nodes answer a question; return what is done here meanwhile, and their answers by name.

        Raises: what one of them raises.
        """
        asked = [self._members[name] for name in nodes if name in self._members]
        for member in asked:
            member.answer = None
            member.conversation.say("ask", question=question, **rest)
        own = meanwhile()
        with self._changed:
            self._check()  # also where all have answered by now
            while any(member.answer is None for member in asked):
                self._changed.wait(LOOK_S)
                self._check()
        return own, {member.facts.node: member.answer for member in asked if member.answer is not None}

    @property
    def hosts(self) -> dict[str, str]:
        """Return what hosts are called, with their addresses, by node."""
        found = {name: member.conversation.name for name, member in self._members.items()}
        return {**found, self.facts.node: f"{self.facts.host} {self.address[0]}"}

    @contextmanager
    def store_served(self) -> Iterator[None]:
        """Serve a new store for ranks of all hosts to meet at, meanwhile."""
        from hetpipe.runtime.remote_store import StoreServer

        self._store = StoreServer()
        try:
            yield
        finally:
            self._store.close()
            self._store = None

    def local(self, devices: Sequence[Device]) -> tuple[int, ...]:
        """Return which ranks this host starts.

        Raises: InputError if the plan uses no device here: who leads also reports.
        """
        found = tuple(rank for rank, device in enumerate(devices) if device.node == self.facts.node)
        if not found:
            others = list(dict.fromkeys(device.node for device in devices))
            raise InputError(
                f"the plan uses no device of {self.facts.node}, which leads; let --rendezvous name one of "
                f"{', '.join(others)}"
            )
        return found

    def missing(self, devices: Sequence[Device]) -> frozenset[str]:
        """Return the names of devices whose hosts are gone, once each other host has answered or is lost."""
        with self._changed:
            self._settling, asked = True, list(self._members.values())
            for member in asked:
                member.answer = None
        for member in asked:
            member.conversation.say("ask", question="there")
        end_s = time.monotonic() + ENDING_S
        with self._changed:
            while waited := [found for found in self._members.values() if found.answer is None]:
                if time.monotonic() > end_s:  # it is there, and does nothing
                    break
                self._changed.wait(LOOK_S)
            self._settling, self._failures = False, []
            here = {self.facts.node, *self._members} - {found.facts.node for found in waited}
        gone = {node for node in self._nodes if node not in here}
        return frozenset(device.name for device in devices if device.node in gone)

    def take_back(self, refusal: str) -> None:
        """From now on let in who was lost and is here again; refusal: why nobody is, "" if they are.

        And who is lost from now on ends the attempt that follows, not the run.
        """
        with self._changed:
            self._back.refusal, self._between = refusal, True

    def waiting(self) -> frozenset[str]:
        """Return the names of nodes that were lost and wait to be let in."""
        return self._back.nodes

    def returned(self) -> frozenset[str]:
        """Let in who waits, from the next attempt on; return their names."""
        with self._changed:
            back = self._back.take()
            self._members |= back
            self._others = tuple(name for name in self._nodes if name in self._members)
        return frozenset(back)

    def train(
        self, folder: RunFolder, handover: str, group: RankGroup, on_event: Emit, stopping: "Stopping"
    ) -> None:
        """Have all hosts train what is in the run folder, this one among them; as `run_ranks`."""
        from hetpipe.data.task import registered_task
        from hetpipe.training.rank import train_rank

        self._attempt += 1
        local = tuple(
            rank for rank, name in enumerate(group.names) if name.rpartition("/")[0] == self.facts.node
        )
        store = LeaderStore(self.address, self.token, group.timeout_s)
        own = replace(
            group, local=local, first=local[0], interface=interface_of(self.address[0]), store=store
        )
        for member in list(self._members.values()):
            member.done = False
        reader, writer = multiprocessing.Pipe(duplex=False)
        begun: list[int] = []

        def told(event: dict[str, Any]) -> object:
            if event["event"] == "step" and not begun:
                begun.append(event["step"])
                self._say_to_all("begun")
            return on_event(event)

        with self.store_served():
            try:
                with self._changed:
                    self._between = False
                    self._check()
                self._hand_out(Job.of(folder, self.address, local[0], self._attempt), folder)
                with self._changed:
                    self._alarm, self._stopping = writer, stopping
                    for failure in self._failures:
                        writer.send(failure)
                self._say_to_all("start")
                arguments = (str(folder.path), registered_task, handover)
                run_ranks(train_rank, arguments, own, told, alarm=reader)
                self._await_ends()
            except BaseException as error:
                found = error_in(self._failures[0]) if isinstance(error, Interrupted) else found_in(error)
                self._say_to_all("stop", verdict=verdict_of(found), attempt=self._attempt)
                raise found from None
            finally:
                with self._changed:
                    self._alarm = self._stopping = None
                    self._between = True
                reader.close()
                writer.close()

    def _hand_out(self, job: Job, folder: RunFolder) -> None:
        """Have all others fill their folders, and send them what they lack of the checkpoint."""
        from hetpipe.training.checkpoint_transfer import pieces

        _, answers = self.ask("job", self._others, lambda: None, job=job.to_json())
        source = read_settings(folder.config).resume_from
        for node, (answer, _) in answers.items():
            for name in answer["lacks"]:
                for piece in pieces(Path(str(source)) / Path(str(name)).name):
                    self._members[node].conversation.say("piece", piece, file=name)
        self.ask("ready", self._others, lambda: None)

    def _await_ends(self) -> None:
        end_s = time.monotonic() + ENDING_S
        with self._changed:
            while left := [name for name, member in list(self._members.items()) if not member.done]:
                if self._failures:
                    raise error_in(self._failures[0])
                if time.monotonic() > end_s:
                    raise error_of({"type": "", "text": f"the ranks of {', '.join(left)} do not end"})
                self._changed.wait(LOOK_S)

    def _say_to_all(self, what: str, **rest: Any) -> None:
        for member in list(self._members.values()):
            member.conversation.say(what, **rest)

    def _take(self, channel: Channel) -> None:
        """Take a channel that has proven the token, in a thread of its own."""
        message, _ = channel.receive(FIRST_WORD_S)
        if message.get("purpose") == MEMBER:
            self._welcome(channel, Facts.of_json(message))
        elif self._store is not None:
            self._store.serve(channel)

    def _welcome(self, channel: Channel, facts: Facts) -> None:
        if self._attempt >= 0:
            self._back.wait_until_lost(channel, lambda: facts.node in self._members)
        with self._changed:
            is_back = facts.node in self._nodes and facts.node not in self._others
            refusal = self._refusal(facts) or (self._back.refused(facts) if is_back else "")
            if refusal or self._closed:
                verdict = {"type": "InputError", "text": refusal or "the run is over"}
                channel.send({"do": "abort", "verdict": verdict})
                channel.close()
                return
            name = f"{facts.node} ({facts.host}, {channel.peer_address})"
            self._known.add(facts.node)
            member = Member(facts, Conversation(
                channel, name,
                lambda message, blob: self._hear(facts.node, message, blob),
                lambda how: self._lose(facts.node, how),
            ))  # fmt: skip
            if is_back:
                self._back.add(member)
            else:
                self._members[facts.node] = member
            self._changed.notify_all()

    def _refusal(self, facts: Facts) -> str:
        if facts.node not in self._nodes:
            return f"node {facts.node} takes no part in this run; give another --node"
        if facts.node in self._members or facts.node in self._back.nodes:
            return f"node {facts.node} is here already; give another --node"
        return ""

    def _hear(self, node: str, message: Message, blob: bytes) -> None:
        with self._changed:
            member = self._members.get(node)
        if member is None:  # it waits to be let in, and is asked nothing
            return
        match message["do"]:
            case "answer":
                with self._changed:
                    member.answer = message, blob
                    self._changed.notify_all()
            case "done":
                with self._changed:
                    member.done = True
                    self._changed.notify_all()
            case "signal":
                if self._stopping is not None:
                    self._stopping.ask(int(message["number"]), f" on {node}")
            case "failed" if message["attempt"] >= self._attempt:
                self._fail(alarm_of(placed(message["verdict"], node), float(message["age_s"])))

    def _lose(self, node: str, how: str) -> None:
        with self._changed:
            if self._back.lose(node):
                return
            member = self._members.pop(node)
            self._others = tuple(name for name in self._others if name != node)
            self._changed.notify_all()
        text = f"node {member.conversation.name} is lost: {how}"
        silent_s = time.monotonic() - member.conversation.heard_s
        self._fail(alarm_of({"type": "", "text": text, "node": node, "silent_s": silent_s}))
        member.conversation.close()

    def _fail(self, failure: dict[str, Any]) -> None:
        with self._changed:
            if self._closed or self._settling:
                self._changed.notify_all()
                return
            self._failures.append(failure)
            if self._alarm is not None:
                self._alarm.send(failure)
            elif not self._between:
                self._interruption.interrupt()
            self._changed.notify_all()

    def _check(self) -> None:
        if self._failures:
            raise error_in(self._failures[0])
