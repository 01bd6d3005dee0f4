"""The launcher that follows: it does what the leader asks, and ends as the leader ends."""

import math
import multiprocessing
import queue
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cost_model.errors import InputError
from hetpipe.hosts.agreement import Facts
from hetpipe.hosts.conversation import MEMBER, Answer, Conversation, Message
from hetpipe.hosts.interruption import Interruption
from hetpipe.hosts.job import FilledFolder, Job, fill_folder, go_on_from, member_folder
from hetpipe.hosts.leader_store import LeaderStore
from hetpipe.hosts.links import TIMEOUT_S, devices_of_json, rank_of_pair
from hetpipe.hosts.own_interface import interface_of
from hetpipe.hosts.sums import devices_of_sum, rank_of_sum
from hetpipe.hosts.verdict import alarm_of, error_of, verdict_of
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.settings import Settings, TaskSettings
from hetpipe.runtime.processes import run_ranks
from hetpipe.runtime.scratch import scratch_folder
from hetpipe.runtime.stopping import signals_heard
from hetpipe.trust.channel import Address, ChannelError, address_text, connect

if TYPE_CHECKING:
    from hetpipe.program.costs import ProgramCosts
    from hetpipe.runtime.stopping import Stopping
    from hetpipe.training.checkpoint_transfer import Received

VERDICT_S = 5.0
"""So long may the leader take to say which of several errors was the first."""

Verdict = dict[str, Any]


def follow(
    address: Address,
    token: bytes,
    facts: Facts,
    own: Settings,
    answers: Mapping[str, Callable[[Message], Answer]],
    *,
    wait_s: float,
    tell: Callable[[str], None],
    file: Path | None = None,
) -> None:
    """Take part in the run of a leader, as the node of the facts, until it ends.

    own: settings with the places of model, texts and adapters on this host. answers: by what is asked.
    wait_s: so long may the leader take to be there. tell: takes sentences for the user. file: of the
    rendezvous, in which the address was read; None where it was given.

    Raises: whatever ended the run, on whichever host.
    """
    read = "" if file is None else f", as {file} says"
    tell(f"{facts.node} waits for the leader at {address_text(address)}{read}")
    try:
        channel = connect(address, token, wait_s, "the leader")
        channel.send({"purpose": MEMBER, **facts.to_json()})
    except ChannelError as error:
        left = (
            "" if file is None else f"; if {file}, which names it, is left over from another run, remove it"
        )
        raise InputError(f"{error}; start the same line there, with the same token{left}") from None
    member = _Member(token, facts, own, answers, tell)
    member.conversation = Conversation(channel, f"the leader ({address[0]})", member.hear, member.lose)
    member.follow()


def way_on(folder: RunFolder | None) -> str:
    """Return how to go on without the leader: on the host that has a copy of its checkpoints, by its newest.

    folder: of the run on this host, None where it was not filled yet.
    """
    from hetpipe.training.checkpoint import latest

    if folder is None:
        return "start the same line again when it is back"
    newest = latest(folder.checkpoints)
    if newest is None:
        return "a host that keeps a copy of its checkpoints, if one does, says how to go on without it"
    return (
        f"this host keeps a copy of its checkpoints ({newest}): start the same line on the hosts that are "
        "left, with --rendezvous of this host, --exclude of the leader's node, --resume auto, --run-folder "
        f"{folder.path}"
    )


@dataclass(slots=True)
class _Member:
    """A launcher that follows; owns its conversation with the leader, and the run folder here."""

    token: bytes
    facts: Facts
    own: Settings
    answers: Mapping[str, Callable[[Message], Answer]]
    tell: Callable[[str], None]
    conversation: Conversation = field(init=False)
    _messages: "queue.Queue[Message | None]" = field(default_factory=queue.Queue)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _verdict: Verdict | None = None
    _ended: bool = False
    _attempt: int = -1
    _stopped: int = -1
    _interruption: Interruption = field(default_factory=Interruption)
    _alarm: Connection | None = None
    _stopping: "Stopping | None" = None
    _ends: ExitStack = field(default_factory=ExitStack)
    _filled: "_Filled | None" = None
    _source: "Received | None" = None

    def follow(self) -> None:
        """Do what is asked until the leader ends; raise what ended it, on whichever host that was."""
        try:
            try:
                self._interruption.begin()
                with self._ends:
                    self._obey()
            finally:
                self._interruption.end()  # the verdict of an error here comes as those from elsewhere do
        except BaseException as error:
            ending = self._ending(error)
            raise ending from (None if ending is not error else error.__cause__)
        finally:
            self.conversation.close()

    def hear(self, message: Message, blob: bytes) -> None:
        """Take a message of the leader, in the thread that listens."""
        match message["do"]:
            case "abort":
                self._end_by(message["verdict"])
            case "piece":
                self._take_piece(str(message["file"]), blob)
            case "stop":
                self._stop(message["verdict"], int(message["attempt"]))
            case "end":
                self._ended = True
                self._messages.put(message)
            case "told":
                self.tell(str(message["text"]))
            case "begun":
                if self._stopping is not None:
                    self._stopping.begun = True
            case _:
                self._messages.put(message)

    def lose(self, how: str) -> None:
        """Hear that the leader is lost, in the same thread."""
        if not self._ended:
            try:
                way = way_on(None if self._filled is None else self._filled.folder)
            except Exception as error:  # without `_end_by` the main thread would wait for ever
                way = f"its checkpoints on this host cannot be read ({error})"
            text = f"the run is lost with its leader: {how}; {way}"
            self._end_by({"type": "", "text": text})

    def _take_piece(self, name: str, blob: bytes) -> None:
        """Take a piece of the checkpoint, in the thread that listens: it is sent no faster than that."""
        try:
            if self._source is not None:
                self._source.take(name, blob)
        except InputError as error:
            self._report(error)

    def _stop(self, verdict: Verdict, attempt: int) -> None:
        """End the ranks here, if they run, and begin none of that attempt; the leader says what follows."""
        with self._lock:
            self._stopped = attempt
            if self._alarm is not None:
                self._alarm.send(alarm_of(verdict, math.inf))

    def _end_by(self, verdict: Verdict) -> None:
        with self._lock:
            if self._verdict is not None:
                return
            self._verdict = verdict
            if self._alarm is not None:
                self._alarm.send(alarm_of(verdict, math.inf))  # goes before errors here
            else:
                self._interruption.interrupt()
        self._messages.put(None)

    def _ending(self, error: BaseException) -> BaseException:
        """Return what ended the run: what the leader says, else an error here, of which it is told."""
        if self._verdict is None:
            self._report(error)
            deadline_s = time.monotonic() + VERDICT_S
            while self._verdict is None and time.monotonic() < deadline_s:
                try:
                    self._messages.get(timeout=max(0.0, deadline_s - time.monotonic()))
                except queue.Empty:
                    break
        return error if self._verdict is None else error_of(self._verdict)

    def _report(self, error: BaseException) -> None:
        """Tell the leader of an error here, and how long ago that was."""
        report = getattr(error, "report", {})
        age_s = time.monotonic() - report["when_s"] if "when_s" in report else 0.0
        self.conversation.say("failed", verdict=verdict_of(error), age_s=age_s, attempt=self._attempt)

    def _obey(self) -> None:
        while True:
            message = self._messages.get()
            if self._verdict is not None:
                raise error_of(self._verdict)
            assert message is not None
            match message["do"]:
                case "ask":
                    answer, blob = self._answer(message)
                    self.conversation.say("answer", blob, **answer)
                case "start":
                    self._train()
                case "end":
                    return

    def _answer(self, message: Message) -> Answer:
        question = message["question"]
        if question == "job":
            job = Job.of_json(message["job"])
            self._attempt = job.attempt
            self._filled = self._fill(job)
            return {"lacks": [] if self._source is None else self._source.lacks}, b""
        if question == "there":
            return {}, b""
        if question == "ready":
            if self._source is not None:
                self._source.check()
            return {}, b""
        if question in ("link", "sum"):
            return {"found": self._measured(question, message)}, b""
        if question not in self.answers:
            raise InputError(f"the leader asks for {question!r}, which this hetpipe does not know; update it")
        return self.answers[question](message)

    def _measured(self, question: str, message: Message) -> object:
        """Take part in the measurement of a link or of a sum; return what was found."""
        channel = self.conversation.channel
        address = channel.peer_address, int(message["port"])
        store = LeaderStore(address, self.token, TIMEOUT_S, str(message["mark"]))
        if question == "link":
            pairs = devices_of_json(message["devices"])
            return rank_of_pair(self.facts.node, pairs, store, channel.own_address)
        devices, sizes = devices_of_sum(message["devices"]), [int(size) for size in message["sizes"]]
        return rank_of_sum(self.facts.node, devices, sizes, store, channel.own_address)

    def _fill(self, job: Job) -> "_Filled":
        from hetpipe.runtime.gpus import check_here
        from hetpipe.training.checkpoint import tidy
        from hetpipe.training.handover import Handover, Places

        if self._filled is None:
            folder = self._ends.enter_context(member_folder(job, self.facts.node))
            self._ends.callback(tidy, folder.checkpoints)  # once its ranks have ended
        else:  # once more
            folder = self._filled.folder
        tidy(folder.checkpoints)
        filled = fill_folder(folder, job, self.own)
        costs = filled.costs
        ranks = tuple(rank for rank, device in enumerate(costs.devices) if device.node == self.facts.node)
        self._source = self._received(folder, job, filled, ranks)
        check_here((costs.devices[rank] for rank in ranks), "give a --plan of devices that are there")
        handed = self._ends.enter_context(scratch_folder("run", in_memory=True))
        Handover.fill(handed, costs, None, Places(job.first, ranks))
        return _Filled(job, folder, str(handed), filled.settings, costs, ranks)

    def _received(
        self, folder: RunFolder, job: Job, filled: FilledFolder, ranks: tuple[int, ...]
    ) -> "Received | None":
        """Return the checkpoint that ranks here go on from, as far as it is here; None at the beginning."""
        if not job.manifest:
            return None
        from hetpipe.training.checkpoint_transfer import needed_files, received

        program, source = filled.costs.program, filled.settings.run.resume_from
        devices = [program.device_names[rank] for rank in ranks]
        found = self._ends.enter_context(
            received(
                folder, str(source), job.manifest,
                lambda manifest: needed_files(manifest, program.plan, filled.profile, devices),
            )
        )  # fmt: skip
        go_on_from(folder, found.path)
        return found

    def _train(self) -> None:
        """Run the ranks of this host; tell the leader that they are done."""
        assert self._filled is not None
        filled = self._filled
        if filled.ranks:
            reader, writer = multiprocessing.Pipe(duplex=False)
            with self._lock:
                self._alarm = writer
                if self._verdict is not None:
                    writer.send(alarm_of(self._verdict, math.inf))
                if self._stopped == filled.job.attempt:
                    writer.send(alarm_of({"type": "", "text": "stopped"}, math.inf))
            try:
                with signals_heard(self._pass_on) as self._stopping:
                    self._run_ranks(filled, reader)
            except Exception as error:  # the leader says what follows
                if "verdict" not in getattr(error, "report", {}):
                    self._report(error)
                return
            finally:
                with self._lock:
                    self._alarm, self._stopping = None, None
                reader.close()
                writer.close()
        else:
            self.tell(f"the plan uses no device of {self.facts.node}")
        self.conversation.say("done")

    def _run_ranks(self, filled: "_Filled", alarm: Connection) -> None:
        from hetpipe.data.task import registered_task
        from hetpipe.training.rank import train_rank
        from hetpipe.training.run import rank_group

        channel, job = self.conversation.channel, filled.job
        plan = filled.costs.program.plan
        group = rank_group(filled.costs.devices, filled.settings, filled.ranks, plan=plan)
        address = channel.peer_address, job.port
        store = LeaderStore(address, self.token, group.timeout_s)
        group = replace(
            group, local=filled.ranks, first=job.first, interface=interface_of(channel.own_address),
            store=store,
        )  # fmt: skip
        names = ", ".join(group.names[rank] for rank in filled.ranks)
        self.tell(f"{names} train, in {filled.folder.path}")
        arguments = (str(filled.folder.path), registered_task, filled.handover)
        run_ranks(train_rank, arguments, group, self._tell_of, alarm=alarm)

    def _tell_of(self, event: dict[str, Any]) -> None:
        if event["event"] == "told":
            self.tell(str(event["text"]))

    def _pass_on(self, name: str) -> None:
        """Tell the leader of a signal, who ends training on all hosts."""
        self.conversation.say("signal", number=signal.Signals[name].value)


@dataclass(frozen=True, slots=True)
class _Filled:
    """A job whose folder is filled here, and the ranks of this host."""

    job: Job
    folder: RunFolder
    handover: str
    settings: TaskSettings
    costs: "ProgramCosts"
    ranks: tuple[int, ...]
