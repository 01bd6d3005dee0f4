import multiprocessing
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cost_model.cluster import EMULATED
from cost_model.cluster_file import read_cluster
from cost_model.collectives import Collective
from hetpipe.program.costs import ProgramCosts
from hetpipe.program.gradient_buckets import summed_by
from hetpipe.program.instructions import Compute, Direction, Norm, Step, Sync, Transfer, incoming
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.settings import Settings
from hetpipe.runtime.byte_counter import ByteCounter
from hetpipe.runtime.emulated_links import Board
from hetpipe.runtime.pace import EmulatedPace, Pace
from hetpipe.simulation.schedule_selection import lower
from hetpipe.simulation.simulator import simulate
from partition.plan import Pipeline, Plan, Stage
from runs import EMULATED_CLUSTER, chain_plan, cluster_file, made_up_profile, run

TWO_NODES = """
name = "two nodes"
[network]
bandwidth = "1 Gbit/s"
latency = "1 ms"
[[nodes]]
name = "here"
devices = [{ kind = "emulated", count = 2, speed = 0.5, memory = "4 GiB" }]
interconnect = { bandwidth = "1 GB/s", latency = "10 us" }
[[nodes]]
name = "there"
devices = [{ kind = "emulated", count = 2, speed = 0.25, memory = "4 GiB" }]
"""


# ---- bytes


def test_a_tensor_counts_from_its_making_until_its_last_view_dies():
    counter = ByteCounter()
    with counter:
        first = torch.ones(10)  # 40 bytes
        view = first.view(2, 5)[1]
        second = first + 1  # 40 more
        assert (counter.live_bytes, counter.peak_bytes) == (80, 80)
        del first
        assert counter.live_bytes == 80  # the view keeps it
        del view
        assert counter.live_bytes == 40
        third = second.double()  # 80 bytes
        assert (counter.live_bytes, counter.peak_bytes) == (120, 120)
    del second, third
    assert (counter.live_bytes, counter.peak_bytes) == (0, 120)


def test_what_existed_before_counts_once_it_is_added():
    weight = torch.ones(8)
    counter = ByteCounter()
    for _ in range(2):
        counter.add(weight)
    counter.add(weight.view(2, 4))
    assert counter.live_bytes == 32


def test_a_peak_begins_anew_at_what_is_alive():
    counter = ByteCounter()
    with counter:
        kept = torch.ones(4)
        torch.ones(100)  # dies at once
        assert counter.restart_peak() == 416
        assert counter.peak_bytes == 16
        assert counter.restart_peak() == 16
    assert kept.numel() == 4


def test_the_cap_raises_the_error_of_a_full_device():
    counter = ByteCounter(cap_bytes=100, name="small/1")
    message = "small/1: 404 bytes are needed, the device has 100"
    with pytest.raises(torch.OutOfMemoryError, match=message), counter:
        kept = torch.ones(1)
        kept = (kept, torch.ones(100))


def test_the_cap_holds_within_a_backward_too():
    model, inputs = torch.nn.Linear(4, 4), torch.ones(2, 4)
    counter = ByteCounter(name="small/0")
    with counter:
        loss = model(inputs).sum()
        counter.cap_bytes = counter.live_bytes + 40  # the gradient of the weight alone has 64
        with pytest.raises(torch.OutOfMemoryError, match="small/0"):
            loss.backward()


def test_counting_gives_the_same_bytes_every_time():
    def peak() -> tuple[int, int]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 4))
        counter = ByteCounter()
        with counter:
            for _ in range(3):
                model(torch.ones(5, 16)).square().sum().backward()
        return counter.peak_bytes, counter.live_bytes

    assert len({peak() for _ in range(5)}) == 1


# ---- time


class FakeClock:
    """A host whose clock moves only when told to, or by sleeping."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.cpu_s = 7.0

    def monotonic(self) -> float:
        return self.now_s

    def thread_time(self) -> float:
        return self.cpu_s

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now_s += seconds

    def work(self, wall_s: float, cpu_s: float | None = None) -> None:
        self.now_s += wall_s
        self.cpu_s += wall_s if cpu_s is None else cpu_s


@pytest.fixture
def clock(monkeypatch):
    fake = FakeClock()
    monkeypatch.setattr("hetpipe.runtime.pace.time", fake)
    return fake


def test_an_operation_ends_its_nominal_time_after_its_start(clock):
    pace = EmulatedPace()
    pace.start_step(100.5)
    assert clock.now_s == 100.5
    start = pace.begin(0.0)
    clock.work(0.1)
    assert (start, pace.end(start, 0.25)) == (100.5, 100.75)
    assert clock.now_s == pytest.approx(100.75)
    start = pace.begin(101.0)  # its input is due later
    assert start == clock.now_s == 101.0
    clock.work(0.0)
    assert pace.end(start, 0.5) == 101.5
    assert pace.busy_s == 0.75
    assert pace.over_budget_s == 0.0
    assert pace.wait(101.75) == clock.now_s == 101.75
    assert pace.wait(101.0) == 101.75  # it is past


def test_small_lateness_does_not_add_up(clock):
    pace = EmulatedPace()
    pace.start_step(100.0)
    for index in range(10):
        start = pace.begin(0.0)
        clock.work(0.104 if index % 2 == 0 else 0.05)  # 4 ms late, then early
        pace.end(start, 0.1)
    assert pace.now_s == pytest.approx(101.0)
    assert pace.over_budget_s == pytest.approx(5 * 0.004)


def test_the_host_clock_is_kept_beside_the_devices(clock):
    pace = EmulatedPace()
    pace.start_step(100.0)
    start = pace.begin(0.0)
    clock.work(0.13)
    end = pace.end(start, 0.1)  # 30 ms late, which the device's clock does not show
    again = pace.begin(0.0)
    assert (start, end, again) == (100.0, 100.1, 100.1)
    assert [pace.host_times.of_begin(each) for each in (start, again)] == pytest.approx([100.0, 100.13])
    assert pace.host_times.of_end(end) == pytest.approx(100.13)
    assert pace.host_times.of_end(7.0) == pace.host_times.of_begin(7.0) == 7.0  # as on the device
    pace.start_step(200.0)
    assert pace.host_times.of_end(end) == end
    assert Pace().host_times is None


def test_lateness_beyond_the_limit_is_accepted_as_it_is(clock):
    pace = EmulatedPace()
    pace.start_step(100.0)
    start = pace.begin(0.0)
    clock.work(0.1 + 0.049)
    assert pace.end(start, 0.1) == pytest.approx(100.1)  # carried
    start = pace.begin(0.0)
    assert start == pytest.approx(100.1)
    clock.work(0.2)
    assert pace.end(start, 0.1) == pytest.approx(100.349)  # 149 ms late: all of it counts


def test_the_cpu_clock_charges_what_the_thread_used(clock):
    pace = EmulatedPace(cpu_speed=0.5)
    pace.start_step(100.0)
    start = pace.begin(0.0)
    clock.work(wall_s=0.03, cpu_s=0.02)
    assert pace.end(start, 123.0) == pytest.approx(100.04)
    assert pace.busy_s == pytest.approx(0.04)
    assert pace.over_budget_s == 0.0


def test_a_real_device_is_as_late_as_it_is(clock):
    pace = Pace()
    pace.start_step(101.0)
    start = pace.begin(100.0)
    clock.work(0.25)
    assert (start, pace.end(start, 0.1)) == (101.0, 101.25)
    assert (pace.busy_s, pace.over_budget_s, pace.settle()) == (0.25, 0.0, {})
    assert pace.begin(103.0) == 103.0  # what comes over an emulated link is not there before it is due
    assert pace.wait(104.0) == 104.0


# ---- links


def costs_of(folder: Path, plan: Plan) -> ProgramCosts:
    profile = made_up_profile("bert-tiny", "emulated")
    return ProgramCosts(lower(plan, profile), profile, read_cluster(cluster_file(folder, TWO_NODES)))


def one_pipeline() -> Plan:
    plan = chain_plan("bert-tiny", [0, 2, 5, 8], 4)
    stages = plan.pipelines[0].stages
    stages = (stages[0], replace(stages[1], devices=("there/0",)), replace(stages[2], devices=("there/1",)))
    return replace(plan, pipelines=(replace(plan.pipelines[0], stages=stages),))


def two_pipelines() -> Plan:
    first = Pipeline(2, 10, (Stage(("here/0",), (0, 5), 2), Stage(("there/0",), (5, 8), 1)))
    second = Pipeline(4, 6, (Stage(("here/1",), (0, 5), 2), Stage(("there/1",), (5, 8), 1)))
    return Plan("manual", "bert-tiny", 16, (first, second))


@pytest.fixture
def boards(tmp_path):
    """Opens boards on one file for each of a plan's ranks."""
    opened: list[Board] = []

    def open_all(costs: ProgramCosts) -> list[Board]:
        path = tmp_path / "board"
        Board.create(path, costs)
        opened.extend(Board(path, costs) for _ in costs.program.ranks)
        return opened

    yield open_all
    for board in opened:
        board.close()


def drive(
    costs: ProgramCosts, boards: list[Board], step: int, begin_s: float
) -> dict[tuple[int, str], float]:
    """End of each instruction on ranks whose operations take exactly their nominal time, with real boards.

    The rank whose clock is lowest goes next, as ranks that run side by side would.
    """
    program = costs.program
    clock = [begin_s] * len(program.ranks)
    position = [0] * len(program.ranks)
    sent: set[object] = set()
    joined: dict[int, set[int]] = {index: set() for index in range(len(program.buckets) + 1)}
    ends: dict[tuple[int, str], float] = {}
    norm = len(program.buckets)

    def members(collective: int) -> set[int]:
        everyone = range(len(program.ranks))
        return set(everyone if collective == norm else program.buckets[collective].ranks)

    def advance(rank: int) -> bool:
        entry = program.ranks[rank][position[rank]]
        if isinstance(entry, Compute):
            message = incoming(entry, costs.stages[entry.pipeline])
            if message is not None and message not in sent:
                return False
            due_s = 0.0 if message is None else boards[rank].due_s(message, 0.0)
            clock[rank] = max(clock[rank], due_s) + costs.compute_s(rank, entry)
        elif isinstance(entry, Transfer):
            if entry.direction is Direction.SEND:
                ends[rank, str(entry)] = boards[rank].send(entry, clock[rank])
                sent.add(entry.message)
        elif isinstance(entry, Sync):
            boards[rank].join(entry, rank, step, clock[rank])
            joined[entry.bucket].add(rank)
        elif isinstance(entry, Norm):
            mine = [index for index in range(norm) if rank in members(index)]
            if any(joined[index] != members(index) for index in mine):
                return False
            if rank not in joined[norm]:
                for index in mine:
                    due_s = ends[rank, f"SYNC{index}"] = boards[rank].collective_due_s(Sync(index), rank)
                    clock[rank] = max(clock[rank], due_s)
                boards[rank].join(Norm(), rank, step, clock[rank])
                joined[norm].add(rank)
            if joined[norm] != members(norm):
                return False
            clock[rank] = boards[rank].collective_due_s(Norm(), rank)
        elif isinstance(entry, Step):
            clock[rank] += costs.step_s(rank)
        if not isinstance(entry, Transfer | Sync):
            ends[rank, str(entry)] = clock[rank]
        position[rank] += 1
        return True

    while any(position[rank] < len(program.ranks[rank]) for rank in range(len(clock))):
        waiting = sorted((clock[r], r) for r in range(len(clock)) if position[r] < len(program.ranks[r]))
        assert any(advance(rank) for _, rank in waiting), "deadlock"
    return ends


@pytest.mark.parametrize("collective", Collective)
@pytest.mark.parametrize("plan", [one_pipeline(), two_pipelines()], ids=["one pipeline", "two pipelines"])
def test_due_times_equal_those_of_the_simulator(tmp_path, boards, plan, collective):
    costs = costs_of(tmp_path, plan)
    assert costs.program.buckets
    buckets = tuple(summed_by(bucket, collective, plan, costs.network) for bucket in costs.program.buckets)
    costs.program = replace(costs.program, buckets=buckets)
    predicted = {(event.rank, str(event.instruction)): event.end_s for event in simulate(costs).events}
    opened = boards(costs)
    for step, begin_s in enumerate((1000.0, 2000.0)):  # the second step starts on the first one's table
        ends = drive(costs, opened, step, begin_s)
        assert {key: end - begin_s for key, end in ends.items()} == pytest.approx(predicted, rel=1e-6)


def test_messages_queue_on_their_link_in_the_order_of_reserving(tmp_path, boards):
    costs = costs_of(tmp_path, one_pipeline())
    board = boards(costs)[0]
    sends = [
        entry
        for entry in costs.program.ranks[0]
        if isinstance(entry, Transfer) and entry.direction is Direction.SEND
    ]
    # 4 samples of 16384 bytes over 125 MB/s occupy the link for 524.288 us; 1 ms of latency does not
    assert board.send(sends[0], 5.0) == pytest.approx(5.0 + 524.288e-6 + 1e-3)
    assert board.send(sends[1], 5.0) == pytest.approx(5.0 + 2 * 524.288e-6 + 1e-3)
    assert board.send(sends[2], 6.0) == pytest.approx(6.0 + 524.288e-6 + 1e-3)


def test_a_collective_is_reserved_once_when_its_last_member_joins(tmp_path, boards):
    costs = costs_of(tmp_path, one_pipeline())
    first, _, third = boards(costs)
    assert costs.program.buckets[0].ranks == (0, 2)
    first.join(Sync(0), 0, 3, 10.0)
    before_s = first.collective_due_s(Sync(0), 0)
    third.join(Sync(0), 2, 3, 10.5)
    due = [first.collective_due_s(Sync(0), 0), third.collective_due_s(Sync(0), 2)]
    assert due == [third.collective_due_s(Sync(0), 0), first.collective_due_s(Sync(0), 2)]
    assert min(due) > 10.5 and before_s not in due
    first.join(Sync(0), 0, 4, 20.0)  # the next step
    assert first.collective_due_s(Sync(0), 0) == due[0]
    third.join(Sync(0), 2, 4, 20.0)
    assert first.collective_due_s(Sync(0), 0) > 20.0


def _send_all(path: Path, costs: ProgramCosts, rank: int, ready_s: float) -> None:
    board = Board(path, costs)
    for entry in costs.program.ranks[rank]:
        if isinstance(entry, Transfer) and entry.direction is Direction.SEND:
            board.send(entry, ready_s)
    board.close()


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_no_two_messages_of_several_ranks_share_a_link_at_a_time(tmp_path, kind):
    costs = costs_of(tmp_path, two_pipelines())
    path = tmp_path / "board"
    Board.create(path, costs)
    arguments = [(path, costs, rank, 5.0) for rank in range(4)]
    start = threading.Thread if kind == "threads" else multiprocessing.get_context("fork").Process
    running = [start(target=_send_all, args=entry) for entry in arguments]
    for entry in running:
        entry.start()
    for entry in running:
        entry.join()
    board = Board(path, costs)
    seconds, due = {}, {}
    for rank in range(4):
        for entry in costs.program.ranks[rank]:
            if isinstance(entry, Transfer) and entry.direction is Direction.SEND:
                way = costs.route(entry).resources
                seconds.setdefault(way, []).append(costs.transfer_bytes(entry) / 125e6)
                due.setdefault(way, []).append(board.due_s(entry.message, 0.0))
    board.close()
    for way, entries in due.items():  # each way was busy without a gap from 5 s on
        assert max(entries) == pytest.approx(5.0 + sum(seconds[way]) + 1e-3)
        assert len(set(entries)) == len(entries)


def test_what_is_waited_for_from_another_host_is_due_when_it_is_here(tmp_path):
    """The clock of a device may lag that of its host: a wait by that one alone would cost it nothing."""
    costs = costs_of(tmp_path, two_pipelines())
    path = tmp_path / "board"
    Board.create(path, costs)
    sender, send = next(
        (rank, entry)
        for rank, entries in enumerate(costs.program.ranks)
        for entry in entries
        if isinstance(entry, Transfer) and entry.direction is Direction.SEND
    )
    receiver = costs.program.rank_of(send.pipeline, send.peer_stage)
    there, here = Board(path, costs, local=[sender]), Board(path, costs, local=[receiver])
    assert there.send(send, 5.0) == 5.0  # the real link takes what it takes
    before_s = time.monotonic()
    assert before_s <= here.due_s(send.message, before_s - 0.02) <= time.monotonic()
    assert here.due_s(send.message, time.monotonic()) == 0.0
    here.join(Norm(), receiver, 0, 5.0)
    assert before_s <= here.collective_due_s(Norm(), receiver) <= time.monotonic()
    for board in (there, here):
        board.close()


# ---- what a run writes of both clocks


def test_what_is_called_measured_is_on_the_clock_of_the_host(tmp_path):
    plan, profile = chain_plan("bert-tiny", [0, 3, 5, 8], 4), made_up_profile("bert-tiny", EMULATED)
    report, _ = run(tmp_path, plan, Settings("bert-tiny", 3, save=False), profile, EMULATED_CLUSTER)
    traces = RunFolder(tmp_path / "run").read_traces()
    assert list(traces) == ["predicted", "measured", "device clocks"]
    measured, devices = traces["measured"].events, traces["device clocks"].events
    pairs = {
        (event.rank, str(event.instruction)): (event, other)
        for event in measured
        for other in devices
        if (event.rank, event.instruction) == (other.rank, other.instruction)
    }
    assert len(pairs) == len(measured) == len(devices)
    for event, other in pairs.values():  # a device's clock is never ahead of its host's
        if isinstance(event.instruction, Compute | Norm | Step):
            assert event.end_s >= other.end_s - 1e-6 and event.start_s >= other.start_s - 1e-6
    ends = [event.end_s for event in measured if isinstance(event.instruction, Step)]
    assert max(ends) <= report.step_s_all[-1] + 1e-6
