"""Who may take part, as it is decided before anybody is spoken to."""

import json
from pathlib import Path

import pytest

from cost_model.cluster import Cluster
from cost_model.cluster_file import read_cluster
from cost_model.errors import InputError
from hetpipe.commands.several_hosts import Asked, HostOptions, follow_leader, place_of
from hetpipe.models.names import model_entry
from runs import made_up_profile

TWO = """
[network]
bandwidth = "1 Gbit/s"
latency = "0.1 ms"
[[nodes]]
name = "big"
host = "{leader}"
devices = [{{ kind = "emulated", memory = "1 GiB" }}]
[[nodes]]
name = "small"
host = "127.0.0.2"
devices = [{{ kind = "emulated", memory = "1 GiB" }}]
"""
OUTER, INNER = "192.0.2.1", "127.0.0.1"


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text("0123456789abcdef")
    path.chmod(0o600)
    return path


def two(folder: Path, leader: str) -> Cluster:
    (folder / "cluster.toml").write_text(TWO.format(leader=leader))
    return read_cluster(folder / "cluster.toml")


@pytest.mark.parametrize("by_file", [False, True])
def test_who_follows_has_to_vouch_for_the_network_too(tmp_path: Path, token: Path, by_file: bool):
    """Its own processes listen there for tensors as well."""

    def rendezvous(leader: str) -> str:
        if not by_file:
            return f"tcp://{leader}:29500"
        (tmp_path / "meet").write_text(json.dumps({"host": leader, "port": 29500}) + "\n")
        return f"file://{tmp_path / 'meet'}"

    asked = HostOptions(rendezvous(OUTER), "small", token)
    with pytest.raises(InputError, match=f"--trust-network if only hosts that you trust reach {OUTER}"):
        place_of(asked, two(tmp_path, OUTER))
    vouched = place_of(HostOptions(rendezvous(OUTER), "small", token, True), two(tmp_path, OUTER))
    inner = place_of(HostOptions(rendezvous(INNER), "small", token), two(tmp_path, INNER))
    assert vouched is not None and not vouched.leads and vouched.address == (OUTER, 29500)
    assert inner is not None and inner.address == (INNER, 29500)


def test_a_host_that_is_told_to_start_none_ignores_what_is_for_starting_them(tmp_path: Path, token: Path):
    with pytest.raises(InputError, match="--ssh-config is for hosts that are started from here"):
        HostOptions(f"tcp://{INNER}:29500", "small", token, ssh_config=tmp_path / "config")
    told = HostOptions(f"tcp://{INNER}:29500", "small", token, hosts=False, ssh_config=tmp_path / "config")
    place = place_of(told, two(tmp_path, INNER))
    assert place is not None and not place.leads and place.launch is None


def test_a_rendezvous_file_that_is_left_over_is_named(tmp_path: Path, token: Path):
    """Its leader was killed, and answers nobody any more."""
    meet = tmp_path / "meet"
    meet.write_text(json.dumps({"host": INNER, "port": 9}) + "\n")
    cluster = two(tmp_path, INNER)
    place = place_of(HostOptions(f"file://{meet}", "small", token, wait="0.2 s"), cluster)
    assert place is not None and not place.leads
    asked = Asked(cluster, cluster, model_entry("bert-tiny"), {})
    with pytest.raises(InputError, match=f"did not answer within 0.2 s .*; if {meet}, which names it, is "):
        follow_leader(place, asked, lambda part: made_up_profile("bert-tiny"))
    assert meet.exists()
