"""How the gradients of each run of layers are summed, as a HeteroG plan has it: per group, by cost."""

from cost_model.cluster import Cluster, Device, Link, Node
from cost_model.layer_profile import LayerProfile, LayerTimes
from cost_model.profile import KindProfile, ModelProfile
from hetpipe.program.costs import ProgramCosts
from hetpipe.reporting.sums_table import summed_gradients, sums_table
from hetpipe.reporting.tables import as_text
from hetpipe.simulation.schedule_selection import lower
from partition.plan import Pipeline, Plan, Stage


def three_groups(zero: int = 0) -> tuple[ProgramCosts, ModelProfile]:
    """Layers of 4, 1e9 and 4e6 bytes on four devices, the middle one on the first alone; 1 ms, 1 GB/s."""
    times = LayerTimes((1.0,), (2.0,))
    sizes = (4.0, 1e9, 4e6)
    layers = tuple(LayerProfile(f"layer{index}", held, 1.0, 1.0) for index, held in enumerate(sizes))
    profile = ModelProfile(
        "three", 1, "float32", layers, {"one": KindProfile("measured", (1,), (times,) * 3)}
    )
    nodes = tuple(Node(name, (Device(f"{name}/0", name, "one", 1e12),)) for name in "abcd")
    cluster = Cluster("three", Link(1e-3, 1e9), nodes)
    pipelines = tuple(
        Pipeline(
            1,
            1,
            tuple(
                Stage((device,), (layer, layer + 1), 1)
                for layer, device in enumerate((f"{name}/0", "a/0", f"{name}/0"))
            ),
        )
        for name in "abcd"
    )
    owners = ("b/0", "a/0", "c/0") if zero else None
    plan = Plan("heterog", "three", 4, pipelines, zero=zero, state_owners=owners)
    return ProgramCosts(lower(plan, profile, cluster), profile, cluster), profile


def test_small_gradients_go_to_a_parameter_server_and_large_ones_round_a_ring():
    # of 4 bytes two rounds there and two back take 4 ms, the six of a ring 6 ms; of 4e6 bytes the ring's six
    # take 2 ms each, the others 5 ms
    costs, profile = three_groups()
    small, large = summed_gradients(costs)
    assert (small.layers, large.layers) == ((0,), (2,))  # the middle one is on one device, and not summed
    assert small.way == "reduced to a/0, broadcast from it (parameter server)"
    assert large.way == "ring all-reduce" and large.num_bytes == 4e6
    assert small.devices == large.devices == ("a/0", "b/0", "c/0", "d/0")
    (table,) = sums_table(costs, profile)
    assert "layer2" in as_text(table) and "layer1" not in as_text(table)


def test_owners_of_states_are_named_and_what_nobody_shares_is_no_table():
    costs, _ = three_groups(zero=1)
    assert [each.way for each in summed_gradients(costs)] == [
        "reduced to b/0, which owns the states",
        "reduced to c/0, which owns the states",
    ]
    alone, profile = three_groups()
    one = Plan("single", "three", 4, (Pipeline(1, 4, (Stage(("a/0",), (0, 3), 1),)),))
    program = lower(one, profile)
    assert sums_table(alone.of(program), profile) == []
