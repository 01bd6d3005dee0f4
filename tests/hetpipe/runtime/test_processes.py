import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rank_mains
from cost_model.errors import InputError
from hetpipe.runtime import processes, rank_watch
from hetpipe.runtime.processes import (
    RankGroup,
    WorkerLostError,
    _raise_first,
    _watch,
    run_ranks,
    use_interface,
)
from places import ROOT, SUPPORT

GROUP = RankGroup(("big/0", "small/0", "small/1"), (1, 1, 1))
SOON_S = 60.0  # far below the 600 s for which a collective waits, far above what a loaded host needs


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def wait_until_none_runs(pids: list[int]) -> None:
    deadline = time.monotonic() + SOON_S
    while left := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < deadline, f"left over: {left}"
        time.sleep(0.02)


def run_failing(kind: str, others: str = "wait") -> None:
    """Run the ranks of `rank_mains.fail`; checks that none is left, whatever they raise."""
    events: list[dict[str, Any]] = []
    there_s: list[float] = []  # a busy machine may take long until they are

    def told(event: dict[str, Any]) -> None:
        events.append(event)
        there_s.append(time.monotonic())

    try:
        run_ranks(rank_mains.fail, (kind, others), GROUP, told)
    finally:
        assert len(events) == 3
        assert time.monotonic() - there_s[-1] < SOON_S
        wait_until_none_runs([event["pid"] for event in events])


def test_the_first_error_of_a_rank_ends_all_and_is_shown():
    with pytest.raises(WorkerLostError) as caught:
        run_failing("error")
    assert str(caught.value) == "rank 1 (small/0) failed: ZeroDivisionError: division by zero"


def test_an_input_error_of_a_rank_stays_one():
    with pytest.raises(InputError) as caught:
        run_failing("input error")
    assert str(caught.value) == "no such file: corpus.txt"


def test_a_full_device_is_named():
    with pytest.raises(WorkerLostError, match=r"rank 1 \(small/0\) failed: OutOfMemoryError: small/0: 9"):
        run_failing("memory")


def test_a_killed_rank_is_reported():
    with pytest.raises(WorkerLostError) as caught:
        run_failing("kill")
    assert str(caught.value) == "rank 1 (small/0) was killed by signal 9"


def test_a_rank_that_crashed_is_reported_with_what_shows_where():
    with pytest.raises(WorkerLostError) as caught:
        run_failing("crash")
    assert str(caught.value) == (
        "rank 1 (small/0) was killed by signal 11 (Segmentation fault in compiled code; "
        "PYTHONFAULTHANDLER=1 shows where)"
    )


def test_a_rank_that_the_kernel_killed_for_want_of_memory_is_told_from_others(tmp_path, monkeypatch):
    counts = tmp_path / "vmstat"
    counts.write_text("oom_kill 3\n")
    monkeypatch.setattr(rank_watch, "_COUNTS", counts)

    def killed(event: dict[str, Any]) -> None:
        counts.write_text("oom_kill 4\n")

    with pytest.raises(WorkerLostError, match=r"rank 1 .* by signal 9 when this host was out of memory$"):
        run_ranks(rank_mains.fail, ("kill", "wait"), GROUP, killed)


def test_of_several_errors_the_earliest_is_raised_whichever_is_read_first(tmp_path: Path):
    """Rank 0 fails because of rank 1, and its report lies in the first pipe that is looked at."""
    pipes = [multiprocessing.Pipe() for _ in range(3)]
    failed = {"event": "error", "type": "RuntimeError"}
    pipes[0][1].send({**failed, "text": "RuntimeError: connection closed by peer", "when_s": 7.25})
    pipes[1][1].send({**failed, "text": "RuntimeError: the cause", "when_s": 7.0})
    pipes[2][1].send({"event": "done"})
    for _, rank_end in pipes:
        rank_end.close()
    with pytest.raises(WorkerLostError) as caught:
        seen = rank_watch.Watch(tmp_path / "beats", GROUP.here, lambda rank: False)
        _watch([], [launcher_end for launcher_end, _ in pipes], GROUP, lambda event: None, seen)
    assert str(caught.value) == "rank 1 (small/0) failed: RuntimeError: the cause"


def test_a_rank_that_was_lost_is_named_and_not_one_that_missed_it_and_said_so_before():
    missed = {"event": "error", "rank": 0, "type": "PeerError", "text": "waited for rank 1", "when_s": 7.0}
    lost = {"event": "error", "rank": 1, "type": "", "text": "rank 1 was killed", "when_s": 7.25}
    with pytest.raises(WorkerLostError, match=r"^rank 1 was killed$") as caught:
        _raise_first([missed, lost], GROUP, ())
    assert caught.value.report["rank"] == 1  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize("others", ["stopped", "busy"])
def test_ranks_that_do_not_answer_are_ended_with_the_one_that_failed(others):
    with pytest.raises(WorkerLostError, match=r"rank 1 \(small/0\) failed: ZeroDivisionError"):
        run_failing("error", others)


SCRIPT = """
import signal
import sys
from hetpipe.runtime.processes import RankGroup, run_ranks
import rank_mains

if __name__ == "__main__":
    # tests that were started in the background hand down an ignored SIGINT
    signal.signal(signal.SIGINT, signal.default_int_handler)
    run_ranks(rank_mains.wait_forever, (sys.argv[1],), RankGroup(("a/0", "a/1", "a/2"), (1, 1, 1)))
"""


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A process that has started three ranks, which hang; and their process ids."""
    (tmp_path / "script.py").write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "script.py"), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": f"{SUPPORT}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    pids: list[int] = []
    try:
        deadline = time.monotonic() + 60
        files = [tmp_path / f"rank-{rank}" for rank in range(3)]
        while not all(path.exists() for path in files):
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.02)
        pids = [int(path.read_text()) for path in files]
        yield process, list(pids)
        wait_until_none_runs(pids)
    finally:
        process.kill()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("whom", ["the launcher", "the whole process group"])
def test_ctrl_c_ends_all_ranks(launcher, whom):
    process, _ = launcher
    if whom == "the launcher":
        process.send_signal(signal.SIGINT)
    else:  # as a terminal does
        os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=SOON_S)
    assert process.returncode == -signal.SIGINT
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert errors.count("Traceback") == 1  # no rank prints one


@pytest.mark.slow
def test_no_rank_outlives_a_killed_launcher(launcher):
    process, pids = launcher
    assert all(map(is_running, pids))
    process.kill()


def test_a_rank_whose_launcher_ended_as_it_started_says_nothing(tmp_path: Path, capfd):
    """The launcher was interrupted before it knew of it, and its folder is gone."""
    gone = tmp_path / "gone"
    context = multiprocessing.get_context("spawn")
    mine, its = context.Pipe()
    main = rank_mains.leave_at_once
    rank = context.Process(
        target=processes._rank_main, args=(its, 0, GROUP, gone / "store", (gone / "beats", 0), main, (), "")
    )
    rank.start()
    rank.join(20.0)
    mine.close()
    assert rank.exitcode == 1
    assert capfd.readouterr().err == ""


@pytest.mark.slow
def test_a_killed_rank_ends_the_script(launcher):
    process, pids = launcher
    os.kill(pids[2], signal.SIGKILL)
    _, errors = process.communicate(timeout=SOON_S)
    assert "WorkerLostError: rank 2 (a/2) was killed by signal 9" in errors


def test_a_rank_that_is_done_at_once_is_missed_by_none_that_comes_late(tmp_path: Path) -> None:
    """Of six ranks, gloo's own meeting failed nine times in ten."""
    for late in (0, 1):
        store = rank_mains.OneIsLate(tmp_path / f"store {late}", late)
        run_ranks(rank_mains.leave_at_once, (), RankGroup(tuple("abcdef"), (1,) * 6, store=store))


def test_ranks_of_one_host_listen_on_loopback_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    events: list[dict[str, Any]] = []
    run_ranks(rank_mains.tell_listening, (), GROUP, events.append)
    heard = [address for event in events for address in event["listening"]]
    assert len(heard) >= 3 and all(address.startswith("127.") for address in heard), heard


@pytest.mark.parametrize("given", [None, "ib0"])
def test_gloo_and_nccl_listen_on_one_interface(monkeypatch: pytest.MonkeyPatch, given: str | None):
    """The one that the environment names, else that of the run; by its whole name."""
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    for name in names:
        monkeypatch.setenv(name, "")  # what is there afterwards is put back
        monkeypatch.delenv(name)
        if given is not None:
            monkeypatch.setenv(name, given)
    use_interface("eth0", "cpu:gloo,cuda:nccl")
    assert [os.environ[name] for name in names] == [given or "eth0", given or "=eth0"]


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 10**6])  # within what a pipe holds, and beyond
def test_a_script_that_starts_ranks_as_it_is_read_is_refused(tmp_path: Path, length: int):
    script = tmp_path / "script.py"
    script.write_text(
        "import rank_mains\nfrom hetpipe.runtime.processes import RankGroup, run_ranks\n"
        f"run_ranks(rank_mains.tell_listening, ('x' * {length},), RankGroup(('a', 'b'), (1, 1)))\n"
    )
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=SOON_S)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].startswith(
        "cost_model.errors.InputError: the script starts training whenever it is read"
    )
    assert ended.stderr.count("Traceback") == 1
