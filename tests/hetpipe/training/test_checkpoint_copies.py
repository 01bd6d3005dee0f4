"""Layers of a checkpoint are brought to two hosts, as they were written."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import copy_mains
from cost_model.errors import InputError
from hetpipe.runtime.processes import RankGroup, run_ranks
from hetpipe.training.checkpoint_copies import Hosts

GROUP = RankGroup(("a/0", "b/0", "c/0", "a/1", "c/1"), (1,) * 5, timeout_s=60.0)


def bring(root: Path, spoilt: int | None = None) -> dict[str, str]:
    """The hash of each file by name."""
    events: list[dict[str, Any]] = []
    run_ranks(copy_mains.bring, (str(root), spoilt), GROUP, events.append)
    return {name: sha256 for event in events for name, sha256 in event["files"]}


def test_the_leader_and_one_other_host_have_all_layers_and_the_rest_nothing(tmp_path: Path):
    files = bring(tmp_path)
    assert len(files) == 10
    for host in ("0", "2"):
        found = {
            path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (tmp_path / host).iterdir()
        }
        assert found == files
    assert not (tmp_path / "1").exists()


def test_a_layer_that_arrives_otherwise_is_refused(tmp_path: Path):
    with pytest.raises(InputError, match=r"layer-001.safetensors is damaged: .* sent by rank 1"):
        bring(tmp_path, spoilt=1)


def test_on_one_host_nothing_travels():
    one = Hosts((0, 0, 0), 0)
    assert one.completing == (0,)
    assert [one.takers(rank) for rank in range(3)] == [()] * 3


@given(st.lists(st.integers(0, 4), min_size=2, max_size=12), st.data())
def test_without_any_one_host_all_layers_are_left(host_of, data):
    """host_of: by rank; each rank owns a layer."""
    ranks = range(len(host_of))
    first = data.draw(st.sampled_from(ranks))
    hosts = Hosts(tuple(min(other for other in ranks if host_of[other] == host) for host in host_of), first)
    held = {
        rank: {host_of[taker] for taker in hosts.takers(rank)}
        | ({host_of[rank]} & {host_of[kept] for kept in hosts.completing})
        for rank in ranks
    }
    several = len(set(host_of)) > 1
    assert all(host_of[first] in found and len(found) == (2 if several else 1) for found in held.values())
    for lost in set(host_of) if several else ():
        left = [host for host in set(host_of) - {lost} if all(host in found for found in held.values())]
        assert left, "no host has them all"
