"""compare --strategy and --measure: what is compared, run in turn, and whether the losses agree."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cost_model.profile import profile_text
from cost_model.units import format_seconds
from hetpipe.reporting import tables
from hetpipe.reporting.comparison_tables import least_bound
from hetpipe.reporting.measured_tables import loss_sentences, measured_rounds_tables
from hetpipe.runs.measured_rounds import LOSSES_AGREE, MeasuredRounds, losses_apart
from hetpipe.runs.run_report import DeviceReport, RunReport
from partition.baselines.catalogue import PUBLISHED, WELL_KNOWN
from partition.plan import Figures
from partition.solver import Outcome
from runs import made_up_profile
from shell import Shell
from small_case import small_plan

THREE = """
reserve = "0 B"
[network]
bandwidth = "10 Gbit/s"
latency = "50 us"
[[nodes]]
name = "a"
devices = [{ kind = "cpu", memory = "2 GiB" }, { kind = "cpu", speed = 0.5, memory = "2 GiB" }]
[[nodes]]
name = "b"
devices = [{ kind = "cpu", speed = 0.25, memory = "2 GiB" }]
"""


def report(strategy: str, steps: tuple[float, ...], peak_bytes: float | None = 60.0) -> RunReport:
    devices = {
        "big/0": DeviceReport(50.0, 40.0, 100.0, 100.0, 0.0),
        "small/0": DeviceReport(55.0, peak_bytes, 80.0, 80.0, 0.0),
    }
    return RunReport(
        model="m", strategy=strategy, clock="nominal", emulated=False, steps=len(steps), predicted_step_s=2.0,
        measured_step_s=2.0, step_s_all=steps, predicted_bubble=0.0, measured_bubble=0.0, foreign_cores=0.0,
        stages=(), devices=devices, global_batch_size=8, samples_per_s=4.0,
    )  # fmt: skip


def test_the_first_step_of_each_run_is_left_out_and_the_fullest_device_is_named():
    rounds = MeasuredRounds(
        "ddp", (report("ddp", (9.0, 2.0, 2.2)), report("ddp", (9.0, 2.1))), ((1.0,), (1.0,))
    )
    assert rounds.step_seconds == [2.0, 2.2, 2.1]
    assert (rounds.step_s, rounds.error) == (2.1, pytest.approx(0.05))
    assert rounds.fullest[0] == "small/0"  # 60 of 80 bytes, where the other has 40 of 100
    outcomes = [Outcome("hap", None, "too large"), Outcome("ddp", None)]
    text = tables.as_text(measured_rounds_tables([rounds], outcomes, "float32")[0])
    assert "does not fit" in text and f"{format_seconds(2.0)} - {format_seconds(2.2)}" in text


def test_all_plans_are_held_against_one_bound_the_least_of_their_kinds():
    def outcome(strategy: str, bound_s: float) -> Outcome:
        return Outcome(strategy, replace(small_plan(), predicted=Figures(2.0, 8.0, 0.1, {}, bound_s)))

    outcomes = [outcome("poplar", 1.9), outcome("auto", 1.6)]
    rounds = [MeasuredRounds(each.strategy, (report(each.strategy, (2.0, 2.0)),), ()) for each in outcomes]
    table, sentence, *_ = measured_rounds_tables(rounds, outcomes, "float32")
    assert tables.as_text(table).count(" 25.0% ") == 2
    assert str(sentence).startswith("over bound: over 1.6 s, the bound of auto; ")
    assert least_bound([outcome("poplar-1", 1.5), *outcomes]) == ("poplar-1", 1.5)
    assert least_bound([outcomes[0], Outcome("auto", small_plan())]) is None


def test_losses_that_lie_apart_are_warned_of_in_float32_alone():
    one = MeasuredRounds("ddp", (report("ddp", (1.0, 1.0)),), ((4.0, 3.0),))
    near = replace(one, strategy="auto", losses=((4.0, 3.0 * (1 - LOSSES_AGREE / 2)),))
    far = replace(one, strategy="auto", losses=((4.0, 3.0 * (1 - 3 * LOSSES_AGREE)),))
    assert losses_apart([one]) is None
    assert losses_apart([one, far]) == pytest.approx(3 * LOSSES_AGREE)
    assert loss_sentences([one, near], "float32")[0].startswith("losses of 2 plans agree to 1.0e-06")
    assert loss_sentences([one, far], "float32")[0].startswith("warning: losses of 2 plans lie 6.0e-06")
    assert loss_sentences([one, far], "bf16")[0].startswith("losses of 2 plans agree to 6.0e-06")
    same = replace(one, strategy="hap", like="ddp")
    assert loss_sentences([one, same], "float32") == ["hap ran as ddp: their plans are equal"]


@pytest.fixture
def compare(hetpipe: Shell):
    hetpipe.write("cluster.toml", THREE)
    hetpipe.write("profile.json", profile_text(made_up_profile("bert-tiny")))
    line = "compare --model bert-tiny --cluster cluster.toml --profile profile.json --no-proof"
    return lambda words: hetpipe(f"{line} --global-batch-size 8 {words}")


def test_strategies_are_those_asked_for_and_auto(compare):
    def names(words: str) -> list[str]:
        return [entry["strategy"] for entry in json.loads(compare(f"{words} --json").out)["strategies"]]

    assert names("") == [*WELL_KNOWN, "auto"]
    assert names("--strategy heterog --strategy auto --strategy hap") == ["heterog", "hap", "auto"]
    assert "--strategy all compares the rules of published systems too: poplar-0" in compare("").out
    refused = compare("--strategy heterogg")
    assert refused.code == 2 and "unknown strategy 'heterogg'; did you mean" in refused.err


@pytest.mark.slow
def test_every_strategy_is_executed_and_all_have_the_same_losses(compare, tmp_path: Path):
    found = compare("--strategy all --measure --steps 2 --rounds 1 --plot speeds.png --json")
    assert found.code == 0, found.err
    told = json.loads(found.out)
    by_name = {entry["strategy"]: entry for entry in told["strategies"]}
    assert list(by_name) == [*WELL_KNOWN, *PUBLISHED, "auto"]
    for name, entry in by_name.items():
        assert entry["fits"], (name, entry["reason"])
        assert len(entry["losses"]) == 2 and entry["measured_step_s"] > 0
        assert all(device["predicted_bytes"] > 0 for device in entry["devices"].values())
    assert told["losses_apart"] <= LOSSES_AGREE
    assert all(Path(file).exists() for file in told["files"]) and len(told["files"]) == 2
    (drawn,) = (Path(file).read_text() for file in told["files"] if file.endswith(".svg"))
    assert (
        "plan 0 B" not in drawn and drawn.count(">plan ") >= len(by_name) - 1
    )  # memory as planned, below its peak
