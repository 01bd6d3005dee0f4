"""`compare --what-if` and `--pareto`, and `plan` by money, energy, a deadline or a budget."""

import re
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from cost_model.dtypes import BFLOAT16_AUTOCAST
from cost_model.errors import InputError
from cost_model.expenses import expenses
from cost_model.other_clusters import without
from cost_model.profile import profile_text
from cost_model.what_if import changed
from hetpipe.commands.other_devices import changed_clusters
from hetpipe.reporting.expense_tables import (
    WhatIfRow,
    unknown_sentences,
    what_if_sentences,
    what_if_table,
)
from hetpipe.reporting.tables import as_text
from hetpipe.reporting.what_if_plans import with_best
from hetpipe.simulation.prediction import evaluator
from partition.problem import problem_of
from planned_once import each_plan_once
from shell import Shell
from small_case import CLUSTER_TOML, plan_of, small_cluster, small_plan, small_profile

FILES = "--profile profile.json --cluster cluster.toml --global-batch-size 4"
PRICED = CLUSTER_TOML.replace('"fast",', '"fast", price_per_hour = 4.0, watts = 300,').replace(
    '"slow",', '"slow", price_per_hour = 1.0, watts = 100,'
)


@pytest.fixture(autouse=True, scope="module")
def _each_plan_once() -> Iterator[None]:
    with each_plan_once():
        yield


@pytest.fixture
def priced(hetpipe: Shell) -> Shell:
    hetpipe.write("cluster.toml", PRICED)
    return hetpipe


@pytest.mark.slow
def test_each_change_is_a_row_and_all_of_them_together(priced: Shell):
    result = priced(
        f'compare {FILES} --json --what-if "remove b" --what-if "speed a 2" --what-if "network 1 B/s"'
    )
    assert result.code == 0, result.err
    rows = {row["change"]: row for row in result.json["what_if"]}
    assert list(rows) == ["today", "remove b", "speed a 2", "network 1 B/s", "all together"]
    today_s = rows["today"]["predicted_step_s"]
    assert rows["today"]["gain"] == 0
    for row in rows.values():
        assert row["gain"] == pytest.approx(today_s / row["predicted_step_s"] - 1)
        assert row["bound_s"] <= row["predicted_step_s"] * (1 + 1e-9)
    assert rows["speed a 2"]["gain"] > 0 >= rows["remove b"]["gain"]
    # all together: a/0 alone at twice its speed, whatever the network
    alone = rows["all together"]
    assert alone["predicted_step_s"] == pytest.approx(rows["remove b"]["predicted_step_s"] / 2)
    # 4 an hour and 300 W for 1,000 samples, which are 250 steps
    assert (alone["per_hour"], alone["watts"]) == (4.0, 300.0)
    assert alone["money_per_1000_samples"] == pytest.approx(250 * alone["predicted_step_s"] * 4 / 3600)
    assert alone["wh_per_1000_samples"] == pytest.approx(250 * alone["predicted_step_s"] * 300 / 3600)


def test_a_plan_found_for_other_devices_is_taken_where_it_is_faster():
    """Layers 0-2 on a/0 and 3 on b/0 are faster than everything on b/0, which the search might have found."""
    problem = problem_of(small_profile(), small_cluster(), 4)
    evaluate = evaluator(problem.profile, problem.cluster)
    slow, fast = plan_of([("b/0", 0, 4, 1)], 4), small_plan()
    rows = [
        WhatIfRow(name, replace(plan, predicted=evaluate(plan)))
        for name, plan in (("today", slow), ("network 1 B/s", fast))
    ]
    best = with_best(rows[0], problem, rows)
    assert best.plan is not None and best.plan.pipelines == fast.pipelines
    assert best.step_s == evaluate(fast).step_s < evaluate(slow).step_s
    assert with_best(rows[1], problem, rows) is rows[1]
    alone = replace(problem, cluster=without(problem.cluster, ["a"]))
    assert with_best(rows[0], alone, rows) is rows[0]


@pytest.mark.slow
def test_changes_are_drawn_where_asked(priced: Shell):
    result = priced(f'compare {FILES} --json --no-proof --what-if "remove b" --plot pictures/what-if.pdf')
    assert result.code == 0, result.err
    assert result.json["files"] == ["pictures/what-if.pdf"]
    assert (priced.folder / "pictures" / "what-if.pdf").read_bytes().startswith(b"%PDF")
    drawn = priced(f'compare {FILES} --no-proof --what-if "remove b" --plot what-if')
    assert drawn.out.split()[-2:] == ["what-if.png", "what-if.svg"]
    svg = (priced.folder / "what-if.svg").read_text()
    assert ">remove b</text>" in svg and "4 samples a step, on 'cluster'" in svg


@pytest.mark.slow
def test_the_table_of_changes_fits_80_columns(priced: Shell):
    result = priced(f'compare {FILES} --what-if "add 1 fast to a"')
    assert result.code == 0, result.err
    lines = result.out.splitlines()
    titles = next(line.split() for line in lines if "samples/s" in line)
    assert titles == ["what", "if", "step", "samples/s", "gain", "bound", "cost/1,000", "Wh/1,000"]
    assert any(re.search(r"add 1 fast to a .* \+\d+\.\d%", line) for line in lines)
    assert all(len(line.rstrip()) <= 80 for line in lines if " s " in line)


def test_what_is_not_known_or_does_not_fit_is_left_empty_and_said():
    rows = [
        WhatIfRow("today", None, reason="no pipeline fits"),
        WhatIfRow("remove b", None, reason="nor here"),
    ]
    assert "today" in as_text(what_if_table(rows)) and "no plan" in as_text(what_if_table(rows))
    assert what_if_sentences(rows)[-2:] == ["today: no pipeline fits", "remove b: nor here"]
    assert rows[0].to_json(None)["predicted_step_s"] is None


@pytest.mark.slow
def test_a_change_after_which_nothing_fits_is_a_row_with_the_reason(priced: Shell):
    result = priced(f'compare {FILES} --what-if "memory a 100 B, memory b 100 B"')
    assert result.code == 0, result.err
    assert "no plan" in result.out and "memory a 100 B, memory b 100 B: " in result.out
    (_, row) = priced(f'compare {FILES} --json --what-if "memory a 100 B, memory b 100 B"').json["what_if"]
    assert row["plan"] is None and "bytes" in row["reason"]


@pytest.mark.slow
def test_a_change_that_the_wishes_do_not_go_with_is_a_row_with_the_reason(priced: Shell):
    changes = '--what-if "remove b" --what-if "remove a/0" --what-if "speed a 2"'
    result = priced(f"compare {FILES} --no-proof --pipelines 2 {changes} --json")
    assert result.code == 0, result.err
    rows = {row["change"]: row for row in result.json["what_if"]}
    assert rows["today"]["plan"] and rows["speed a 2"]["gain"] > 0
    assert "2 pipelines need 2 devices" in rows["remove b"]["reason"]
    assert "2 pipelines need 2 devices" in rows["remove a/0"]["reason"]
    assert "leaves none of the 1 devices" in rows["all together"]["reason"]  # b and a/0 are all there are
    refused = priced(f"compare {FILES} --pipelines 3 {changes}")
    assert refused.code == 2 and "3 pipelines need 3 devices" in refused.err
    text = priced(f"compare {FILES} --no-proof --pipelines 2 {changes} --plot rows.pdf").out
    assert "remove b: 2 pipelines need 2 devices" in text and "rows.pdf" in text


def test_all_together_is_no_row_where_one_change_alone_comes_to_the_same():
    cluster = small_cluster()
    assert list(changed_clusters(cluster, ["speed a 2", "speed a 4"], ())) == [
        "today",
        "speed a 2",
        "speed a 4",
    ]
    assert list(changed_clusters(cluster, ["speed a 2", "remove b"], ()))[-1] == "all together"
    failed = changed_clusters(cluster, ["remove b", "speed b 2"], ())["all together"]
    assert isinstance(failed, InputError) and "the cluster has no device or node 'b'" in str(failed)


@pytest.mark.slow
def test_where_nothing_is_measured_kinds_that_changes_add_are_estimated_too(hetpipe: Shell):
    hetpipe.write(
        "cluster.toml", CLUSTER_TOML.replace("fast", "T4").replace("slow", "T4").replace("10 kB", "9 GB")
    )
    options = "--cluster cluster.toml --exclude b --sequence-length 16 --global-batch-size 2 --no-proof"
    result = hetpipe(f'compare --model gpt2-tiny {options} --what-if "add A6000 to a" --json')
    assert result.code == 0, result.err
    (_, added) = result.json["what_if"]
    assert added["gain"] > 0 and "a/1" in added["plan"]["predicted"]["devices"]
    assert "A6000 bfloat16-autocast" in result.err and "not measured: T4, A6000" in result.err


def test_why_there_are_no_costs_is_said_where_some_devices_have_a_price():
    profile, cluster = small_profile(), small_cluster()
    plan = replace(small_plan(), predicted=evaluator(profile, cluster)(small_plan()))
    rows = [WhatIfRow("today", plan, expenses(cluster, plan.device_names))]
    assert unknown_sentences(cluster.devices, rows) == []
    priced = changed(cluster, "price a 2")
    assert unknown_sentences(priced.devices, rows) == [
        "no cost is shown: `price_per_hour` of b/0 is not known"
    ]
    known = changed(priced, "price b 1")
    rows = [WhatIfRow("today", plan, expenses(known, plan.device_names))]
    assert unknown_sentences([*known.devices, *cluster.devices], rows) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ('--what-if "remove b" --strategy ddp', "planned for by auto alone; leave out --strategy"),
        ("--pareto --strategy ddp", "planned for by auto alone; leave out --strategy"),
        ('--what-if "remove b, remove b"', "node 'b' has no devices left"),
        ('--what-if "ad 1 fast to a"', "unknown change 'ad'; did you mean \"add\"?"),
        ('--what-if "add 1 T4 to a"', "the profile has no kind 'T4' (fast, slow); add --estimate T4"),
        ('--what-if "network 1 Tbit/s"', "the profile holds a measured link fast>slow"),
        ('--estimate --what-if "add 1 T4 to a"', "--estimate --what-if names an option, no kind"),
        ("--estimate T9", "the catalogue has no accelerator 'T9'"),
        ('--estimate T4 --what-if "add T4 to a"', "is in the catalogue to estimate T4 from"),
        ('--pareto --what-if "remove b"', "--pareto and --what-if exclude each other"),
        ("--pareto --measure", "--measure runs the strategies"),
        ("--plot front.png", "--plot draws what --what-if, --pareto or --measure finds"),
        ("--pareto --pin b/0=0-1", "leave out --pin"),
        ("--pareto --proof-seconds 5", "--pareto have bounds of their own; leave out --proof-seconds"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_one_line(priced: Shell, options: str, message: str):
    result = priced(f"compare {FILES} {options}")
    assert result.code == 2
    assert message in result.err and result.err.count("\n") == 1 and result.out == ""


@pytest.mark.slow
def test_a_kind_that_is_not_at_hand_is_estimated_when_asked_to(hetpipe: Shell):
    kinds = small_profile().kinds
    profile = replace(small_profile(), kinds={"T4": kinds["fast"], "V100": kinds["slow"]}, links={})
    hetpipe.write("profile.json", profile_text(profile))
    hetpipe.write("cluster.toml", CLUSTER_TOML.replace("fast", "T4").replace("slow", "V100"))
    result = hetpipe(f'compare {FILES} --estimate RTX-4090 --what-if "add RTX-4090 to a" --json')
    assert result.code == 0, result.err
    today, more = result.json["what_if"]
    assert "a/1" in more["plan"]["predicted"]["devices"] and more["gain"] > 0
    assert today["per_hour"] is None
    assert "RTX-4090" in result.err and result.err.startswith("note: estimated")
    assert "'T4' was measured" in hetpipe(f'compare {FILES} --estimate T4 --what-if "remove b"').err


@pytest.mark.slow
def test_each_change_is_told_of_where_planning_takes_long(
    priced: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading.Timer, "start", lambda timer: timer.function())  # it takes long at once
    result = priced(f'compare {FILES} --what-if "remove b" --what-if "speed a 2"')
    rows = ("today", "remove b", "speed a 2", "all together")
    assert [f"planning: {row} ..." for row in rows] == result.err.splitlines()


@pytest.mark.slow
def test_a_kind_is_estimated_for_what_if_as_for_a_profile(hetpipe: Shell):
    kinds = small_profile().kinds
    profile = replace(small_profile(), kinds={"GH200": kinds["fast"]}, links={}, dtype=BFLOAT16_AUTOCAST)
    hetpipe.write("profile.json", profile_text(profile))
    hetpipe.write("cluster.toml", CLUSTER_TOML.replace("fast", "GH200").replace("slow", "GH200"))
    line = f'compare {FILES} --estimate T4 --what-if "add T4 to a" --json'
    refused = hetpipe(line)
    assert refused.code == 2
    assert "T4 has no units for bfloat16" in refused.err and refused.err.count("\n") == 2
    result = hetpipe(f"{line} --allow-slow-bf16")
    assert result.code == 0, result.err
    assert "warning: T4 is estimated from GH200, which is itself far off: median error" in result.err
    assert [row["change"] for row in result.json["what_if"]] == ["today", "add T4 to a"]


@pytest.mark.slow
def test_the_front_is_printed_and_drawn(priced: Shell):
    result = priced(f"compare {FILES} --pareto --plot front.png")
    assert result.code == 0, result.err
    assert "1 slow" in result.out and "cost/1,000" in result.out and "Wh/1,000" in result.out
    assert "planned for 3 of 3 sets of devices; by their bounds the others cannot hold" in result.out
    assert (priced.folder / "front.png").stat().st_size > 10_000 and (priced.folder / "front.svg").exists()
    found = priced(f"compare {FILES} --pareto --json").json
    steps = [costed["predicted_step_s"] for costed in found["front"]]
    assert steps == sorted(steps) and found["complete"] and found["within"] == 1.0
    assert steps[0] == priced(f"plan {FILES} --json").json["predicted"]["step_s"]
    assert found["front"][-1]["devices"] == ["b/0"]


@pytest.mark.slow
def test_a_plan_by_money_energy_deadline_or_budget(priced: Shell):
    fastest = priced(f"plan {FILES} --json").json["predicted"]["step_s"]
    cheapest = priced(f"plan {FILES} --objective money --json").json
    assert list(cheapest["predicted"]["devices"]) == ["b/0"]  # half as fast, for a quarter of the price
    assert cheapest["expenses"]["per_hour"] == 1.0
    least_energy = priced(f"plan {FILES} --objective energy --json").json
    assert list(least_energy["predicted"]["devices"]) == ["b/0"]
    in_time = priced(f'plan {FILES} --objective money --deadline "{fastest} s" --json').json
    assert in_time["predicted"]["step_s"] == fastest
    within = priced(f"plan {FILES} --budget-per-hour 4.5 --json").json
    assert list(within["predicted"]["devices"]) == ["a/0"]


@pytest.mark.slow
def test_a_plan_of_an_objective_says_what_it_takes_and_is_one_of_the_whole_cluster(priced: Shell):
    result = priced(f"plan {FILES} --objective money -o cheap.json")
    assert result.code == 0, result.err
    assert "the devices used take 1 an hour, " in result.out and "100 W" in result.out
    assert "none of the others can be better" in result.out
    assert re.search(r"no plan within the limits takes less than \d+\.\d% of this money; gap ", result.out)
    files = "--profile profile.json --cluster cluster.toml"
    assert priced(f"simulate cheap.json {files} --json").err.count("warning") == 0


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ("--deadline 2", 2, "'2' has no unit"),
        ('--deadline "1 ms"', 3, "no plan has a step of 1 ms or less"),
        ("--budget-per-hour 0.5", 3, "the cheapest cost 1; raise the budget"),
        ("--budget-per-hour -1", 2, "a budget of -1 an hour is none"),
        ("--budget-per-hour nan", 2, "a budget of nan an hour is none"),
        ("--objective money --strategy single", 2, "are for --strategy auto"),
        ("--objective speed", 2, "speed"),
        ("--objective money --schedule list", 2, "leave out --schedule"),
        ("--objective money --proof-seconds 5", 2, "leave out --proof-seconds"),
    ],
)
def test_limits_that_cannot_be_kept_are_refused(priced: Shell, options: str, code: int, message: str):
    result = priced(f"plan {FILES} {options}")
    assert result.code == code
    assert message in result.err and result.err.count("\n") == 1


def test_a_budget_for_devices_on_which_nothing_fits_is_named(hetpipe: Shell):
    head, first, _ = CLUSTER_TOML.split(
        "[[nodes]]"
    )  # two hold the states of the model, three what is in flight
    three = '"fast", price_per_hour = 0.1, count = 3, memory = "2 kB"'
    hetpipe.write("cluster.toml", f"{head}[[nodes]]{first}".replace('"fast", memory = "10 kB"', three))
    files = FILES.replace("size 4", "size 8")
    assert hetpipe(f"plan {files} --budget-per-hour 0.3").code == 0
    result = hetpipe(f"plan {files} --budget-per-hour 0.2")
    assert result.code == 3
    assert result.err == "error: no plan fits on devices of at most 0.2 an hour; give a larger budget\n"


def test_prices_that_are_not_known_are_asked_for_before_anything_is_measured(hetpipe: Shell):
    # there is no such profile: it would be read next
    files = "--profile none.json --cluster cluster.toml"
    result = hetpipe(f"plan {files} --objective money")
    assert result.code == 2 and "device 'a/0' has no `price_per_hour`" in result.err
    assert "neither prices nor watts are known" in hetpipe(f"compare {files} --pareto").err
    assert "leave out --pin" in hetpipe(f"plan {files} --deadline 5s --pin a/0=0-1").err
    assert "none.json" in hetpipe(f"plan {files} --deadline 5s").err
