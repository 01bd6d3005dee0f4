from dataclasses import replace
from datetime import date
from itertools import combinations
from math import inf
from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.text import Text

from cost_model.units import format_bytes
from hetpipe.reporting import plots
from hetpipe.reporting.expense_tables import WhatIfRow
from hetpipe.reporting.plots import figure_of
from hetpipe.reporting.plots.picture import alternative_text
from hetpipe.reporting.plots.runs import smoothed
from hetpipe.simulation.prediction import predict, simulate_plan
from partition.estimates.plan_memory import memory_on
from partition.plan import Pipeline, Plan, Stage
from partition.solver import Outcome
from run_folders import report_of
from small_case import plan_of, small_cluster, small_plan, small_profile


def bars(ax: Axes, colour: str) -> list[float]:
    """Widths of the bars of a colour."""
    return [bar.get_width() for bar in ax.patches if to_hex(bar.get_facecolor()).upper() == colour.upper()]


def outcome(strategy: str, step_s: float | None) -> Outcome:
    if step_s is None:
        return Outcome(strategy, None, "does not fit")
    figures = replace(predict(small_plan(), small_profile(), small_cluster()).figures, step_s=step_s)
    return Outcome(strategy, replace(small_plan(), strategy=strategy, predicted=figures))


def test_gantt_draws_every_pass_once_and_the_microbatches():
    trace = simulate_plan(small_plan(num_samples=3), small_profile(), small_cluster())
    ax = plots.gantt(trace)
    assert bars(ax, plots.FORWARD) == pytest.approx([5, 5, 5, 2, 2, 2])
    assert bars(ax, plots.BACKWARD) == pytest.approx([9, 9, 9, 4, 4, 4])
    assert len(bars(ax, plots.OPTIMIZER)) == 2
    texts = [text.get_text() for text in ax.texts]
    assert texts.count("0") == texts.count("2") == 4
    assert f"{1 - trace.busy_s(1) / trace.makespan_s:.0%} idle" in texts
    assert [label.get_text() for label in ax.get_yticklabels()] == ["a/0", "b/0"]


def test_narrow_bars_carry_no_number_and_no_white_edge_that_looks_idle():
    trace = simulate_plan(small_plan(num_samples=200), small_profile(), small_cluster())
    ax = plots.gantt(trace)
    assert not any(text.get_text().isdigit() for text in ax.texts)
    busy = [bar for bar in ax.patches if to_hex(bar.get_facecolor()).upper() == plots.BACKWARD]
    assert len(busy) == 400 and not any(bar.get_linewidth() for bar in busy)
    few = plots.gantt(simulate_plan(small_plan(num_samples=3), small_profile(), small_cluster()))
    assert any(bar.get_linewidth() for bar in few.patches)


def test_predicted_and_measured_share_their_time_axis():
    predicted = simulate_plan(small_plan(num_samples=3), small_profile(), small_cluster())
    measured = simulate_plan(small_plan(num_samples=4), small_profile(), small_cluster())
    above, below = plots.predicted_and_measured(predicted, measured)
    assert above.get_xlim() == below.get_xlim() == (0, measured.makespan_s)
    error = measured.makespan_s / predicted.makespan_s - 1
    assert f"({error:+.1%})" in figure_of(above).get_suptitle()
    assert [ax.get_ylabel() for ax in (above, below)] == ["predicted", "measured, wall clock"]


def test_device_clocks_stand_below_and_the_error_is_that_of_the_run():
    predicted = simulate_plan(small_plan(num_samples=3), small_profile(), small_cluster())
    measured = simulate_plan(small_plan(num_samples=4), small_profile(), small_cluster())
    median_s = 1.289 * predicted.makespan_s
    above, _ = plots.predicted_and_measured(
        predicted, measured, device_clocks=predicted, median_s=median_s, labels=["first", "second"]
    )
    names = [ax.get_ylabel() for ax in figure_of(above).axes]
    assert names == ["predicted", "measured, wall clock", "device clocks"]
    said = figure_of(above).get_suptitle()
    assert "(+28.9%), the median; drawn is the last, " in said and f"{measured.makespan_s:.3g} s" in said


@pytest.mark.filterwarnings("error:constrained_layout not applied")
def test_a_title_of_many_lines_leaves_room_for_the_step(tmp_path: Path):
    trace = simulate_plan(plan_of([("a/0", 0, 4, 1)], 4), small_profile(), small_cluster())
    above, below = plots.predicted_and_measured(trace, trace, median_s=trace.makespan_s)
    figure = figure_of(plots.title(above, "/a/folder/of/a/model " * 60))
    figure.draw_without_rendering()
    for ax in (above, below):
        assert ax.get_position().height * figure.get_figheight() > 0.5
    figure.set_figheight(1.0)  # has no room for them
    plots.save_pages([figure], tmp_path / "p.pdf")


def test_memory_bars_add_up_to_what_the_plan_needs():
    plan = small_plan()
    ax = plots.memory(plan, small_profile(), small_cluster(), measured_bytes={"a/0": 3000.0})
    assert sum(bars(ax, plots.BLUE)) == pytest.approx((800 + 300) / 2**20)
    (dots,) = [line for line in ax.lines if line.get_marker() == "o"]
    assert list(dots.get_xdata()) == pytest.approx([3000 / 2**20])
    assert "MiB" in ax.get_xlabel()


@pytest.mark.parametrize(("memory_bytes", "is_cut"), [(2.0**33, True), (5000.0, False)])
def test_a_small_model_is_not_a_sliver_of_large_memory(memory_bytes: float, is_cut: bool):
    cluster = small_cluster(fast_bytes=memory_bytes, slow_bytes=memory_bytes)
    need = memory_on(small_plan(), small_profile(), cluster.device("a/0")).total_bytes
    ax = plots.memory(small_plan(), small_profile(), cluster)
    drawn = ax.get_xlim()[1] * 2**20
    assert need < drawn < (2 * need if is_cut else 1e9)
    assert ("far more than is drawn" in ax.get_xlabel()) is is_cut
    usable = format_bytes(cluster.device("a/0").usable_bytes)
    assert f"{format_bytes(need)} of {usable}" in [text.get_text() for text in ax.texts]


def test_partition_bars_are_as_wide_as_layers_take_on_their_device():
    even = plan_of([("a/0", 0, 2, 2), ("b/0", 2, 4, 1)], 4)
    ax = plots.partition_bars([even, small_plan()], small_profile(), small_cluster())
    # stage 0: 2 + 6, then 2 + 6 + 6; stage 1 on the slow device: 12 + 6, then 6
    assert sorted(bars(ax, plots.STAGE_COLOURS[0])) == pytest.approx([2, 2, 6, 6, 6])
    assert sorted(bars(ax, plots.STAGE_COLOURS[1])) == pytest.approx([6, 6, 12])
    texts = [text.get_text() for text in ax.texts]
    assert "a/0\n2 layers" in texts and "b/0 (estimated)\n1 layer" in texts


def test_speedups_compare_with_the_best_of_the_others():
    outcomes = [outcome("single", 4.0), outcome("gpipe-even", None), outcome("auto", 2.0)]
    ax = plots.speedups(outcomes)
    assert [bar.get_width() for bar in ax.patches] == [1.0, 2.0]
    assert "does not fit" in [text.get_text() for text in ax.texts]
    assert ax.get_xlabel() == "speed; 1 is the best of the other strategies, single"


def test_a_strategy_that_does_not_fit_says_what_is_missing_where():
    lacking = replace(outcome("ddp", None), device="a/1", missing_bytes=2.0**20)
    ax = plots.speedups([lacking, outcome("single", 4.0), outcome("auto", 2.0)])
    assert "does not fit: 1.00 MiB too little on a/1" in [text.get_text() for text in ax.texts]
    few = Outcome(
        "gpipe-even", None, "more stages than layers: 9 devices for the 4 layers; exclude 5 devices"
    )
    ax = plots.speedups([few, outcome("auto", 1.0)])
    assert "more stages than layers: 9 devices for the 4 layers" in [text.get_text() for text in ax.texts]


def test_the_legend_has_only_what_is_drawn():
    outcomes = [outcome("single", 4.0), outcome("auto", 2.0)]

    def legend(measured: dict[str, float]) -> set[str]:
        return {text.get_text() for text in plots.speedups(outcomes, measured).get_legend().get_texts()}

    assert legend({}) == {"predicted"}
    assert legend({"single": 4.2}) == {"measured", "predicted", "predicted of what was measured"}
    assert legend({"single": 4.2, "auto": 2.1}) == {"measured", "predicted of what was measured"}


def test_what_was_measured_is_held_against_the_best_of_all_others():
    outcomes = [outcome("gpipe-even", 4.0), outcome("poplar", 2.0), outcome("auto", 1.9)]
    ax = plots.speedups(outcomes, {"gpipe-even": 4.2, "auto": 2.0})
    assert bars(ax, plots.BLUE) == pytest.approx([2.0 / 4.2, 1.0]) and bars(ax, plots.FORWARD) == [1.0]
    assert ax.get_xlabel().endswith("the best of the other strategies, poplar")


def test_the_bound_is_a_line_at_the_speed_that_no_plan_exceeds():
    ours = outcome("auto", 2.0)
    assert ours.plan is not None and ours.plan.predicted is not None
    bounded = replace(ours.plan, predicted=replace(ours.plan.predicted, bound_s=1.6))
    ax = plots.speedups([outcome("single", 4.0), replace(ours, plan=bounded)])
    (line,) = [line for line in ax.lines if line.get_color() == plots.VERMILION]
    assert line.get_xdata()[0] == pytest.approx(2.5)
    assert ax.get_xlim()[1] > 2.5


def test_the_overview_has_all_four_pictures_and_draws_the_even_split():
    profile, cluster = small_profile(), small_cluster()
    even = outcome("gpipe-even", 3.0)
    trace = simulate_plan(small_plan(), profile, cluster)
    axes = plots.overview(small_plan(), [even, outcome("manual", 2.0)], trace, profile, cluster)
    assert [label.get_text() for label in axes[0].get_yticklabels()] == ["gpipe-even", "manual"]
    assert len(axes) == len(figure_of(axes[0]).axes) == 4


def test_measured_speeds_are_bars_and_predictions_lines():
    ax = plots.speedups([outcome("single", 4.0), outcome("auto", 2.0)], {"single": 5.0, "auto": 2.5})
    assert bars(ax, plots.BLUE) == [1.0, 2.0]
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert "predicted of what was measured" in labels and not any("(line)" in label for label in labels)
    assert [line.get_xdata()[0] for line in ax.lines[:2]] == [1.25, 2.5]


def test_without_any_plan_there_is_no_speed():
    with pytest.raises(ValueError, match="no strategy fits"):
        plots.speedups([outcome("single", None)])


def test_losses_are_drawn_by_step_and_may_share_axes():
    metrics = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.5}, {"step": 3, "loss": None}]
    ax = plots.losses(metrics, label="one")
    assert plots.losses(metrics, ax, label="two") is ax
    assert [list(line.get_ydata()) for line in ax.lines] == [[3.0, 2.5]] * 2
    assert all(tick == int(tick) for tick in ax.get_xticks())


def test_many_losses_are_faint_behind_their_mean_and_held_out_ones_are_dots():
    metrics = [{"step": step, "loss": float(step % 2)} for step in range(1, 61)]
    metrics[29]["eval_loss"] = 0.5
    ax = plots.losses(metrics)
    each, mean, dots = ax.lines
    assert list(each.get_ydata()) == [row["loss"] for row in metrics] and (each.get_alpha() or 1) < 0.5
    assert list(mean.get_ydata()) == smoothed([row["loss"] for row in metrics])
    assert (list(dots.get_xdata()), list(dots.get_ydata())) == ([30], [0.5])


def test_a_mean_of_neighbours_does_not_lag():
    falling = [100.0 - step for step in range(100)]
    assert smoothed(falling) == pytest.approx(falling)
    assert smoothed([1.0, inf, 3.0]) == [1.0, 2.0, 3.0]


def test_each_of_several_runs_has_a_colour_of_its_own():
    many = [{"step": step, "loss": 1.0} for step in range(50)]
    ax = plots.losses(many, label="long")
    plots.losses(many[:3], ax, label="short")
    assert [line.get_color() for line in ax.lines] == [plots.STAGE_COLOURS[place] for place in (0, 0, 1)]
    legend = ax.get_legend()
    assert legend is not None and [text.get_text() for text in legend.get_texts()] == ["long", "short"]


def test_a_run_whose_host_was_overloaded_is_no_measurement():
    quiet = replace(report_of(2.0), emulated=True, measured_step_s=2.1)
    ax = plots.predictions({"quiet": quiet, "busy": replace(quiet, measured_step_s=9.0, foreign_cores=1.0)})
    dots = {
        line.get_markerfacecolor(): line.get_xydata().tolist()
        for line in ax.lines
        if len(line.get_xdata()) == 1
    }
    assert dots == {plots.BLUE: [[2.0, 2.1]], "white": [[2.0, 9.0]]}
    assert {"quiet  +5.0%", "busy  +350.0%"} <= {text.get_text() for text in ax.texts}
    assert ax.get_xscale() == "log" and ax.get_xlim() == ax.get_ylim()


def test_names_of_runs_close_to_each_other_are_not_over_each_other():
    reports = {
        f"run {number}": replace(report_of(1.0), measured_step_s=1 + number / 1e4) for number in range(8)
    }
    far = {"far": replace(report_of(2.0), measured_step_s=2.0)}
    ax = plots.predictions(reports | far)
    figure = figure_of(ax)
    FigureCanvasAgg(figure).draw()
    boxes = [Text.get_window_extent(text) for text in ax.texts]  # without lines to their points
    assert len(boxes) == 9
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))


def test_an_even_split_stands_above_a_plan_on_one_time_axis():
    even = simulate_plan(plan_of([("a/0", 0, 2, 2), ("b/0", 2, 4, 1)], 3), small_profile(), small_cluster())
    ours = simulate_plan(small_plan(num_samples=3), small_profile(), small_cluster())
    above, below = plots.beside_even(even, ours)
    assert above.get_xlim() == below.get_xlim() == (0, max(even.makespan_s, ours.makespan_s))
    assert f"{even.makespan_s / ours.makespan_s:.2f} times as fast" in below.get_title(loc="left")
    assert above.get_legend() is None and len(figure_of(above).legends) == 1


def test_changes_are_held_against_today_and_what_has_no_plan_says_so():
    outcomes = {name: outcome("auto", step_s).plan for name, step_s in (("today", 2.0), ("more", 1.0))}
    rows = [WhatIfRow(name, plan) for name, plan in outcomes.items()]
    ax = plots.what_if([*rows, WhatIfRow("less", None, reason="does not fit")])
    assert [bar.get_width() for bar in ax.patches] == [1.0, 2.0]
    texts = [text.get_text() for text in ax.texts]
    assert texts == ["step 2 s", "step 1 s", "no plan fits"]
    assert ax.get_xlabel() == "predicted speed; 1 is today's"
    lacking = plots.what_if([WhatIfRow("today", None), rows[1]])
    assert lacking.get_xlabel() == "predicted samples a second"


def test_pipelines_say_their_share_of_the_samples():
    shares = Pipeline(1, 3, (Stage(("a/0",), (0, 4), 1),)), Pipeline(1, 1, (Stage(("b/0",), (0, 4), 1),))
    plan = Plan("auto", "made-up", 4, shares)
    ax = plots.partition_bars([plan], small_profile(), small_cluster())
    assert [label.get_text() for label in ax.get_yticklabels()] == [
        "auto, pipeline 0\n3 of 4 samples",
        "auto, pipeline 1\n1 of 4 samples",
    ]


def test_a_title_says_model_batch_plan_and_cluster():
    assert plots.plan_title(plan_of([("a/0", 0, 4, 1)], 4), small_cluster(), date(2026, 1, 2)) == (
        "made-up, 4 samples a step, manual, on 1 of 2 devices of 'two', 2026-01-02"
    )
    ax = plots.title(plots.losses([{"step": 1, "loss": 3.0}]), "below")
    assert figure_of(plots.title(ax, "above")).get_suptitle() == "above\nbelow"


def test_save_writes_png_and_svg(tmp_path: Path):
    ax = plots.losses([{"step": 1, "loss": 3.0}])
    png, svg = plots.save(figure_of(ax), tmp_path / "loss.png")
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "<svg" in svg.read_text() and ">loss</text>" in svg.read_text()  # text, to be searched and edited


def test_labels_say_device_and_layers():
    plan: Plan = small_plan()
    assert plots.stage_labels(plan, small_profile(), small_cluster()) == {
        0: "a/0  fast\nembeddings, block0-1",
        1: "b/0  slow (estimated)\nhead",
    }


def test_the_same_figure_is_the_same_svg_and_pages_are_a_pdf(tmp_path: Path):
    for name in ("one", "two"):
        plots.save(figure_of(plots.losses([{"step": 1, "loss": 3.0}])), tmp_path / name)
    assert (tmp_path / "one.svg").read_text() == (tmp_path / "two.svg").read_text()
    figures = [figure_of(plots.losses([{"step": 1, "loss": 3.0}])) for _ in range(2)]
    plots.save_pages(figures, tmp_path / "both.pdf")
    pdf = (tmp_path / "both.pdf").read_bytes()
    assert pdf.startswith(b"%PDF") and pdf.count(b"/Type /Page ") == 2


def test_every_step_is_a_dot_and_the_prediction_a_line():
    report = replace(report_of(2.0), step_s_all=(3.0, 2.1, 2.2))
    ax = plots.step_seconds({"auto": report})
    line, first, others = ax.lines
    assert list(line.get_ydata()) == [2.0, 2.0]
    assert (list(first.get_ydata()), first.get_markerfacecolor()) == ([3.0], "white")
    assert (list(others.get_xdata()), list(others.get_ydata())) == ([2, 3], [2.1, 2.2])
    legend = ax.get_legend()
    assert legend is not None and [text.get_text() for text in legend.get_texts()] == ["auto, predicted 2 s"]
    assert ax.get_ylim()[0] == 0


def test_fields_say_how_full_devices_are_and_what_is_missing():
    lacking = Outcome("ddp", None, "does not fit", "b/0", 512.0)
    rows = [lacking, Outcome("poplar", None, "too many devices"), outcome("auto", 2.0)]
    ax = plots.memory_shares(rows, small_cluster())
    need = memory_on(small_plan(), small_profile(), small_cluster().device("a/0")).total_bytes
    usable = small_cluster().device("a/0").usable_bytes
    texts = [text.get_text() for text in ax.texts]
    assert texts[:2] == ["512 B too little", "no plan"] and len(texts) == 4
    assert texts[2] == f"{format_bytes(need)}, {need / usable:.0%}"
    assert [label.get_text() for label in ax.get_yticklabels()] == ["ddp", "poplar", "auto"]


def test_the_picture_of_what_was_measured_has_speeds_above_and_memory_at_its_peak_below():
    rows = [Outcome("ddp", None, "does not fit", "b/0", 512.0), outcome("single", 4.0), outcome("auto", 2.0)]
    usable = small_cluster().device("a/0").usable_bytes
    need = memory_on(small_plan(), small_profile(), small_cluster().device("a/0")).total_bytes
    above, below = plots.speeds_and_memory(
        rows, small_cluster(), {"single": 4.2, "auto": 2.0}, {"auto": {"a/0": usable / 2}}
    )
    assert len(figure_of(above).axes) == 2
    assert bars(above, plots.BLUE) == pytest.approx([1.0, 2.1])
    texts = [text.get_text() for text in below.texts]
    assert "512 B too little" in texts
    assert f"{format_bytes(usable / 2)}, 50%\nplan {format_bytes(need)}" in texts


def test_a_changed_plan_stands_below_that_of_today_in_the_same_colours_and_scale():
    profile, cluster = small_profile(), small_cluster()
    today = WhatIfRow("today", outcome("auto", 2.0).plan)
    alone = plan_of([("b/0", 0, 4, 1)], 4)
    changed = WhatIfRow("x", replace(alone, predicted=predict(alone, profile, cluster).figures))
    axes = plots.changed_plan(today, changed, profile, (cluster, cluster))
    assert [label.get_text() for label in axes[0].get_yticklabels()] == ["today", "changed"]
    assert axes[1].get_xlim() == axes[2].get_xlim()
    assert bars(axes[2], plots.STAGE_COLOURS[1]) and not bars(axes[2], plots.STAGE_COLOURS[0])
    assert len(plots.changed_plan(today, today, profile, (cluster, cluster))) == 3
    nothing = plots.changed_plan(today, WhatIfRow("x", None), profile, (cluster, cluster))
    assert len(nothing) == 3 and "no plan fits" in [text.get_text() for text in nothing[0].texts]


def test_a_picture_says_in_words_what_it_shows():
    """As a notebook stores it beside the PNG, which screen readers and nbconvert take."""
    plan, profile, cluster = small_plan(), small_profile(), small_cluster()
    day = date(2026, 1, 2)
    ax = plots.title(plots.memory(plan, profile, cluster), plots.plan_title(plan, cluster, day))
    data, metadata = figure_of(ax)._repr_mimebundle_()
    said = metadata["image/png"]["alt"]
    assert data == {}  # IPython draws it
    for part in ("2026-01-02", "rows: a/0 fast, b/0 slow", "to the right: MiB", "legend: parameters, "):
        assert part in said, said
    axes = plots.overview(
        plan, [outcome("auto", 1.0)], simulate_plan(plan, profile, cluster), profile, cluster
    )
    assert alternative_text(figure_of(axes[0])).count("rows: ") == 4
    many = plots.new_axes()
    plots.style.label_rows(many, [f"n/{index}" for index in range(40)])
    assert alternative_text(figure_of(many)).endswith(", n/11, 28 more")
