"""Launchers on several hosts, each with some of the ranks of one group."""

import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
from torch.distributed import TCPStore

import host_mains
from hetpipe.runtime.processes import WorkerLostError, run_ranks
from places import ROOT, SUPPORT


def second_host(port: int, failing: int | None, *local: int) -> "subprocess.Popen[str]":
    """Start the launcher of the second host; it prints its events as JSON."""
    return subprocess.Popen(
        [sys.executable, str(SUPPORT / "host_mains.py"), str(port), json.dumps(failing), *map(str, local)],
        env={**os.environ, "PYTHONPATH": f"{SUPPORT}{os.pathsep}{ROOT}"},
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def test_two_launchers_train_as_one_group(store: TCPStore):
    first: list[dict[str, Any]] = []
    other = second_host(store.port, None, 0, 3)
    run_ranks(host_mains.add_up, (None,), host_mains.group_of(store.port, (1, 2)), first.append)
    second = json.loads(other.communicate(timeout=60)[0])
    assert sorted(event["rank"] for event in first) == [1, 2]
    assert sorted(event["rank"] for event in second) == [0, 3]
    assert {event["sum"] for event in first + second} == {15.0}


def test_the_error_of_a_rank_has_its_global_number(store: TCPStore):
    other = second_host(store.port, 3, 2, 3)
    with pytest.raises(WorkerLostError):  # whom the others have lost
        run_ranks(host_mains.add_up, (3,), host_mains.group_of(store.port, (0, 1)))
    (told,) = json.loads(other.communicate(timeout=60)[0])
    assert told["error"] == "rank 3 (small/1) failed: ZeroDivisionError: division by zero"


def test_an_error_on_another_host_ends_the_ranks_here(store: TCPStore):
    """These two ranks wait for the two of a host that never starts them."""
    alarm, other_end = multiprocessing.Pipe()
    text = "rank 3 (small/1) was killed by signal 9"
    told = {"event": "error", "rank": 3, "type": "", "text": text, "when_s": time.monotonic()}
    threading.Timer(1.0, other_end.send, (told,)).start()
    group = host_mains.group_of(store.port, (0, 1))
    with pytest.raises(WorkerLostError) as caught:
        run_ranks(host_mains.add_up, (None,), group, alarm=alarm)
    assert str(caught.value) == text
    assert caught.value.report["rank"] == 3  # type: ignore[attr-defined]
