"""Collectives between ranks, and whose their buffers are once they are over."""

from typing import Any

import runtime_mains
from hetpipe.runtime.processes import RankGroup, run_ranks
from random_cases import MODULES

ROUNDS = 600  # of as many buffers gloo's thread holds 30 to 150 a moment longer than it says


def test_a_collective_on_the_host_leaves_its_buffer_to_the_caller() -> None:
    events: list[dict[str, Any]] = []
    group = RankGroup(("n/0", "n/1"), (1, 1), preload=MODULES)
    run_ranks(runtime_mains.buffers_still_held, (ROUNDS,), group, events.append)
    assert [event["held"] for event in events] == [0, 0]
