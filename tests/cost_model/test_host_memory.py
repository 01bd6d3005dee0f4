"""Memory of the host in cluster files, and what moves there and back take."""

import pytest

from cost_model.cluster import Link
from cost_model.cluster_file import cluster_from_data
from cost_model.errors import InputError
from cost_model.host_memory import offloaded_step_s, room_bytes

LINK = {"bandwidth": "12 GB/s", "latency": "10 us"}


def cluster_with(**keys: object) -> object:
    node = {"name": "a", "devices": [{"kind": "fast", "memory": "10 kB", "count": 2}], **keys}
    return {"driver_memory": "0 B", "network": LINK, "nodes": [node]}


def test_a_node_may_lend_memory_of_its_host():
    plain = cluster_from_data(cluster_with(), "c.toml")
    lent = cluster_from_data(cluster_with(host_memory="64 GB", host_link=LINK), "c.toml")
    assert plain.nodes[0].host_memory is None
    host = lent.node_of("a/1").host_memory
    assert host is not None
    assert (host.memory_bytes, host.link) == (64e9, Link(1e-5, 12e9))
    assert plain.sha256 != lent.sha256
    assert "host_memory" not in plain.to_json()["nodes"][0]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"host_memory": "64 GB"}, "has host_memory and no host_link"),
        ({"host_link": LINK}, "has host_link and no host_memory"),
        ({"host_memory": "0 B", "host_link": LINK}, "must be above zero"),
        ({"host_memory": "1 GB", "host_link": LINK, "host_optimizer": "0 GB/s"}, "makes no step"),
    ],
)
def test_half_of_it_is_refused(keys, said):
    with pytest.raises(InputError, match=said):
        cluster_from_data(cluster_with(**keys), "c.toml")


def test_moves_hide_behind_updates_that_are_longer():
    # 16 parts of 1 byte, moves of 1 s, updates of 2 s: the first comes, then updates, then the last goes
    link = Link(0.0, 1.0)
    assert offloaded_step_s(0.0, 32.0, 16.0, link, num_sharing=1) == 1 + 32 + 1


def test_devices_that_share_the_link_have_a_part_of_it_each():
    # moves of 2 s, updates of 1 s: three rooms let both directions be busy; the last update and move follow
    link = Link(0.0, 1.0)
    assert offloaded_step_s(0.0, 16.0, 16.0, link, num_sharing=2) > 2 * 16
    assert offloaded_step_s(5.0, 1.0, 0.0, link, num_sharing=2) == 6.0


def test_parts_are_at_most_16_mib():
    assert room_bytes(160.0) == 10.0
    assert room_bytes(1e12) == 16 * 2**20
