"""Ranks go by one clock, also where hosts count their seconds from different moments."""

import json
import os
import shutil
import subprocess
import sys
from typing import Any

import pytest
from torch.distributed import TCPStore

import host_mains
from hetpipe.runtime.processes import run_ranks
from hetpipe.training.common_clock import CommonClock, Reading
from hetpipe.training.meeting import LEAD_S
from places import ROOT, SUPPORT

FAR_S = 100_000


def clocks(*launcher: str) -> list[dict[str, Any]]:
    """What ranks 0, 1 here and 2, 3 of another launcher say of their clocks, by rank."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, str(SUPPORT / "host_mains.py"), str(store.port), "clocks", "2", "3"]
    other = subprocess.Popen(
        [*launcher, *command],
        env={**os.environ, "PYTHONPATH": f"{SUPPORT}{os.pathsep}{ROOT}"},
        stdout=subprocess.PIPE,
        text=True,
    )
    events: list[dict[str, Any]] = []
    run_ranks(host_mains.tell_clocks, (), host_mains.group_of(store.port, (0, 1)), events.append)
    events += json.loads(other.communicate(timeout=60)[0])
    return sorted(events, key=lambda event: event["rank"])


def test_on_one_host_the_clock_is_the_hosts_to_the_last_bit():
    found = clocks()
    assert [list(event["figures"]) for event in found] == [[0.0, 0.0, 0.0]] * 4
    assert {event["lead_s"] for event in found} == {LEAD_S}
    assert len({event["own_start_s"] for event in found}) == 1


def can_shift() -> bool:
    tried = ["unshare", "--time", "--fork", "--monotonic", str(FAR_S), "true"]
    return shutil.which("unshare") is not None and subprocess.run(tried, capture_output=True).returncode == 0


@pytest.mark.skipif(not can_shift(), reason="needs the right to make a time namespace")
def test_a_host_whose_clock_began_a_day_before_starts_at_the_same_moment():
    found = clocks("unshare", "--time", "--fork", "--monotonic", str(FAR_S))
    assert [list(event["figures"]) for event in found[:2]] == [[0.0, 0.0, 0.0]] * 2
    for event in found[2:]:
        offset_s, _, error_s = event["figures"]
        assert abs(offset_s + FAR_S) <= error_s < 1.0
        assert event["slept_s"] < 10  # by the host's own clock it would be a day
    starts = [event["own_start_s"] for event in found]
    assert starts[2] - starts[0] == pytest.approx(FAR_S, abs=2.0)


def test_drift_is_learnt_and_followed():
    clock = CommonClock(first=0, rank=1, others=(1,))
    clock._take(Reading(100.0, 5.0, 0.001))
    clock._take(Reading(200.0, 5.01, 0.001))
    assert clock.drift == pytest.approx(1e-4)
    assert clock.common_s(300.0) == pytest.approx(305.02)
    assert clock.own_s(clock.common_s(1234.5)) == pytest.approx(1234.5)
