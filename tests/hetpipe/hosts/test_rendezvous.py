import os
import socket
from pathlib import Path

import pytest

from cost_model.cluster import Cluster
from cost_model.cluster_file import cluster_from_data
from cost_model.errors import InputError
from hetpipe.hosts.own_interface import interface_of, own_addresses
from hetpipe.hosts.rendezvous import (
    SharedFile,
    check_trusted,
    leaders_number,
    leads,
    own_node,
    parse_rendezvous,
)


def cluster(*hosts: tuple[str, str | None]) -> Cluster:
    nodes = [
        {
            "name": name,
            "devices": [{"kind": "emulated", "memory": "1 GiB"}],
            **({"host": host} if host else {}),
        }
        for name, host in hosts
    ]
    return cluster_from_data(
        {"network": {"bandwidth": "1 Gbit/s", "latency": "1 ms"}, "nodes": nodes}, "test"
    )


TWO = cluster(("big", "127.0.0.1"), ("small", "127.0.0.2"))


@pytest.mark.parametrize(
    "text", ["big:29500", "tcp://big", "tcp://big:0", "tcp://big:70000", "tcp:// big:1", "file://x", ""]
)
def test_what_is_no_meeting_place_is_refused(text: str):
    with pytest.raises(InputError, match="tcp://HOST:PORT"):
        parse_rendezvous(text)


def test_an_address_or_a_file():
    assert parse_rendezvous("tcp://[fe80::1]:29500").address == ("fe80::1", 29500)
    assert parse_rendezvous("file:///shared/meet").file == Path("/shared/meet")


def test_an_address_of_ipv6_is_one_in_the_cluster_file_and_in_messages():
    nodes = cluster(("big", "::1"), ("small", "fd00::2"))
    assert leads(("0::1", 1), nodes, "big")
    assert not leads(("fd00::2", 1), nodes, "big")
    assert str(parse_rendezvous("tcp://[fd00::2]:29500")) == "tcp://[fd00::2]:29500"


def test_the_node_whose_name_or_host_is_named_leads():
    for host in ("big", "127.0.0.1"):
        assert leads((host, 1), TWO, "big")
        assert not leads((host, 1), TWO, "small")


def test_without_such_a_node_the_host_that_has_the_address_leads():
    nodes = cluster(("big", None))
    assert leads(("127.0.0.1", 1), nodes, "big")
    assert not leads(("192.0.2.1", 1), nodes, "big")


def test_loopback_names_no_host_of_several():
    with pytest.raises(InputError, match="which every host has for itself"):
        leads(("localhost", 1), cluster(("big", None), ("small", None)), "big")
    with pytest.raises(InputError, match="by which no other reaches it"):
        leaders_number("localhost")
    with pytest.raises(InputError, match="no address of this host"):
        leaders_number("192.0.2.1")


def test_a_host_finds_its_node_by_its_name():
    here = socket.gethostname()
    assert own_node(cluster(("big", "elsewhere"), ("small", here)), None) == "small"
    assert own_node(TWO, "big") == "big"
    with pytest.raises(InputError, match='did you mean "big"'):
        own_node(TWO, "bog")
    with pytest.raises(InputError, match="no node is called so in the cluster file; give --node"):
        own_node(TWO, None)


def test_an_outer_network_has_to_be_vouched_for():
    check_trusted("127.0.0.1", trusts=False)
    check_trusted("192.0.2.1", trusts=True)
    with pytest.raises(InputError, match="give --trust-network"):
        check_trusted("192.0.2.1", trusts=False)


def test_the_first_to_make_the_file_leads_and_the_others_read_where(tmp_path: Path):
    first, second = SharedFile(tmp_path / "meet"), SharedFile(tmp_path / "meet")
    assert first.make()
    assert not second.make()
    with pytest.raises(InputError, match=r"nobody wrote an address there within 0\.01 s"):
        second.read(0.01)
    first.write(("10.0.0.1", 29500))
    assert second.read(5.0) == ("10.0.0.1", 29500)
    second.remove()
    assert (tmp_path / "meet").exists()
    first.remove()
    assert not (tmp_path / "meet").exists()


@pytest.mark.parametrize("content", ["[]\n", '{"host": 1}\n', "x" * 9000 + "\n", "[" * 4000 + "\n"])
def test_a_file_of_something_else_is_refused(tmp_path: Path, content: str):
    (tmp_path / "meet").write_text(content)
    with pytest.raises(InputError, match=r"holds no address of a leader|nobody wrote an address"):
        SharedFile(tmp_path / "meet").read(0.01)


def test_links_and_pipes_at_the_place_are_not_followed(tmp_path: Path):
    (tmp_path / "target").write_text('{"host": "evil", "port": 1}\n')
    (tmp_path / "link").symlink_to(tmp_path / "target")
    link = SharedFile(tmp_path / "link")
    assert not link.make()
    with pytest.raises(InputError, match="cannot be read"):
        link.read(0.01)
    (tmp_path / "dangling").symlink_to(tmp_path / "made")
    assert not SharedFile(tmp_path / "dangling").make()
    assert not (tmp_path / "made").exists()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="is no file"):
        SharedFile(tmp_path / "pipe").read(0.01)


def test_interfaces_are_found_by_their_addresses():
    assert interface_of("127.0.0.1") == "lo"
    for number in own_addresses():
        assert interface_of(number) != "lo"
    with pytest.raises(InputError, match=r"no interface of this host has 192\.0\.2\.1"):
        interface_of("192.0.2.1")
