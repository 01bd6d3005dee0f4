"""Pictures of plans with many devices, sharded ones, and those that keep a part on hosts."""

from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.image import imread

from cost_model.cluster import Cluster, Device, Node
from cost_model.cluster_file import read_cluster
from cost_model.profile import ModelProfile
from hetpipe.reporting import colours, plots
from hetpipe.reporting.memory_tables import memory_uses
from hetpipe.reporting.plots import figure_of
from hetpipe.reporting.plots.picture import alternative_text
from hetpipe.reporting.plots.style import legend_above
from hetpipe.simulation.prediction import predict, simulate_plan
from partition.estimates.plan_memory import memory_on
from partition.plan import Pipeline, Plan, Stage
from partition.solver import Outcome
from small_case import (
    HOST_CLUSTER,
    many_alike,
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


def test_owners_of_sharded_states_have_rows_of_their_own_among_many_alike():
    _, cluster = many_alike(30)
    names = [device.name for device in cluster.devices]
    pipelines = tuple(Pipeline(1, 1, (Stage((name,), (0, 4), 1),)) for name in names)
    owners = ("a/0", "a/0", "b/7", "b/7")
    plan = Plan("auto", "made-up", len(names), pipelines, zero=1, state_owners=owners)
    ax = plots.memory(plan, small_profile(), cluster)
    assert row_names(ax) == ["a/0  fast", "a/1  fast, 29 alike", "b/0  slow, 29 alike", "b/7  slow"]
    states = [width * 2**20 for width in bars(ax, colours.GREEN)[: len(row_names(ax))]]
    assert states == pytest.approx([2 * (400 - 40 + 200), 0, 0, 2 * (200 + 300 - 250)])


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


def with_long_names() -> tuple[Plan, ModelProfile, Cluster]:
    """The small case, its layers, nodes and kinds named as in some models and clusters."""
    profile, rack = small_profile(), "rack-7.north.example.org"
    kinds = {"fast": "NVIDIA-GeForce-RTX-2080-Ti-SUPER", "slow": "AMD-Instinct-MI250X"}
    names = [f"transformer.encoder.layer.{index:02d}.attention_and_feed_forward" for index in range(4)]
    layers = [replace(layer, name=name) for layer, name in zip(profile.layers, names, strict=True)]
    layers[3] = replace(layers[3], tied_to=names[0])
    nodes = tuple(
        Node(name, (Device(f"{name}/0", name, kinds[kind], 1e4),))
        for name, kind in ((f"gpu-01.{rack}", "fast"), (f"gpu-02.{rack}", "slow"))
    )
    plan = plan_of([(f"{nodes[0].name}/0", 0, 3, 2), (f"{nodes[1].name}/0", 3, 4, 1)], 4)
    times = {name: profile.kinds[kind] for kind, name in kinds.items()}
    named = replace(profile, layers=tuple(layers), kinds=times, links={})
    cluster = Cluster("all that was left over from the projects " * 3, small_cluster().network, nodes)
    return plan, named, cluster


def test_long_names_leave_room_for_what_is_drawn():
    plan, profile, cluster = with_long_names()
    labels = plots.stage_labels(plan, profile, cluster)
    title = plots.plan_title(replace(plan, model="organisation/model"), cluster, date(2026, 1, 2))
    assert [label.splitlines()[1] for label in labels.values()] == ["layer 0-2 of 4", "layer 3 of 4"]
    names = ["embeddings", "decoder-embeddings", "attention", "head"]
    layers = [
        replace(layer, name=name, tied_to=None, tied_bytes=0.0)
        for layer, name in zip(profile.layers, names, strict=True)
    ]
    whole = plan_of([(plan.device_names[0], 0, 4, 1)], 4)
    (label,) = plots.stage_labels(whole, replace(profile, layers=tuple(layers)), cluster).values()
    assert label.splitlines()[1] == "embeddings to head, 4 layers"
    for ax in (
        plots.gantt(simulate_plan(plan, profile, cluster), labels=labels),
        plots.memory(plan, profile, cluster),
        plots.partition_bars([plan, plan], profile, cluster),
    ):
        figure = figure_of(plots.title(ax, title))
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        assert ax.get_position().width > 0.45
        assert figure.get_tightbbox(canvas.get_renderer()).width < 1.15 * figure.get_size_inches()[0]
        assert title in alternative_text(figure)


def test_a_legend_has_as_many_columns_as_there_is_room_for():
    ax = plots.new_axes()
    legend_above(ax, [("red", f"NVIDIA-GeForce-RTX-{number}-Ti") for number in range(2060, 2067)])
    short = plots.new_axes()
    legend_above(short, [("red", f"a/{number}") for number in range(7)])
    columns = [picture.get_legend()._ncols for picture in (ax, short)]
    assert columns[0] < columns[1] == 7


def test_of_hundreds_of_devices_not_each_has_its_name_below_a_column():
    plan, cluster = many_alike(160)
    figures = predict(plan, small_profile(), cluster).plan
    ax = plots.memory_shares([Outcome("auto", figures)], cluster)
    assert 20 < len(ax.get_xticks()) <= 40
    assert len(ax.patches) == 322
