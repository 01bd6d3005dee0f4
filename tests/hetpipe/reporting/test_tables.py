import io
from dataclasses import replace

import pytest

from hetpipe.reporting import comparison_tables, run_tables, tables
from hetpipe.runs.run_report import DeviceReport, RecoveryReport, RunReport, StageReport
from hetpipe.simulation.prediction import predict
from partition.plan import Pipeline, Plan, Stage
from partition.solver import Outcome
from small_case import plan_of, small_cluster, small_plan, small_profile


def predicted(plan: Plan, **figures: object) -> Plan:
    return replace(
        plan, predicted=replace(predict(plan, small_profile(), small_cluster()).figures, **figures)
    )


def run_report(**changes: object) -> RunReport:
    entry = RunReport(
        model="made-up",
        strategy="auto",
        clock="nominal",
        emulated=True,
        steps=5,
        predicted_step_s=1.0,
        measured_step_s=1.02,
        step_s_all=(1.02,) * 5,
        predicted_bubble=0.1,
        measured_bubble=0.12,
        foreign_cores=0.0,
        stages=(StageReport(0, 0, "a/0", 0.8, 0.8), StageReport(0, 1, "b/0", 0.5, 0.505)),
        devices={
            "a/0": DeviceReport(2048.0, 1024.0, 4096.0, 8192.0, 0.001),
            "b/0": DeviceReport(2048.0, None, 4096.0, 8192.0, 0.0),
        },
    )
    return replace(entry, **changes)


def test_a_report_tells_what_allocator_and_driver_take_of_a_gpu():
    known = DeviceReport(
        2048.0,
        1024.0,
        4096.0,
        8192.0,
        0.0,
        reserved_bytes=1536.0,
        driver_bytes=512.0,
        planned_driver_bytes=256.0,
    )
    report = run_report()
    assert len([each for each in run_tables.run_report_tables(report) if not isinstance(each, str)]) == 2
    shown = run_tables.run_report_tables(replace(report, devices={**report.devices, "b/0": known}))
    rows = [row for row in tables.as_text(shown[2]).splitlines() if "b/0" in row or "a/0" in row]
    assert [row.split() for row in rows] == [["b/0", "1.50", "KiB", "256", "B", "512", "B"]]


def test_a_report_of_several_hosts_tells_what_a_step_takes_that_shares_the_network():
    def rows(report: RunReport) -> list[str]:
        lines = tables.as_text(run_tables.run_report_tables(report)[0]).splitlines()
        return [line for line in lines if "sharing" in line]

    assert not rows(run_report())
    (row,) = rows(run_report(shared_step_s=1.03))
    assert row.split() == ["step,", "sharing", "the", "network", "1.03", "s", "1.02", "s", "-1.0%"]


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["embeddings", "block0", "block1", "block2", "head"], "embeddings, block0-2, head"),
        (["block9", "block10", "block11"], "block9-11"),
        (["block1"], "block1"),
        (["0", "1", "2"], "0-2"),
        (["a1", "b2", "b4"], "a1, b2, b4"),
    ],
)
def test_neighbouring_layers_are_joined(names: list[str], text: str):
    assert tables.describe_layers(names) == text


def test_plan_table_has_a_row_per_stage():
    plan = predicted(small_plan(num_samples=4))
    rows = tables.as_text(tables.plan_table(plan, small_profile(), small_cluster())).splitlines()
    assert any("memory, KiB" in row for row in rows)
    first = next(row for row in rows if "a/0" in row).split()
    busy = predict(plan, small_profile(), small_cluster()).devices["a/0"].busy
    assert first == f"0 a/0 fast embeddings, block0-1 2 {busy:.0%} 3.28 9.77".split()
    assert "slow (estimated)" in next(row for row in rows if "b/0" in row)


def test_header_names_strategy_microbatches_and_figures():
    plan = predicted(small_plan(num_samples=4), step_s=2.0, samples_per_s=2.0, bubble=0.25)
    assert tables.plan_sentences(plan, small_profile(), small_cluster())[0] == (
        "manual: made-up, 4 samples a step, microbatch 1 x 4; predicted (from estimated times): step 2 s, "
        "2 samples/s, bubble 25%"
    )


def test_bound_says_what_it_speaks_about_and_the_gap():
    plan = predicted(small_plan(), step_s=2.2, bound_s=2.0, bound_space="all plans, gradient sync excluded")
    case = plan, small_profile(), small_cluster()
    assert tables.plan_sentences(*case)[1] == (
        "proven: no plan of its kind can be faster than 2 s; this one is at most 10.0% slower than the best"
    )
    assert tables.plan_sentences(*case, details=True)[1] == (
        "no plan (all plans, gradient sync excluded) can be faster than 2 s; gap 10.0%"
    )


def test_estimated_kinds_are_named_and_those_not_to_be_trusted():
    slow = "slow (not in the catalogue)"
    assert tables.plan_sentences(predicted(small_plan()), small_profile(), small_cluster())[-1] == (
        f"estimated, not measured: slow; not to be trusted: {slow}"
    )
    assert tables.estimate_sentences(small_profile(), ["fast", "unknown"]) == []
    profile = small_profile()
    kinds = {"T4": profile.kinds["slow"], "K80": profile.kinds["slow"], **profile.kinds}
    assert tables.estimate_sentences(replace(profile, kinds=kinds), ["T4", "T4"]) == [
        "estimated, not measured: T4"
    ]
    assert tables.estimate_sentences(replace(profile, kinds=kinds), kinds) == [
        "estimated, not measured: T4, K80, slow; not to be trusted: K80 (never checked against a "
        f"measurement), {slow}"
    ]


def test_without_a_bound_nothing_is_claimed():
    sentences = tables.plan_sentences(predicted(small_plan()), small_profile(), small_cluster())
    assert not any("can be faster" in sentence for sentence in sentences)


def test_devices_left_out_are_named():
    plan = predicted(plan_of([("a/0", 0, 4, 1)], 4))
    assert "left out: b/0 (slow (estimated))" in tables.plan_sentences(plan, small_profile(), small_cluster())


def test_several_pipelines_are_numbered_with_their_samples():
    whole = Pipeline(1, 2, (Stage(("a/0",), (0, 4), 1),)), Pipeline(1, 1, (Stage(("b/0",), (0, 4), 1),))
    plan = predicted(Plan("manual", "made-up", 3, whole))
    text = tables.as_text(tables.plan_table(plan, small_profile(), small_cluster()))
    assert "samples" in text and " 0.0 " in text and " 1.0 " in text
    header = tables.plan_sentences(plan, small_profile(), small_cluster())[0]
    assert "microbatch 1 x 2, microbatch 1 x 1" in header


def test_comparison_shows_speed_up_and_why_not():
    ours = predicted(small_plan(), step_s=2.0)
    outcomes = [
        Outcome("single", predicted(small_plan(), step_s=3.0)),
        Outcome("gpipe-even", None, "gpipe-even: 6,234,567 bytes are missing; buy more", "a/0", 6234567.0),
        Outcome("torchgpipe", None, "torchgpipe: 6,234,567 bytes are missing", "a/0", 6234567.0),
        Outcome("ddp", None, "more devices than layers"),
        Outcome("auto", ours),
    ]
    rows = tables.as_text(comparison_tables.comparison_table(outcomes, ours)).splitlines()
    assert "1.50" in next(row for row in rows if "single" in row)
    assert "does not fit" in next(row for row in rows if "gpipe-even" in row)
    assert "1.00" in next(row for row in rows if "auto" in row)
    assert comparison_tables.misfit_sentences(outcomes) == [
        "gpipe-even, torchgpipe: 5.95 MiB too little on a/0",
        "ddp: more devices than layers",
    ]
    assert comparison_tables.misfit_sentences(outcomes, details=True)[0] == (
        "gpipe-even: 5.95 MiB are missing; buy more"
    )


def test_a_kind_that_all_devices_are_of_is_named_once():
    cluster = small_cluster()
    nodes = tuple(
        replace(node, devices=tuple(replace(d, kind="fast", speed=speed) for d in node.devices))
        for node, speed in zip(cluster.nodes, (0.65, 1.0), strict=True)
    )
    table = tables.plan_table(predicted(small_plan()), small_profile(), replace(cluster, nodes=nodes))
    assert [str(cell) for cell in table.columns[1].cells] == ["a/0 x 0.65", "b/0"]
    assert table.columns[1].header == "device, fast"


def test_predicted_and_measured_stand_side_by_side():
    text = "".join(map(tables.as_text, run_tables.run_report_tables(run_report())))
    assert "1 s" in text and "1.02 s" in text and "+2.0%" in text
    assert "stage 1 on b/0, busy" in text and "+1.0%" in text
    assert "2.00 KiB" in text and "1.00 KiB" in text and "not counted" in text
    assert f"note: {run_tables.EMULATION_NOTE}" in text
    assert "overloaded" not in text


def test_samples_per_second_are_by_the_wall_clock():
    report = run_report(global_batch_size=16, samples_per_s=15.5, between_steps=0.012)
    text = "".join(map(tables.as_text, run_tables.run_report_tables(report)))
    row = next(row for row in text.splitlines() if "wall clock" in row).split()
    assert row == ["samples/s,", "wall", "clock", "16", "15.5", "-3.1%"]
    assert "between steps" not in text
    assert "15.5" in tables.as_text(run_tables.measured_table([report]))


def test_time_between_steps_is_said_where_it_counts():
    # 16 samples in a step of 0.8 s are 20 a second; with 0.2 s more 16
    report = run_report(global_batch_size=16, samples_per_s=16.0, between_steps=0.25)
    text = " ".join("".join(map(tables.as_text, run_tables.run_report_tables(report))).split())
    assert "added 25.0% to the steps; 16 samples/s by the wall clock, 20 within steps" in text


@pytest.mark.parametrize(
    ("late", "foreign_cores", "said"),
    [
        (0.001, 0.5, "host busy: other processes used 0.50 cores, but operations were late by 0.1% at most"),
        (0.25, 0.0, "took up to 25.0% longer than they may; do not trust the measured times"),
        (0.25, 0.5, "25.0% longer than they may, other processes used 0.50 cores; do not trust the measured"),
        (0.001, 0.0, None),
    ],
)
def test_a_host_that_disturbs_is_marked_by_what_did(late: float, foreign_cores: float, said: str | None):
    report = run_report(foreign_cores=foreign_cores)
    devices = {**report.devices, "a/0": replace(report.devices["a/0"], over_budget=late)}
    marks = run_tables.run_marks(replace(report, devices=devices))
    found = [mark for mark in marks if mark.startswith("host ")]
    assert (said is None and found == []) or (len(found) == 1 and str(said) in found[0])


def test_owners_that_differ_are_reported():
    text = "".join(map(tables.as_text, run_tables.run_report_tables(run_report(owners_agree=False))))
    assert "parameters with several owners differ" in text


def test_a_real_clock_has_no_note():
    text = "".join(map(tables.as_text, run_tables.run_report_tables(run_report(clock="cpu"))))
    assert "by construction" not in text


def test_a_pipe_gets_plain_unwrapped_text():
    file = io.StringIO()
    tables.show(["x" * 300, tables.profile_table(small_profile())], file)
    assert "x" * 300 in file.getvalue()
    assert "\x1b" not in file.getvalue()


@pytest.mark.parametrize(("count", "more"), [(9, 0), (30, 22)])
def test_of_many_changes_of_slow_devices_the_first_and_last_are_repeated(count: int, more: int):
    marks = run_tables.run_marks(run_report(slow_devices=tuple(f"change {n}" for n in range(count))))
    slow = [mark for mark in marks if mark.startswith("slow: ")]
    assert (slow[0], slow[-1]) == ("slow: change 0", f"slow: change {count - 1}")
    assert len(slow) == (9 if more else count)
    assert (f"slow: {more} more changes (slow_devices in report.json)" in slow) == bool(more)


def test_best_is_what_was_asked_for():
    found = run_report(
        eval_loss=0.41, best_eval_loss=0.52, best_eval_step=30, eval_figures={"f1": 0.875},
        best_eval_figures={"f1": 0.9375},
    )  # fmt: skip
    assert run_tables.run_marks(found)[:2] == [
        "held-out loss 0.4100, best 0.5200 after step 30",
        "held-out f1 87.50%, 93.75% at the best loss",
    ]
    assert run_tables.run_marks(replace(found, best_eval_by="f1"))[:2] == [
        "held-out loss 0.4100, 0.5200 at the best f1",
        "held-out f1 87.50%, best 93.75% after step 30",
    ]


def test_what_was_lost_is_told_with_what_it_took():
    def lost(noticed_after_s: float | None, again_s: float, kind: str = "lost") -> RecoveryReport:
        return RecoveryReport(kind, "rank 1 (a/0) was killed", noticed_after_s, again_s, 7, 5, "there")

    assert run_tables.recovery_sentences(()) == []
    (told,) = run_tables.recovery_sentences((lost(0.5, 4.0),))
    expected = "losses: 1, noticed after 0.5 s, trained again after 4.0 s; 2 steps were done again"
    assert told == f"{expected} (recoveries.jsonl)"
    found = run_report(recoveries=(lost(0.5, 4), lost(None, 6), lost(5.5, 5), lost(None, 3, "joined")))
    marks = run_tables.run_marks(found)
    assert marks[-2:] == [
        "losses: 3, noticed after 3.0 s (5.5 s at most), trained again after 5.0 s (6.0 s at most); "
        "6 steps were done again (recoveries.jsonl)",
        "hosts let in again: 1, trained again after 3.0 s (recoveries.jsonl)",
    ]
