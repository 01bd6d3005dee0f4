"""Pictures of plans with many devices, sharded ones, and those that keep a part on hosts."""

from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.image import imread

from cost_model.cluster import Cluster, Device, Node
from cost_model.cluster_file import read_cluster
from hetpipe.reporting import colours, plots
from hetpipe.reporting.memory_tables import memory_uses
from hetpipe.reporting.plots import figure_of
from hetpipe.simulation.prediction import simulate_plan
from partition.estimates.plan_memory import memory_on
from partition.plan import Pipeline, Plan, Stage
from small_case import (
    HOST_CLUSTER,
    plan_of,
    small_cluster,
    small_plan,
    small_profile,
    whole_model_on_two_nodes_of_two,
    with_states_on_the_host,
)


def bars(ax: Axes, colour: str) -> list[float]:
    """Widths of the bars of a colour."""
    return [bar.get_width() for bar in ax.patches if to_hex(bar.get_facecolor()).upper() == colour.upper()]


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


def row_names(ax: Axes) -> list[str]:
    return [label.get_text() for label in ax.get_yticklabels()]


def test_pipelines_alike_have_the_rows_of_one_where_there_are_many(tmp_path: Path):
    plan, cluster = many_alike(40)
    trace = simulate_plan(plan, small_profile(), cluster)
    labels = plots.stage_labels(plan, small_profile(), cluster)
    step, memory = plots.gantt(trace, labels=labels), plots.memory(plan, small_profile(), cluster)
    cuts = plots.partition_bars([plan], small_profile(), cluster)
    assert row_names(step)[0] == "a/0  fast, 39 alike\nembeddings, block0-1"
    assert row_names(step)[2] == "a/40  fast\nembeddings, block0"
    assert row_names(memory) == [
        "a/0  fast, 39 alike", "b/0  slow, 39 alike", "a/40  fast", "b/40  slow",
    ]  # fmt: skip
    assert row_names(cuts) == [
        "auto, pipeline 0\n4 of 164 samples, 39 alike", "auto, pipeline 40\n4 of 164 samples",
    ]  # fmt: skip
    assert len(bars(step, plots.FORWARD)) == 4 * 4
    idle = [text.get_text() for text in step.texts if text.get_text().endswith("idle")]
    assert idle[3] == f"{1 - trace.busy_s(81) / trace.makespan_s:.0%} idle"
    _, below = plots.beside_even(trace, trace, even_labels=labels, labels=labels)
    assert len(row_names(below)) == 4


def test_a_picture_is_never_larger_than_programs_open(tmp_path: Path):
    ax = plots.new_axes(width=0.5, height=400.0)
    png, _ = plots.save(figure_of(ax), tmp_path / "long")
    assert 30_000 < imread(png).shape[0] < 2**15 + 500


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_sharded_weights_are_trained_ones_and_all_parts_are_of_their_device(zero: int):
    plan, profile, cluster = whole_model_on_two_nodes_of_two()
    sharded = replace(plan, zero=zero, state_owners=("a/0",) * 4)
    uses = memory_uses(sharded, profile, cluster)
    assert [use.frozen_bytes for use in uses.values()] == [40.0] * 4  # of the embeddings
    trained = {name: use.trained_bytes for name, use in uses.items()}
    whole = 800 + 300 - 250 - 40  # the head is tied to the embeddings by 250
    assert trained["a/0"] == whole
    assert all((0 < trained[name] < whole) == (zero == 3) for name in ("b/0", "a/1", "b/1"))
    for name, use in uses.items():
        assert use.total_bytes == memory_on(sharded, profile, cluster.device(name)).total_bytes


def test_the_memory_of_a_host_that_keeps_states_is_drawn_below(tmp_path: Path):
    (tmp_path / "cluster.toml").write_text(HOST_CLUSTER)
    cluster, plan = read_cluster(tmp_path / "cluster.toml"), with_states_on_the_host(small_plan())
    ax = plots.memory(plan, small_profile(), cluster)
    assert row_names(ax) == ["a/0  fast", "b/0  slow", "a, memory of the host"]
    # of AdamW; 40 bytes of the embeddings are not trained
    assert max(bars(ax, colours.GREEN)) == pytest.approx(2 * (400 - 40 + 200 + 200) / 2**20)
    assert "1.48 KiB of 1.95 KiB" in [text.get_text() for text in ax.texts]
    assert len(row_names(plots.memory(small_plan(), small_profile(), cluster))) == 2


def test_a_legend_names_what_is_drawn():
    plan, profile, cluster = whole_model_on_two_nodes_of_two()
    names = plan.device_names
    sharded = [replace(plan, zero=zero, state_owners=names) for zero in (1, 2, 3)]
    words = [
        (plan, "gradient sync, norm"),
        *((of, "gradient sync, weights, norm") for of in sharded),
        (plan_of([("a/0", 0, 4, 1)], 4), "norm"),
    ]
    for of, expected in words:
        ax = plots.gantt(simulate_plan(of, profile, cluster))
        assert expected in [text.get_text() for text in ax.get_legend().get_texts()], of.zero
    plenty = plots.memory(small_plan(), small_profile(), small_cluster(fast_bytes=2.0**33))
    assert "reserve" not in [text.get_text() for text in plenty.get_legend().get_texts()]
