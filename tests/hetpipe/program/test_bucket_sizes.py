"""Sums of a stage's layers in parts that are inside of nodes and between them at once."""

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest

from cost_model.cluster import Cluster, Device, Link, Node
from cost_model.collectives import Collective
from cost_model.layer_profile import LayerProfile, LayerTimes
from cost_model.measured_links import MeasuredAllReduce
from cost_model.network import Network
from cost_model.profile import KindProfile, ModelProfile
from hetpipe.program import bucket_sizes
from hetpipe.program.costs import ProgramCosts
from hetpipe.program.gradient_buckets import gradient_buckets, with_collectives
from hetpipe.program.instructions import Bucket, Program
from hetpipe.simulation.fast_simulator import step_times
from hetpipe.simulation.prediction import predict
from partition.plan import Pipeline, Plan, Stage

MB = 1e6
CARD, INSIDE = Link(1e-4, 1e9), Link(1e-5, 4e9)


def profile_of(num_layers: int, layer_bytes: float = 100 * MB) -> ModelProfile:
    """Equal layers of 10 ms forward, 20 ms backward, and messages that take hardly any time."""
    layers = tuple(LayerProfile(f"layer{at}", layer_bytes, 1e3, 1e3) for at in range(num_layers))
    kind = KindProfile("measured", (1,), (LayerTimes((0.01,), (0.02,)),) * num_layers)
    return ModelProfile("made-up", 8, "float32", layers, {"gpu": kind})


def cluster_of(*widths: int, card: Link = CARD, inside: Link = INSIDE) -> Cluster:
    nodes = (
        Node(
            f"n{at}", tuple(Device(f"n{at}/{index}", f"n{at}", "gpu", 1e12) for index in range(width)), inside
        )
        for at, width in enumerate(widths)
    )
    return Cluster("made-up", card, tuple(nodes))


def copies(profile: ModelProfile, rows: list[list[str]], cuts: list[int]) -> Plan:
    """A pipeline on each row of devices, all with the same cuts."""
    pipelines = tuple(
        Pipeline(
            1,
            8,
            tuple(
                Stage((name,), cut, len(row) - at)
                for at, (name, cut) in enumerate(zip(row, pairwise(cuts), strict=True))
            ),
        )
        for row in rows
    )
    return Plan("manual", profile.model, 8 * len(rows), pipelines)


def step_s(plan: Plan, profile: ModelProfile, cluster: Cluster, buckets: tuple[Bucket, ...]) -> float:
    program = Program(plan, buckets, ())
    return step_times(ProgramCosts(program, profile, cluster)).step_s


def test_a_part_is_inside_of_nodes_while_another_one_is_between_them():
    profile, cluster = profile_of(10), cluster_of(1, 1, 1, 1, 1, 1, 1, 1, 4, 4)
    rows = [[f"n{at}/0", f"n{8 + at // 4}/{at % 4}"] for at in range(8)]
    plan = copies(profile, rows, [0, 2, 10])  # the second stage is on two nodes of four
    found = [bucket for bucket in predict(plan, profile, cluster).program.buckets if bucket.layers[0] >= 2]
    assert sorted(layer for bucket in found for layer in bucket.layers) == list(range(2, 10))
    assert len(found) > 1
    for bucket in found:
        assert bucket.collective is Collective.HIERARCHICAL and list(map(len, bucket.nodes)) == [4, 4]
    behind = [bucket for bucket in gradient_buckets(plan, profile) if bucket.layers[0] >= 2]
    none_s = step_s(plan, profile, cluster, ())
    ring_s = step_s(plan, profile, cluster, tuple(behind)) - none_s
    parts_s = step_s(plan, profile, cluster, tuple(found)) - none_s
    # 800 MB: 7/8 of them to and fro in a ring of eight; in a ring of two all of it passes a card once
    assert ring_s == pytest.approx(1.4, rel=0.05)
    # two hops of 25 ms a layer inside, before the first part and behind the last
    assert 0.8 < parts_s < 0.8 + 4 * 0.025 * max(len(part.layers) for part in found) + 0.02 < 1.2


@pytest.mark.parametrize("why", ["one node", "one of each", "measured", "one layer", "few bytes"])
def test_what_has_nothing_to_go_beside_is_not_cut(why: str):
    profile = profile_of(10, 1 * MB if why == "few bytes" else 100 * MB)
    cluster = cluster_of(*(1,) * 8, *{"one node": (8,), "one of each": (1,) * 8}.get(why, (4, 4)))
    if why == "measured":
        ring = MeasuredAllReduce(("gpu",) * 8, (int(MB), int(1000 * MB)), (0.01, 1.0))
        profile = replace(profile, all_reduces=(ring,))
    names = [device.name for device in cluster.devices]
    first = 9 if why == "one layer" else 2
    plan = copies(profile, [list(pair) for pair in zip(names[:8], names[8:], strict=True)], [0, first, 10])
    found = [
        bucket for bucket in predict(plan, profile, cluster).program.buckets if bucket.layers[0] >= first
    ]
    assert [bucket.layers for bucket in found] == [tuple(range(first, 10))]


def random_plans(count: int) -> Iterator[tuple[Plan, ModelProfile, Cluster]]:
    """Copies of chains of one to three stages, on two to five nodes of one to eight devices."""
    for seed in range(count):
        rng = random.Random(seed)
        widths = [rng.choice((1, 2, 4, 8)) for _ in range(rng.randint(2, 5))]
        card = Link(rng.choice((1e-5, 1e-3)), rng.choice((1.25e8, 1.25e9)))
        cluster = cluster_of(*widths, card=card, inside=Link(1e-5, rng.choice((2, 4, 10)) * 1.25e9))
        profile = profile_of(rng.randint(4, 24), rng.choice((10, 50, 200)) * MB)
        names = [device.name for device in cluster.devices]
        if rng.random() < 0.3:
            rng.shuffle(names)
        stages = rng.randint(1, min(3, len(names)))
        count_of = len(names) // stages
        rows = [[names[stage * count_of + at] for stage in range(stages)] for at in range(count_of)]
        cuts = [0, *sorted(rng.sample(range(1, profile.num_layers), stages - 1)), profile.num_layers]
        yield copies(profile, rows, cuts), profile, cluster


def test_parts_by_nodes_make_steps_shorter_and_hardly_any_longer(monkeypatch: pytest.MonkeyPatch):
    def steps_s() -> list[float]:
        found = []
        for plan, profile, cluster in random_plans(60):
            raw = gradient_buckets(plan, profile)
            buckets = with_collectives(plan, raw, profile, Network(cluster))
            found.append(step_s(plan, profile, cluster, buckets))
        return found

    now = steps_s()
    monkeypatch.setattr(bucket_sizes, "by_nodes_estimate_s", lambda *_: (math.inf, math.inf))
    gains = [alone_s / now_s - 1 for now_s, alone_s in zip(now, steps_s(), strict=True)]
    assert min(gains) > -0.01
    assert sum(gain > 0.01 for gain in gains) >= 15 and max(gains) > 0.05
