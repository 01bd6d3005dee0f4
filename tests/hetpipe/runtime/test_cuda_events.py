"""What the host does while a GPU works: tried out with events, messages and connections that behave alike."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gpu_mains
from hetpipe.program.instructions import Direction, Pass, Transfer
from hetpipe.runtime import cuda_events
from hetpipe.runtime.cuda_events import GpuPace, wait_for_gpu
from hetpipe.runtime.host_staging import Staging
from hetpipe.runtime.peer_errors import PeerError, PeerTimeout
from hetpipe.runtime.processes import RankGroup, run_ranks
from hetpipe.runtime.transport import DistributedTransport, TensorShape
from hetpipe.simulation.schedule_selection import lower
from partition.plan import Pipeline
from random_cases import MODULES, Case
from runs import chain_plan, made_up_profile
from runtime_mains import case_of, stages


@dataclass
class Stream:
    """A GPU whose work takes longer than the host needs to hand it in."""

    now_s: float = 0.0
    events: int = 0
    waited_for: list["StreamEvent"] = field(default_factory=list)

    def event(self) -> "StreamEvent":
        self.events += 1
        return StreamEvent(self)


class StreamEvent:
    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.when_s = 0.0

    def record(self) -> None:
        self.when_s = self._stream.now_s

    def synchronize(self) -> None:
        self._stream.waited_for.append(self)

    def elapsed_time(self, end_event: "StreamEvent") -> float:
        return 1e3 * (end_event.when_s - self.when_s)


@pytest.mark.alone
def test_times_are_those_of_the_gpu_and_the_host_waits_once():
    stream = Stream()
    pace = GpuPace(stream.event)
    for step in range(2):
        start_s = time.monotonic()
        pace.start_step(start_s)
        spans = []
        for duration_s in (3.0, 5.0):  # the host is done in microseconds
            begin = pace.begin(0.0)
            stream.now_s += duration_s
            spans.append((begin, pace.end(begin, 0.1)))
            stream.now_s += 1.0
        after = pace.wait(0.0)
        pace.finish()
        settled = pace.settle()
        assert settled.keys() >= {after, *spans[0], *spans[1]} and len(settled) == 6
        found = [(settled[begin] - start_s, settled[end] - start_s) for begin, end in spans]
        assert found == [pytest.approx((0.0, 3.0), abs=0.1), pytest.approx((4.0, 9.0), abs=0.1)]
        assert settled[after] - start_s == pytest.approx(10.0, abs=0.1)
        assert pace.busy_s == pytest.approx(8.0)
        assert time.monotonic() - start_s < 1.0
        assert len(stream.waited_for) == step + 1  # the last event of a step
    assert stream.events == 6  # used again in the second step


class Work:
    """A message that is there after some looks; None for never."""

    def __init__(self, looks: int | None) -> None:
        self.looks = looks
        self.on_stream = 0

    def is_completed(self) -> bool:
        if self.looks is None:
            return False
        self.looks -= 1
        return self.looks < 0

    def wait(self) -> None:
        self.on_stream += 1


@pytest.mark.alone
def test_the_host_looks_until_it_is_there_or_the_time_is_up(monkeypatch):
    monkeypatch.setattr(cuda_events, "LOOK_S", 1e-4)
    work = Work(3)
    wait_for_gpu(work, 60.0)
    assert (work.looks, work.on_stream) == (-1, 1)
    begin_s = time.monotonic()
    with pytest.raises(RuntimeError, match=r"timed out after 0\.05 s"):
        wait_for_gpu(Work(None), 0.05)
    assert 0.05 <= time.monotonic() - begin_s < 5.0


class Queue:
    """A stream: until when the GPU is busy with what was handed in there."""

    def __init__(self, device: torch.device | None = None, priority: int = 0) -> None:
        self.busy_until_s = 0.0

    def wait_stream(self, other: "Queue") -> None:
        self.busy_until_s = max(self.busy_until_s, other.busy_until_s)


@dataclass
class Streams:
    """The streams of a GPU; what memory the computations are known to use."""

    computations: Queue = field(default_factory=Queue)
    current: Queue = field(init=False)
    used: list[tuple[torch.Tensor, Queue]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.current = self.computations

    @contextmanager
    def on(self, stream: Queue) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    """Streams in the place of those of CUDA."""
    made = Streams()
    monkeypatch.setattr(torch.cuda, "Stream", Queue)
    monkeypatch.setattr(torch.cuda, "stream", made.on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: made.current)
    monkeypatch.setattr(
        torch.Tensor,
        "record_stream",
        lambda tensor, stream: made.used.append((tensor, stream)),
        raising=False,
    )
    return made


Receiver = Callable[..., tuple[DistributedTransport, list[Transfer], list[Work]]]


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch, streams: Streams) -> Receiver:
    """The second stage of some microbatches on a GPU, whose messages are there after so many looks."""

    def make(looks: list[int | None]) -> tuple[DistributedTransport, list[Transfer], list[Work]]:
        works = [Work(count) for count in looks]
        left = iter(works)
        on_cpu = torch.empty

        def empty(*shape: Any, device: Any = None, **more: Any) -> torch.Tensor:
            return on_cpu(*shape, **more)

        monkeypatch.setattr(torch, "empty", empty)
        monkeypatch.setattr(dist, "irecv", lambda *arguments, **more: next(left))
        program = lower(chain_plan("bert-tiny", [0, 4, 8], 1, len(looks)), made_up_profile("bert-tiny"))
        transport = DistributedTransport(program, 1, torch.device("cuda", 0), 0.05)
        receives = [Transfer(Direction.RECV, Pass.FORWARD, 0, 1, index) for index in range(len(looks))]
        for receive in receives:
            transport.post_receive(receive, (TensorShape((2, 3), torch.float32),))
        return transport, receives, works

    return make


def test_host_and_stream_wait_for_a_message_where_it_is_needed(receiver):
    transport, receives, works = receiver([0, 3, None])
    for count, receive in enumerate(receives[:2], start=1):
        (tensor,) = transport.receive(receive)
        assert tensor.shape == (2, 3)
        assert [work.on_stream for work in works] == [1] * count + [0] * (3 - count)
    expected = (
        r"rank 1 \(here/1\) waited at 1RECV_F2 for rank 0 \(here/0\), begun 0\.\d s ago: timed out after"
    )
    with pytest.raises(PeerError, match=expected):
        transport.receive(receives[2])


def test_a_message_is_received_beside_the_computations(monkeypatch, receiver, streams):
    """NCCL begins behind all that was handed in before on the current stream: 5 s of computations."""
    transport, (first,), _ = receiver([0])
    begins_s = []

    def irecv(*arguments: Any, **more: Any) -> Work:
        begins_s.append(streams.current.busy_until_s)
        return Work(0)

    monkeypatch.setattr(dist, "irecv", irecv)
    streams.computations.busy_until_s = 5.0
    transport.post_receive(first, (TensorShape((2, 3), torch.float32),) * 2)
    assert begins_s == [0.0, 0.0] and streams.current is streams.computations
    tensors = transport.receive(first)
    # what is computed of it may still run when the host lets go of it
    assert [id(tensor) for tensor, _ in streams.used] == [id(tensor) for tensor in tensors]
    assert all(stream is streams.computations for _, stream in streams.used)


def test_messages_between_gpus_go_before_sums(monkeypatch):
    asked = []

    class Options:
        def __init__(self, is_high_priority_stream: bool) -> None:
            self.first = is_high_priority_stream

    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(dist, "new_group", lambda ranks, **more: asked.append((ranks, more)))
    staging, limit = Staging((True, True, False)), timedelta(seconds=1)
    staging.new_group([0, 1], limit, urgent=True)
    staging.new_group([0, 1], limit)
    staging.new_group([1, 2], limit, urgent=True)  # over gloo
    options = [more.get("pg_options") for _, more in asked]
    assert options[0].first and options[0]._timeout == asked[0][1]["timeout"]
    assert options[1:] == [None, None]


def test_a_send_is_kept_until_the_stream_has_waited_for_it(monkeypatch, receiver):
    transport, *_ = receiver([0])
    work = Work(2)
    monkeypatch.setattr(dist, "isend", lambda *arguments, **more: work)
    send = Transfer(Direction.SEND, Pass.BACKWARD, 0, 1, 0)
    transport.send(send, (torch.zeros(2, 3),))
    assert work.on_stream == 0
    transport.release(send)
    assert work.on_stream == 1


def run(main: Any, case: Case, *arguments: Any) -> list[dict[str, Any]]:
    names = case.program.device_names
    events: list[dict[str, Any]] = []
    run_ranks(
        main, arguments, RankGroup(names, (1,) * len(names), preload=MODULES, timeout_s=20.0), events.append
    )
    return events


@pytest.mark.slow
def test_connections_are_open_before_the_first_step():
    """Plans in whose first step each of two ranks would wait on another edge."""
    all_in_flight = stages((0, 0, 3, 4), (1, 3, 6, 4))
    cases = [
        case_of("pairs", Pipeline(1, 1, stages((0, 0, 3, 1), (1, 3, 6, 1)))),
        case_of("pairs", Pipeline(1, 4, stages((0, 0, 3, 2), (1, 3, 6, 2)))),
        case_of("pairs", Pipeline(1, 4, all_in_flight)),
        case_of(
            "pairs",
            Pipeline(1, 3, stages((0, 0, 3, 2), (1, 3, 6, 1))),
            Pipeline(1, 3, stages((1, 0, 2, 2), (0, 2, 6, 1))),
        ),
    ]
    check_late_connections(cases)


@pytest.mark.slow
def test_groups_are_open_before_the_first_step():
    """In whose first step a rank would wait for a sum before it sends what the other member waits for."""
    check_late_connections(
        [
            case_of(
                "pairs",
                Pipeline(1, 6, stages((0, 0, 2, 3), (1, 2, 4, 2), (2, 4, 6, 1))),
                Pipeline(1, 2, stages((2, 0, 2, 3), (0, 2, 4, 2), (1, 4, 6, 1))),
            )
        ]
    )


def check_late_connections(cases: list[Case]) -> None:
    (event,) = run(gpu_mains.train_with_late_connections, cases[0], cases)
    assert len(event["differences"]) == 2 * len(cases)
    assert max(event["differences"]) <= 1e-12


@pytest.mark.slow
def test_a_step_on_the_clock_of_events_is_told_as_it_was():
    case = case_of(
        "pairs",
        Pipeline(2, 6, stages((0, 0, 3, 2), (1, 3, 6, 1))),
        Pipeline(1, 3, stages((1, 0, 4, 2), (0, 4, 6, 1))),
    )
    for event in run(gpu_mains.time_by_events, case, case):
        spans = event["spans"]
        assert {name for name, *_ in spans} == {
            str(entry)
            for entry in case.program.ranks[event["rank"]]
            if not (isinstance(entry, Transfer) and entry.direction is Direction.RECV)
        }
        assert all(-1e-6 <= begin <= end <= event["step_s"] for *_, begin, end in spans)
        begins = [begin for *_, begin, _ in spans]
        assert begins == sorted(begins)
        computed = [end - begin for _, computes, begin, end in spans if computes]
        assert event["busy_s"] == pytest.approx(sum(computed))
        assert sum(end > begin for name, _, begin, end in spans if name.startswith("SYNC")) > 0


def test_running_out_of_memory_is_not_called_waiting_for_a_peer():
    program = lower(chain_plan("bert-tiny", [0, 4, 8], 1, 1), made_up_profile("bert-tiny"))
    send = Transfer(Direction.SEND, Pass.FORWARD, 0, 0, 0)
    with pytest.raises(torch.OutOfMemoryError, match=r"^no room$"), PeerTimeout(program, 0, send, (1,), 0.0):
        raise torch.OutOfMemoryError("no room")
    with (
        pytest.raises(PeerError, match=r"rank 0 .* waited at .* for rank 1"),
        PeerTimeout(program, 0, send, (1,), 0.0),
    ):
        raise RuntimeError("gone")


def test_the_step_ends_before_the_times_of_its_events_are_read(monkeypatch):
    order = []

    class Timed:
        def record(self) -> None: ...

        def synchronize(self) -> None:
            order.append("done")

        def elapsed_time(self, end_event: Any) -> float:
            order.append("read")
            return 1.0

    pace = GpuPace(Timed)
    pace.start_step(time.monotonic())
    pace.end(pace.begin(0.0), 0.1)
    pace.finish()
    assert order == ["done"]
    pace.settle()
    assert order == ["done", "read", "read", "read"]
