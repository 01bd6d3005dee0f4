"""Measured links between nodes in the text of a cluster.toml."""

import tomllib

import pytest

from cost_model.cluster import Link, NodeLink
from cost_model.cluster_file import cluster_from_data, with_links
from cost_model.errors import InputError

LINKED = """# ours
name = "two"
[[links]]  # the old switch
nodes = ["b", "a"]
bandwidth = "1 Gbit/s"
latency = "1 ms"
[network]
bandwidth = "10 Gbit/s"
latency = "0 ms"
[[nodes]]
name = "a"
devices = [{ kind = "cpu", memory = "1 GiB" }]
[[nodes]]
name = "b"
devices = [
    { kind = "cpu", memory = "1 GiB" },
]
[[nodes]]
name = "c"
devices = [{ kind = "cpu", memory = "1 GiB" }]  # the last
"""


def test_measured_links_replace_those_of_the_file_and_the_rest_stays():
    new = [NodeLink(("a", "b"), Link(0.0005, 1.25e7)), NodeLink(("a", "c"), Link(0.002, 1.25e6))]
    text = with_links(LINKED, new, "cluster.toml")
    found = cluster_from_data(tomllib.loads(text), "cluster.toml")
    before = cluster_from_data(tomllib.loads(LINKED), "cluster.toml")
    assert (found.nodes, found.network) == (before.nodes, before.network)
    assert found.link("b/0", "a/0") == Link(0.0005, 1.25e7)
    assert found.link("a/0", "c/0") == Link(0.002, 1.25e6)
    assert found.link("b/0", "c/0") == before.network
    assert text.startswith("# ours\n")
    assert "# the last" in text
    assert "old switch" not in text
    again = with_links(text, new, "cluster.toml")
    assert cluster_from_data(tomllib.loads(again), "cluster.toml") == found


def test_links_that_cannot_be_replaced_are_refused():
    inline = 'links = [{ nodes = ["a", "b"], bandwidth = "1 Gbit/s", latency = "1 ms" }]\n'
    text = inline + LINKED.replace(LINKED[LINKED.index("[[links]]") : LINKED.index("[network]")], "")
    with pytest.raises(InputError, match=r"cluster.toml: give each link as a table of its own, under \[\[li"):
        with_links(text, [NodeLink(("a", "b"), Link(0.0, 1.0))], "cluster.toml")
