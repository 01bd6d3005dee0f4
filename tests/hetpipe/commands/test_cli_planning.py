"""`plan`, `simulate`, `explain`, `compare` and `plot`: what they print, and what they write."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from cost_model.cluster_file import read_cluster
from cost_model.profile import profile_text
from cost_model.units import format_seconds
from hetpipe.commands.inputs import plan_request
from hetpipe.commands.options import PlanOptions
from hetpipe.simulation.shared_choice import EVERYWHERE, TIES, Look, least_shared
from partition.plan_file import plan_text, read_plan
from planned_once import each_plan_once
from shell import Shell
from small_case import CLUSTER_TOML as CLUSTER
from small_case import MEETING_TOML, meeting_chains, small_profile

ESTIMATES = "estimated, not measured: slow; not to be trusted: slow (not in the catalogue)"


@pytest.fixture(autouse=True, scope="module")
def _each_plan_once() -> Iterator[None]:
    with each_plan_once():
        yield


def test_plan_prints_the_plan_and_the_comparison(hetpipe: Shell):
    result = hetpipe("plan --profile profile.json --cluster cluster.toml --global-batch-size 4")
    assert result.code == 0
    assert result.out.startswith("auto: made-up, 4 samples a step")
    assert "can be faster than" in result.out
    for strategy in ("single", "gpipe-even", "torchgpipe", "speed-proportional"):
        assert strategy in result.out
    assert "\x1b" not in result.out + result.err
    assert f"{ESTIMATES}\n" in result.out
    assert result.err in ("", "planning ...\n")


def test_plan_writes_what_simulate_reads(hetpipe: Shell):
    files = "--profile profile.json --cluster cluster.toml"
    planned = hetpipe(f"plan {files} --global-batch-size 4 -o new.json --json")
    assert planned.json == json.loads((hetpipe.folder / "new.json").read_text())
    assert read_plan(hetpipe.folder / "new.json").global_batch_size == 4
    simulated = hetpipe(f"simulate new.json {files} --json")
    assert simulated.json["step_s"] == planned.json["predicted"]["step_s"]
    assert planned.err == simulated.err == f"note: {ESTIMATES}\n"


def test_plan_explain_and_simulate_give_the_same_bound(hetpipe: Shell):
    files = "--profile profile.json --cluster cluster.toml"
    for more in ("", " -v"):
        planned = hetpipe(f"plan {files} --global-batch-size 4 -o new.json{more}").out
        (said,) = [line for line in planned.splitlines() if "can be faster than" in line]
        assert ("no plan (pipelines that share no device" in said) is (more == " -v")
        for verb in ("explain", "simulate"):
            assert said in hetpipe(f"{verb} new.json {files}{more}").out
    slower = CLUSTER.replace("0.25 s", "0.5 s")  # then it is no bound any more
    hetpipe.write("cluster.toml", slower)
    assert said not in hetpipe(f"simulate new.json {files} -v").out


def test_an_edited_plan_is_called_edited(hetpipe: Shell):
    files = "--profile profile.json --cluster cluster.toml"
    hetpipe(f"plan {files} --global-batch-size 4 -o new.json")
    text = (hetpipe.folder / "new.json").read_text()
    hetpipe.write("new.json", text.replace('"recompute": false', '"recompute": true', 1))
    assert hetpipe(f"simulate new.json {files}").out.startswith("auto, edited: made-up, 4 samples a step")
    hetpipe.write("new.json", text)
    assert hetpipe(f"simulate new.json {files}").out.startswith("auto: made-up, ")


def test_plan_prints_a_program(hetpipe: Shell):
    result = hetpipe("plan --profile profile.json --cluster cluster.toml --strategy single --program")
    assert "hetpipe.program/1 plan=" in result.out
    assert re.search(r"^rank 0 a/0: 0F0 ", result.out, re.MULTILINE)


def test_simulate_writes_a_trace_and_a_picture(hetpipe: Shell):
    files = "--profile profile.json --cluster cluster.toml"
    result = hetpipe(f"simulate plan.json {files} --trace trace.json --plot step.png")
    assert result.code == 0, result.err
    assert f"{ESTIMATES}\n" in result.out
    assert json.loads((hetpipe.folder / "trace.json").read_text())["traceEvents"]
    assert (hetpipe.folder / "step.png").exists() and (hetpipe.folder / "step.svg").exists()


def test_simulate_warns_of_another_profile_and_cluster(hetpipe: Shell):
    files = "--profile profile.json --cluster cluster.toml"
    hetpipe(f"plan {files} -o new.json")
    hetpipe.write("cluster.toml", CLUSTER.replace("0.25 s", "0.5 s"))
    result = hetpipe(f"simulate new.json {files} --json")
    made_from = read_plan(hetpipe.folder / "new.json").cluster_sha256
    now = read_cluster(hetpipe.folder / "cluster.toml").sha256
    assert made_from is not None
    assert result.err.startswith("warning: the plan was made from the cluster ")
    assert made_from[:12] in result.err and now[:12] in result.err
    assert result.err.count("\n") == 2 and ESTIMATES in result.err
    assert result.json["step_s"] > 0


def test_what_is_forced_is_respected(hetpipe: Shell):
    files = "--profile profile.json --cluster cluster.toml --global-batch-size 4"
    pinned = hetpipe(f"plan {files} --pin b/0=0-1 --json --no-proof")
    assert pinned.code == 0, pinned.err
    (pipeline,) = pinned.json["pipelines"]
    assert [(s["devices"], s["layers"]) for s in pipeline["stages"]] == [(["b/0"], [0, 2]), (["a/0"], [2, 4])]
    assert len(hetpipe(f"plan {files} --pipelines 2 --json").json["pipelines"]) == 2
    assert list(hetpipe(f"plan {files} --max-devices 1 --json").json["predicted"]["devices"]) == ["a/0"]
    assert "b/0" in hetpipe(f"plan {files} --pin b/0=0-1").out


def test_a_thorough_search_is_for_auto_alone_and_no_plan_is_worse(hetpipe: Shell):
    files = "--profile profile.json --cluster cluster.toml --global-batch-size 4 --no-proof"
    short, thorough = (hetpipe(f"plan {files} {option} --json").json for option in ("", "--thorough"))
    assert thorough["predicted"]["step_s"] <= short["predicted"]["step_s"]
    refused = hetpipe(f"plan {files} --thorough --strategy single")
    assert refused.code == 2
    assert refused.err == "error: --thorough is for --strategy auto; 'single' searches for nothing\n"


def test_plans_for_a_shared_network_are_for_auto_alone_and_no_worse_there(hetpipe: Shell):
    files = "--profile profile.json --cluster cluster.toml"
    batch = "--global-batch-size 4 --no-proof"
    steps = []
    for option in ("", "--shared-network"):
        assert hetpipe(f"plan {files} {batch} {option} -o new.json").code == 0
        found = hetpipe(f"simulate new.json {files} --json").json
        steps.append(max(found["step_s"], found["shared_step_s"]))
    assert 0 < steps[1] <= steps[0]
    objective = "--objective, --deadline and --budget-per-hour go by steps by turns"
    for command, reason in (
        ("plan --strategy single", "--shared-network is for --strategy auto; 'single' has one plan"),
        ("plan --deadline 5s", f"{objective}; leave out --shared-network"),
        ("compare --pareto", "--what-if and --pareto compare steps by turns; leave out --shared-network"),
    ):
        refused = hetpipe(f"{command} {files} {batch} --shared-network")
        assert (refused.code, refused.err) == (2, f"error: {reason}\n")


@pytest.mark.parametrize(("asked", "looks"), [(False, (TIES,)), (True, EVERYWHERE)])
def test_of_equals_the_plan_is_taken_whose_messages_meet_less_unless_all_may_be(
    tmp_path: Path, asked: bool, looks: tuple[Look, ...]
):
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    request = plan_request(tmp_path / "cluster.toml", PlanOptions(shared_network=asked), "auto")
    profile = small_profile()
    assert request.choose(profile) == least_shared(profile, request.usable, looks)
    assert request.choose(profile) != least_shared(profile, request.usable, ())


def test_a_step_whose_messages_meet_is_said_to_be_longer(hetpipe: Shell):
    plan, profile, _ = meeting_chains(3)
    for name, text in (
        ("meeting.json", plan_text(plan)),
        ("meeting_profile.json", profile_text(profile)),
        ("meeting.toml", MEETING_TOML),
    ):
        hetpipe.write(name, text)
    files = "--profile meeting_profile.json --cluster meeting.toml"
    found = hetpipe(f"simulate meeting.json {files} --json").json
    longer = found["shared_step_s"] / found["step_s"] - 1
    assert longer > 0.1
    said = f"a step may take about {format_seconds(found['shared_step_s'])}, {longer:.0%} longer"
    text = " ".join(hetpipe(f"simulate meeting.json {files}").out.split())
    assert "messages meet: where connections share network cards, as TCP's do, " + said in text
    alone = hetpipe("simulate plan.json --profile profile.json --cluster cluster.toml")
    assert alone.code == 0
    assert "messages meet" not in alone.out


def test_what_is_excluded_is_left_out(hetpipe: Shell):
    files = "--profile profile.json --cluster cluster.toml --global-batch-size 4"
    result = hetpipe(f"plan {files} --exclude a -o new.json")
    assert result.code == 0, result.err
    assert "left out: a/0" in result.out
    assert read_plan(hetpipe.folder / "new.json").device_names == ("b/0",)
    assert (
        hetpipe(f"simulate new.json {files.partition(' --global')[0]}").err == ""
    )  # the cluster is the same
    outcomes = hetpipe(f"compare {files} --exclude a/0 --json").json["strategies"]
    assert {name for entry in outcomes for name in entry["plan"]["predicted"]["devices"]} == {"b/0"}


def test_a_bound_of_some_devices_is_said_to_be_of_these_wherever_the_plan_is_read(hetpipe: Shell):
    files = "--profile profile.json --cluster cluster.toml"
    bounded = "no plan of its kind without a can be faster than"
    planned = hetpipe(f"plan {files} --global-batch-size 4 --exclude a -o new.json")
    assert bounded in " ".join(planned.out.split())
    assert json.loads((hetpipe.folder / "new.json").read_text())["predicted"]["bound_without"] == ["a"]
    explained = " ".join(hetpipe(f"explain new.json {files}").out.split())
    assert bounded in explained and "faster than this plan" in explained
    assert "no plan without a (all plans" in " ".join(hetpipe(f"simulate new.json {files} -v").out.split())
    whole = hetpipe(f"plan {files} --global-batch-size 4 --json").json
    assert whole["predicted"]["bound_without"] == []


def test_times_of_zero_are_planned_for_and_compared(hetpipe: Shell):
    profile = json.loads((hetpipe.folder / "profile.json").read_text())
    profile["links"] = {}
    for kind in profile["kinds"].values():
        kind["optimizer_s_per_byte"] = 0.0
        for layer in kind["layers"]:
            layer |= {key: [0.0] * len(layer[key]) for key in ("forward_s", "backward_s")}
    hetpipe.write("zero.json", json.dumps(profile))
    hetpipe.write("one.toml", CLUSTER.partition("[[nodes]]")[0] + "[[nodes]]" + CLUSTER.split("[[nodes]]")[1])
    files = "--profile zero.json --cluster one.toml"
    planned = hetpipe(f"plan {files} --global-batch-size 4 -o new.json")
    assert planned.code == 0, planned.err
    assert "Infinity" not in (hetpipe.folder / "new.json").read_text()
    compared = hetpipe(f'compare {files} --global-batch-size 4 --what-if "speed a 2"')
    assert (compared.code, compared.err) == (0, "")
    drawn = hetpipe(f"plot new.json {files} -o new.png")
    assert (drawn.code, drawn.err[:28]) == (2, "error: a step takes no time,")
    assert hetpipe(f"simulate new.json {files} --json").json["step_s"] == 0.0


def test_what_is_forced_and_does_not_fit_is_exit_code_3(hetpipe: Shell):
    hetpipe.write("cluster.toml", CLUSTER.replace('"slow", memory = "10 kB"', '"slow", memory = "1 kB"'))
    result = hetpipe("plan --profile profile.json --cluster cluster.toml --pin b/0=0-2")
    assert result.code == 3
    assert "the pin b/0=0-2" in result.err and "bytes are missing" in result.err


def test_what_fits_nowhere_is_told_once(hetpipe: Shell):
    hetpipe.write("cluster.toml", CLUSTER.replace("10 kB", "2 kB"))
    result = hetpipe("compare --profile profile.json --cluster cluster.toml --no-proof")
    assert result.code == 3
    assert "no strategy fits; auto: no pipeline fits, whatever the order: " in result.err
    assert result.err.count("bytes are missing") == 1


def test_explain_says_why(hetpipe: Shell):
    files = "--profile profile.json --cluster cluster.toml"
    result = hetpipe(f"explain plan.json {files}")
    assert result.code == 0, result.err
    assert "a/0 has layers 0-2, limited by" in result.out and "b/0 has layer 3, limited by" in result.out
    assert "the fastest single device, a/0," in result.out
    assert re.search(r"of the speed of all devices \d+\.\d% computes; \d+\.\d% waits for ", result.out)
    found = hetpipe(f"explain plan.json {files} --json").json
    assert [stage["device"] for stage in found["stages"]] == ["a/0", "b/0"]
    assert {"left_out", "alternatives", "sentences", "step_s"} <= found.keys()
    assert sum(found["speed"].values()) == pytest.approx(1)


@pytest.mark.slow
def test_compare_shows_every_strategy(hetpipe: Shell):
    files = "--profile profile.json --cluster cluster.toml"
    told = hetpipe(f"compare {files} --json").json
    outcomes, gain = told["strategies"], told["gain"]
    assert outcomes[-1]["strategy"] == "auto"
    assert all(outcome["fits"] == (outcome["plan"] is not None) for outcome in outcomes)
    steps = [outcome["predicted_step_s"] for outcome in outcomes if outcome["fits"]]
    assert min(steps) == steps[-1]
    assert gain["total"] == pytest.approx(gain["balance"] * gain["memory"])
    shown = hetpipe(f"compare {files}").out
    assert "speed-up of ours" in shown and f"{ESTIMATES}\n" in shown
    assert re.search(rf"as fast as the best other strategy that fits, {gain['over']}\b", shown)
    others = [entry for entry in outcomes[:-1] if entry["fits"]]
    assert gain["over"] == min(others, key=lambda entry: entry["predicted_step_s"])["strategy"]
    assert "can be faster than" in shown


@pytest.mark.slow
def test_plot_draws_a_plan(hetpipe: Shell):
    result = hetpipe("plot plan.json --profile profile.json --cluster cluster.toml -o pictures --json")
    assert result.code == 0, result.err
    names = {Path(name).name for name in result.json["files"]}
    assert names == {
        f"{name}.{suffix}"
        for name in ("step", "beside-even", "memory", "layers", "speed-ups")
        for suffix in ("png", "svg")
    }
    assert names == {path.name for path in (hetpipe.folder / "pictures").iterdir()}


@pytest.mark.slow
def test_plot_draws_a_plan_on_one_page(hetpipe: Shell):
    files = "--profile profile.json --cluster cluster.toml"
    assert hetpipe(f"plot plan.json {files} -o out.png").out.split() == ["out.png", "out.svg"]
    assert (hetpipe.folder / "out.png").stat().st_size > 10_000
    assert hetpipe(f"plot plan.json {files} -o out.pdf").out.split() == ["out.pdf"]
    assert (hetpipe.folder / "out.pdf").read_bytes().startswith(b"%PDF")


@pytest.mark.slow
def test_a_proof_takes_the_seconds_that_it_is_given(hetpipe: Shell):
    line = "plan --profile profile.json --cluster cluster.toml --global-batch-size 4 --json"
    without = hetpipe(f"{line} --no-proof").json
    assert without["predicted"]["bound_s"] == without["predicted"]["fractional_bound_s"]
    assert hetpipe(f"{line} --proof-seconds 0").json == without
    proven = hetpipe(f"{line} --proof-seconds 30").json["predicted"]
    assert proven["bound_s"] > without["predicted"]["bound_s"]
    assert hetpipe(f"{line} --no-proof --proof-seconds 30").err == (
        "error: --no-proof leaves out what --proof-seconds 30 is for; give one of them\n"
    )
    assert hetpipe(f"{line} --proof-seconds -1").code == 2


@pytest.mark.slow
def test_a_plan_by_estimates_is_looked_at_without_a_card_or_a_profile(hetpipe: Shell):
    """On a host with none of the GPUs `plan` estimates all; what looks at its plan has to do so, too."""
    hetpipe.write(
        "gpus.toml",
        CLUSTER.replace('"fast"', '"V100-PCIE-16GB"').replace('"slow"', '"T4"').replace("10 kB", "16 GB"),
    )
    of = "--model bert-tiny --cluster gpus.toml"
    planned = hetpipe(f"plan {of} --no-proof --strategy single -o new.json --json")
    assert planned.code == 0, planned.err
    simulated = hetpipe(f"simulate new.json {of} --json")
    assert simulated.json["step_s"] == pytest.approx(planned.json["predicted"]["step_s"])
    assert "warning" not in simulated.err  # it is the same profile
    assert "the fastest single device" in hetpipe(f"explain new.json {of}").out
    assert "plan.png" in hetpipe(f"plot new.json {of} -o plan.png").out


def test_what_names_no_profile_and_no_model_is_told_both(hetpipe: Shell):
    for line in ("simulate plan.json --cluster cluster.toml", "plot plan.json --cluster cluster.toml"):
        result = hetpipe(line)
        assert result.code == 2 and "--profile" in result.err and "--model" in result.err
    refused = hetpipe("plot runs --model bert-tiny")
    assert (refused.code, refused.out) == (2, "")


def test_a_comparison_says_that_what_is_forced_is_so_for_ours_alone(hetpipe: Shell):
    files = "--profile profile.json --cluster cluster.toml --no-proof --global-batch-size 4"
    for verb in ("plan", "compare"):
        assert (
            "(--pin, --pipelines, --max-devices) is so for auto alone"
            in hetpipe(f"{verb} {files} --pin b/0=0-1").out
        )
        assert "auto alone" not in hetpipe(f"{verb} {files}").out


def test_what_is_wrong_in_a_plan_is_told_with_its_file_and_before_anything_is_measured(hetpipe: Shell):
    plan = json.loads((hetpipe.folder / "plan.json").read_text())
    (*_, last) = plan["pipelines"][0]["stages"]
    last["layers"][1] += 1
    hetpipe.write("long.json", json.dumps(plan))
    last["layers"][1] -= 1
    last["devices"] = ["c/0"]
    hetpipe.write("wrong.json", json.dumps(plan))
    files = "--profile profile.json --cluster cluster.toml"
    for line in (
        *(f"{verb} wrong.json {files}" for verb in ("simulate", "explain", "plot")),
        "simulate wrong.json --model bert-tiny --cluster cluster.toml",
        "run --model bert-tiny --cluster cluster.toml --plan wrong.json",
    ):
        result = hetpipe(line)
        assert (result.code, result.out) == (2, ""), line
        assert result.err.startswith("error: wrong.json: unknown device 'c/0'; did you mean")
    for verb in ("simulate", "explain", "plot"):
        assert hetpipe(f"{verb} long.json {files}").err.startswith("error: long.json: the plan covers layers")
