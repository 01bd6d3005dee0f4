"""Weights that GPUs fetch through their hosts' memory: seconds and pinned bytes by hand, and what is told."""

import math
from dataclasses import replace

import pytest

from cost_model.cluster import CPU, Cluster, Device, HostMemory, Link, Node
from cost_model.errors import InfeasibleError
from cost_model.host_memory import GPU_HOST_LINK
from cost_model.layer_profile import LayerProfile, LayerTimes
from cost_model.profile import KindProfile, ModelProfile
from cost_model.sharding import OwnerRange
from hetpipe.program.costs import ProgramCosts, check_memory
from hetpipe.reporting.tables import plan_sentences
from hetpipe.simulation.schedule_selection import lower
from hetpipe.simulation.simulator import simulate
from partition.estimates.host_fetches import HostFetches, host_fetches
from partition.estimates.optimizer_sharding import fits
from partition.estimates.plan_memory import host_bytes, host_uses
from partition.plan import Pipeline, Plan, Stage

GPU = "A100"
LAYER_BYTES = 40.0


def three_layers() -> ModelProfile:
    """Three layers of 40 bytes, F 1 s and B 2 s on any kind."""
    times = LayerTimes((1.0,), (2.0,))
    layers = tuple(LayerProfile(f"layer{index}", LAYER_BYTES, 1.0, 1.0) for index in range(3))
    kinds = {kind: KindProfile("measured", (1,), (times,) * 3) for kind in (GPU, CPU)}
    return ModelProfile("three", 1, "float32", layers, kinds)


def three_nodes(host: HostMemory | None, kinds: tuple[str, str, str] = (GPU, GPU, GPU)) -> Cluster:
    """Nodes of a device each, which lend the same; messages between them take no time."""
    nodes = tuple(
        Node(name, (Device(f"{name}/0", name, kind, 1e4),), host_memory=host)
        for name, kind in zip("abc", kinds, strict=True)
    )
    return Cluster("three", Link(0.0, 1e30), nodes)


def lent(memory_bytes: float = 1e4) -> HostMemory:
    """Memory over a link on which a layer takes a second."""
    return HostMemory(memory_bytes, Link(0.0, LAYER_BYTES))


def plan_of(zero: int = 3) -> Plan:
    """A sample through a/0, which owns the first layer, and b/0, which owns the others; one on c/0."""
    cut = Pipeline(1, 1, (Stage(("a/0",), (0, 1), 1), Stage(("b/0",), (1, 3), 1)))
    whole = Pipeline(1, 1, (Stage(("c/0",), (0, 3), 1),))
    return Plan("manual", "three", 2, (cut, whole), zero, ("a/0", "b/0", "b/0"))


def costs_of(plan: Plan, cluster: Cluster) -> ProgramCosts:
    return ProgramCosts(lower(plan, three_layers(), cluster), three_layers(), cluster)


def test_owners_pin_what_is_fetched_and_others_what_comes():
    found = host_fetches(plan_of(), three_layers(), three_nodes(lent()))
    # c/0 fetches three layers, two of which are under way at once
    assert found == {"a/0": HostFetches(40, 0), "b/0": HostFetches(80, 0), "c/0": HostFetches(0, 80)}
    held = host_bytes(plan_of(), three_layers(), three_nodes(lent()))
    assert held == {"a": 40.0, "b": 80.0, "c": 80.0}


def test_owners_of_ranges_pin_these_and_fetch_the_others():
    ranges = OwnerRange(0, "a/0", 0.0, 0.75), OwnerRange(0, "c/0", 0.75, 1.0)
    found = host_fetches(replace(plan_of(), owner_ranges=ranges), three_layers(), three_nodes(lent()))
    # the first layer comes to a/0 by a quarter, and to c/0 by three, less than each of the other two
    assert found == {"a/0": HostFetches(30, 10), "b/0": HostFetches(80, 0), "c/0": HostFetches(10, 80)}


def test_owners_give_weights_to_the_host_once_a_step():
    costs, free = costs_of(plan_of(), three_nodes(lent())), costs_of(plan_of(), three_nodes(None, (CPU,) * 3))
    assert [costs.step_s(rank) - free.step_s(rank) for rank in range(3)] == [1.0, 2.0, 0.0]


def test_what_is_fetched_comes_from_the_host_to_the_gpu():
    ends = {
        str(event.instruction): event.end_s
        for event in simulate(costs_of(plan_of(), three_nodes(lent()))).events
        if event.rank == 2
    }
    # buckets by falling layer: 2 is the first layer. A second each; that of the third is asked for after F
    assert (ends["GATHER2.0"], ends["GATHER1.0"], ends["GATHER0.0"]) == (1.0, 1.0, 3.0)
    assert (ends["1:0F0@0"], ends["1:0F0@1"], ends["1:0F0@2"]) == (2.0, 3.0, 4.0)


def test_devices_of_a_node_share_its_link():
    apart, (a, b, c) = three_nodes(lent()), three_nodes(lent()).nodes
    owners = Node("a", (*a.devices, replace(b.devices[0], node="a")), Link(0.0, 1e30), host_memory=lent())
    together = replace(apart, nodes=(owners, c))
    costs, free = costs_of(plan_of(), together), costs_of(plan_of(), three_nodes(None, (CPU,) * 3))
    assert [costs.step_s(rank) - free.step_s(rank) for rank in range(3)] == [2.0, 4.0, 0.0]
    assert host_bytes(plan_of(), three_layers(), together) == {"a": 120.0, "c": 80.0}


def test_only_gpus_copy():
    cluster = three_nodes(lent(), (CPU, GPU, CPU))
    assert host_fetches(plan_of(), three_layers(), cluster) == {"b/0": HostFetches(80, 0)}
    costs = costs_of(plan_of(), cluster)
    ends = {(event.rank, str(event.instruction)): event.end_s for event in simulate(costs).events}
    assert ends[2, "GATHER2.0"] == pytest.approx(0.0)


def test_nothing_passes_hosts_where_all_fetch_together_or_gradients_alone_are_sharded():
    cluster, profile = three_nodes(lent()), three_layers()
    whole = tuple(Pipeline(1, 1, (Stage((f"{name}/0",), (0, 3), 1),)) for name in "ab")
    together = Plan("manual", "three", 2, whole, 3, ("a/0", "a/0", "b/0"))
    assert host_fetches(together, profile, cluster) == host_fetches(plan_of(2), profile, cluster) == {}


def test_memory_that_is_lent_must_hold_it():
    profile, cluster = three_layers(), three_nodes(lent(79.0))
    with pytest.raises(
        InfeasibleError, match=r"80 bytes of states, weights and .* node 'b', .* is 79; 1 bytes are missing"
    ):
        check_memory(plan_of(), profile, cluster)
    assert not fits(plan_of(), profile, cluster)
    assert fits(plan_of(), profile, three_nodes(lent(80.0)))
    assert host_uses(plan_of(), profile, three_nodes(None)) == {}  # nobody says how much there is
    check_memory(plan_of(), profile, three_nodes(None))


def test_a_link_that_the_file_does_not_state_is_taken_for_one_and_told():
    profile, stated, silent = three_layers(), three_nodes(lent()), three_nodes(None)
    costs, free = costs_of(plan_of(), silent), costs_of(plan_of(), three_nodes(None, (CPU,) * 3))
    assert math.isclose(costs.step_s(1) - free.step_s(1), GPU_HOST_LINK.transfer_s(80.0))
    (told,) = [line for line in plan_sentences(plan_of(), profile, silent) if "pinned" in line]
    assert told == (
        "sharded weights are fetched through pinned memory, 40 B of a, 80 B of b, 80 B of c, at 12 GB/s each "
        "way (taken for PCIe 3: the cluster file has no host_link)"
    )
    (told,) = [line for line in plan_sentences(plan_of(), profile, stated) if "pinned" in line]
    assert "taken for" not in told
