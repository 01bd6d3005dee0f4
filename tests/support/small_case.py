"""A small made-up model and cluster with round numbers, and golden files. Shared by tests."""

import os
from collections.abc import Sequence
from dataclasses import replace

from cost_model.cluster import Cluster, Device, Link, Node
from cost_model.layer_profile import LayerProfile, LayerTimes
from cost_model.profile import KindProfile, ModelProfile
from partition.plan import Pipeline, Plan, Stage
from places import GOLDEN

INSTANT = Link(latency_s=0.0, bandwidth_bytes_per_s=1e30)

CLUSTER_TOML = """
reserve = "0 B"
driver_memory = "0 B"
[network]
bandwidth = "320 bit/s"
latency = "0.25 s"
[[nodes]]
name = "a"
devices = [{ kind = "fast", memory = "10 kB" }]
[[nodes]]
name = "b"
devices = [{ kind = "slow", memory = "10 kB" }]
"""
HOST_CLUSTER = CLUSTER_TOML.replace(
    'name = "a"', 'name = "a"\nhost_memory = "2 kB"\nhost_link = { bandwidth = "8 kbit/s", latency = "0 s" }'
)
"""The same, where the host of node a lends 2 kB of memory."""


def check_golden(name: str, text: str) -> None:
    """Compare a text with its golden file; HETPIPE_UPDATE_GOLDEN=1 writes it instead."""
    path = GOLDEN / name
    if os.environ.get("HETPIPE_UPDATE_GOLDEN") == "1":
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), f"{name} differs; HETPIPE_UPDATE_GOLDEN=1 updates it"


def small_profile() -> ModelProfile:
    """Embeddings, two blocks and a tied head on a fast and a slow kind.

    Fast: embeddings 1 + 1 s, blocks 2 + 4 s, head 1 + 2 s for microbatch 1, twice that for 2. Slow: twice
    that.
    """
    seconds = ((1.0, 1.0), (2.0, 4.0), (2.0, 4.0), (1.0, 2.0))

    def kind(factor: float, source: str) -> KindProfile:
        layers = tuple(
            LayerTimes((factor * f, 2 * factor * f), (factor * b, 2 * factor * b)) for f, b in seconds
        )
        return KindProfile(source, (1, 2), layers, optimizer_s_per_byte=factor / 1000)

    return ModelProfile(
        model="made-up",
        sequence_length=8,
        dtype="float32",
        layers=(
            LayerProfile("embeddings", 400.0, 10.0, 20.0, unreached_bytes=40.0),
            LayerProfile("block0", 200.0, 10.0, 50.0, workspace_bytes=5.0),
            LayerProfile("block1", 200.0, 10.0, 50.0, workspace_bytes=5.0),
            LayerProfile("head", 300.0, 0.0, 30.0, tied_to="embeddings", tied_bytes=250.0),
        ),
        kinds={"fast": kind(1.0, "measured"), "slow": kind(2.0, "estimated")},
        links={"fast>slow": Link(latency_s=0.25, bandwidth_bytes_per_s=40.0)},
    )


def small_cluster(fast_bytes: float = 10000.0, slow_bytes: float = 10000.0) -> Cluster:
    """One fast and one slow device on two nodes; a message costs 0.25 s and 1 s per 40 bytes."""
    return Cluster(
        name="two",
        network=Link(latency_s=0.25, bandwidth_bytes_per_s=40.0),
        nodes=(
            Node("a", (Device("a/0", "a", "fast", fast_bytes),)),
            Node("b", (Device("b/0", "b", "slow", slow_bytes),)),
        ),
    )


def small_plan(num_samples: int = 4, in_flight: tuple[int, int] = (2, 1)) -> Plan:
    """Embeddings and the blocks on the fast device, the head on the slow one; microbatches of 1."""
    return plan_of([("a/0", 0, 3, in_flight[0]), ("b/0", 3, 4, in_flight[1])], num_samples)


def with_states_on_the_host(plan: Plan) -> Plan:
    """The plan with the optimizer states of its first stage in the memory of the device's host."""
    (pipeline,) = plan.pipelines
    stages = (replace(pipeline.stages[0], offload=("optimizer states",)), *pipeline.stages[1:])
    return replace(plan, pipelines=(replace(pipeline, stages=stages),))


def plan_of(stages: Sequence[tuple[str, int, int, int]], num_samples: int, microbatch_size: int = 1) -> Plan:
    """A plan of one pipeline of stages (device, start, stop, in_flight)."""
    entries = tuple(Stage((name,), (start, stop), flight) for name, start, stop, flight in stages)
    return Plan("manual", "made-up", num_samples, (Pipeline(microbatch_size, num_samples, entries),))


def whole_model_on_two_nodes_of_two() -> tuple[Plan, ModelProfile, Cluster]:
    """Pipelines of one stage, their nodes taking turns; inside nodes 1 GB/s."""
    inside = Link(0.0, 1e9)
    nodes = tuple(
        Node(name, tuple(Device(f"{name}/{index}", name, kind, 1e4) for index in range(2)), inside)
        for name, kind in (("a", "fast"), ("b", "slow"))
    )
    names = ("a/0", "b/0", "a/1", "b/1")
    pipelines = tuple(Pipeline(1, 1, (Stage((name,), (0, 4), 1),)) for name in names)
    plan = Plan("manual", "made-up", 4, pipelines)
    return plan, small_profile(), Cluster("two", Link(0.25, 40.0), nodes)


def equal_stages(
    count: int, forward_s: float = 1.0, backward_s: float = 2.0, link: Link = INSTANT
) -> tuple[ModelProfile, Cluster]:
    """A model of `count` equal layers without bytes, and as many equal devices on one node."""
    times = LayerTimes((forward_s,), (backward_s,))
    profile = ModelProfile(
        model="made-up",
        sequence_length=1,
        dtype="float32",
        layers=tuple(LayerProfile(f"layer{index}", 0.0, 0.0, 0.0) for index in range(count)),
        kinds={"one": KindProfile("measured", (1,), (times,) * count)},
    )
    devices = tuple(Device(f"n/{index}", "n", "one", 1.0) for index in range(count))
    return profile, Cluster("equal", link, (Node("n", devices),))


MEETING_TOML = """
reserve = "0 B"
driver_memory = "0 B"
[network]
bandwidth = "320 bit/s"
latency = "0 s"
[[nodes]]
name = "a"
devices = [{ kind = "one", memory = "1 MB", count = 3 }]
[[nodes]]
name = "b"
devices = [{ kind = "one", memory = "1 MB", count = 3 }]
"""
"""The cluster of three `meeting_chains`."""


def meeting_chains(count: int) -> tuple[Plan, ModelProfile, Cluster]:
    """Pipelines of one microbatch over two nodes: layers of 1 s and 2 s, messages of 1 s on both cards."""
    times = LayerTimes((1.0,), (2.0,))
    profile = ModelProfile(
        model="made-up",
        sequence_length=1,
        dtype="float32",
        layers=(LayerProfile("first", 0.0, 40.0, 0.0), LayerProfile("last", 0.0, 0.0, 0.0)),
        kinds={"one": KindProfile("measured", (1,), (times, times))},
    )
    nodes = tuple(
        Node(name, tuple(Device(f"{name}/{index}", name, "one", 1e6) for index in range(count)))
        for name in "ab"
    )
    pipelines = tuple(
        Pipeline(1, 1, (Stage((f"a/{index}",), (0, 1), 1), Stage((f"b/{index}",), (1, 2), 1)))
        for index in range(count)
    )
    return Plan("manual", "made-up", count, pipelines), profile, Cluster("two", Link(0.0, 40.0), nodes)


def equal_plan(in_flight: Sequence[int], num_microbatches: int) -> Plan:
    """The plan of `equal_stages` with one layer a device."""
    stages = [(f"n/{index}", index, index + 1, flight) for index, flight in enumerate(in_flight)]
    return plan_of(stages, num_microbatches)


def many_alike(count: int) -> tuple[Plan, Cluster]:
    """As many pipelines of a fast and a slow device, and one of another cut, on two nodes."""
    names = [(f"a/{index}", f"b/{index}") for index in range(count + 1)]
    cuts = [3] * count + [2]
    pipelines = tuple(
        Pipeline(1, 4, (Stage((fast,), (0, cut), 2), Stage((slow,), (cut, 4), 1)))
        for (fast, slow), cut in zip(names, cuts, strict=True)
    )
    nodes = tuple(
        Node(node, tuple(Device(f"{node}/{index}", node, kind, 1e4) for index in range(count + 1)))
        for node, kind in (("a", "fast"), ("b", "slow"))
    )
    return Plan("auto", "made-up", 4 * (count + 1), pipelines), Cluster(
        "many", small_cluster().network, nodes
    )
