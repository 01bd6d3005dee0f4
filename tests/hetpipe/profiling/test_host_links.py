"""What round trips of unlike sizes say of each direction, and the real thing between two processes."""

from typing import Any

import pytest

from cost_model.cluster import EMULATED, Device
from cost_model.measured_links import MeasuredLink
from hetpipe.profiling.host_links import both_ways, host_link_rank, mixed_trips, sizes_up_to
from hetpipe.profiling.link_profiler import LATENCY_BYTES
from hetpipe.runtime.processes import RankGroup, run_ranks


def test_each_direction_has_the_bandwidth_that_its_own_messages_had():
    latency_s, there, back = 0.001, 1e6, 4e6
    sizes = sizes_up_to(2**20)
    seconds = {
        (one, other): [2 * latency_s + one / there + other / back] * 3 for one, other in mixed_trips(sizes)
    }
    seconds[LATENCY_BYTES, LATENCY_BYTES] = [2 * latency_s]
    links = both_ways(seconds, sizes)
    for link, bandwidth in zip(links, (there, back), strict=True):
        assert link.latency_s == pytest.approx(latency_s)
        assert link.bandwidth_bytes_per_s == pytest.approx(bandwidth)
        assert link.transfer_s(2**18) == pytest.approx(latency_s + 2**18 / bandwidth, rel=1e-4)


def test_two_processes_measure_what_is_between_them():
    devices = tuple(Device(f"{node}/0", node, EMULATED, 1.0) for node in ("a", "b"))
    found: list[dict[str, Any]] = []
    group = RankGroup(("a/0", "b/0"), (1, 1))
    run_ranks(host_link_rank, (devices,), group, lambda event: found.append(event["found"]))
    assert len(found) == 1
    for way in ("there", "back"):
        link = MeasuredLink(**found[0][way])
        assert 0 < link.latency_s < 0.1
        assert link.bandwidth_bytes_per_s > 1e7
        assert link.message_bytes == sizes_up_to(link.message_bytes[-1])
