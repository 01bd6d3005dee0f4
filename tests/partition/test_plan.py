"""plan.json: round trip, hashes, and every refusal with its message."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from cost_model.errors import InputError
from cost_model.memory import StageShape, device_memory
from partition.estimates.plan_memory import plan_memory
from partition.plan import Pipeline, Plan, Stage
from partition.plan_file import plan_from_data, plan_text, read_plan
from partition.problem import check_plan
from partition.solver import solve
from random_problems import closed_form, random_problem


def two_stages(**changes: Any) -> dict[str, Any]:
    """Return a plan of two stages, as data; changes replace keys of the plan."""
    stages = [
        {"devices": ["big/0"], "layers": [0, 3], "in_flight": 2, "recompute": False},
        {"devices": ["old/0"], "layers": [3, 4], "in_flight": 1, "recompute": True},
    ]
    pipeline = {"microbatch_size": 2, "num_samples": 7, "stages": stages}
    data = {"format": "hetpipe.plan/1", "model": "small", "global_batch_size": 7, "pipelines": [pipeline]}
    return {**data, **changes}


def with_stage(index: int, **changes: Any) -> dict[str, Any]:
    data = two_stages()
    data["pipelines"][0]["stages"][index].update(changes)
    return data


def with_pipeline(**changes: Any) -> dict[str, Any]:
    data = two_stages()
    data["pipelines"][0].update(changes)
    return data


def test_round_trip() -> None:
    plan = plan_from_data(two_stages(), "plan.json")
    assert plan.strategy == "manual" and plan.device_names == ("big/0", "old/0")
    assert plan_from_data(json.loads(plan_text(plan)), "plan.json") == plan


def test_a_plan_file_is_short_and_has_a_line_for_each_stage() -> None:
    stages = [
        {"devices": [f"node/{index}"], "layers": [8 * index, 8 * index + 8], "in_flight": 3 - index,
         "recompute": False}
        for index in range(3)
    ]  # fmt: skip
    pipeline = {"microbatch_size": 2, "num_samples": 16, "stages": stages}
    text = plan_text(plan_from_data(two_stages(global_batch_size=16, pipelines=[pipeline]), "plan.json"))
    lines = [line.strip().rstrip(",") for line in text.splitlines()]
    assert [json.loads(line) for line in lines if "devices" in line] == stages
    assert len(lines) < 25 and max(map(len, text.splitlines())) <= 100


def test_segments_are_in_the_file_only_where_there_are_several() -> None:
    plan = plan_from_data(with_stage(0, recompute=True, segment_layers=2), "plan.json")
    assert plan.pipelines[0].stages[0].segments == ((0, 2), (2, 3))
    assert plan_from_data(json.loads(plan_text(plan)), "plan.json") == plan
    whole = plan_from_data(with_stage(0, recompute=True, segment_layers=0), "plan.json")
    assert "segment_layers" not in plan_text(whole)
    assert whole == plan_from_data(with_stage(0, recompute=True), "plan.json")
    assert whole.pipelines[0].stages[0].segments == ((0, 3),) and whole.sha256 != plan.sha256


def test_layers_may_have_stages_of_zero_of_their_own() -> None:
    plan = plan_from_data(two_stages(zero=3, layer_zero=[1, 3, 2, 1]), "plan.json")
    assert [plan.sharding_of(layer) for layer in range(4)] == [1, 3, 2, 1]
    assert plan_from_data(json.loads(plan_text(plan)), "plan.json") == plan
    alike = plan_from_data(two_stages(zero=3), "plan.json")
    assert [alike.sharding_of(layer) for layer in range(4)] == [3, 3, 3, 3]
    assert "layer_zero" not in plan_text(alike) and alike.sha256 != plan.sha256


def test_a_plan_that_was_not_edited_keeps_its_figures(tmp_path: Path) -> None:
    problem = random_problem(3)
    plan = solve(problem, closed_form(problem))
    path = tmp_path / "plan.json"
    path.write_text(plan_text(plan))
    again = read_plan(path)
    assert plan.predicted is not None and again == plan and again.predicted == plan.predicted
    predicted = json.loads(path.read_text())["predicted"]
    assert predicted["gap"] == predicted["step_s"] / predicted["bound_s"] - 1
    path.write_text(json.dumps(json.loads(path.read_text())))  # other white space is no edit
    assert read_plan(path) == plan


def test_an_edited_plan_is_called_so_and_loses_its_figures(tmp_path: Path) -> None:
    problem = random_problem(3)
    plan = solve(problem, closed_form(problem))
    data = json.loads(plan_text(plan))
    edits = (
        {"predicted": {**data["predicted"], "bound_s": 1e9}},
        {"predicted": []},
        {"global_batch_size": data["global_batch_size"] + 1, "pipelines": _one_sample_more(data)},
    )
    for edit in edits:
        edited = plan_from_data(data | edit, "plan.json")
        assert (edited.strategy, edited.predicted) == ("auto, edited", None)
        assert edited.profile_sha256 == plan.profile_sha256
        again = plan_from_data(json.loads(plan_text(edited)), "plan.json")
        assert again == edited  # written anew it is as it says
        more = json.loads(plan_text(edited)) | {"model": "other"}
        assert plan_from_data(more, "plan.json").strategy == "auto, edited"
    unsealed = {key: value for key, value in data.items() if key != "sha256"}
    assert plan_from_data(unsealed, "plan.json") == dataclasses.replace(plan, predicted=None)


def _one_sample_more(data: dict[str, Any]) -> list[dict[str, Any]]:
    first, *others = data["pipelines"]
    return [{**first, "num_samples": first["num_samples"] + 1}, *others]


def test_hash_depends_on_what_is_decided() -> None:
    plans = [plan_from_data(data, "plan.json") for data in (two_stages(), with_stage(0, in_flight=3))]
    assert plans[0].sha256 != plans[1].sha256


def test_last_microbatch_is_smaller_and_in_flight_is_clamped() -> None:
    (pipeline,) = plan_from_data(with_stage(0, in_flight=9), "plan.json").pipelines
    assert [pipeline.microbatch_samples(index) for index in range(pipeline.num_microbatches)] == [2, 2, 2, 1]
    assert pipeline.in_flight(0) == 4


def test_in_flight_may_rise_where_there_are_no_more_microbatches() -> None:
    stages = (Stage(("a/0",), (0, 1), 1), Stage(("b/0",), (1, 2), 2))
    single = Pipeline(2, 2, stages)
    assert [single.in_flight(stage) for stage in range(2)] == [1, 1]
    with pytest.raises(InputError, match="in_flight rises from 1 to 2"):
        Pipeline(1, 2, stages)


def test_shared_device_holds_the_union_of_its_layers_once() -> None:
    profile = random_problem(0).profile
    whole = (0, profile.num_layers)
    alone = Pipeline(1, 2, (Stage(("a/0",), whole, 1),))
    shared = Plan("manual", "random", 4, (alone, alone))
    assert shared.layers_of("a/0") == tuple(range(*whole)) and shared.layers_of("b/0") == ()
    shape = StageShape(*whole, 1, 1)
    assert plan_memory(shared, profile, "a/0") == device_memory(profile, [shape, shape])


REFUSED = [
    (two_stages(format="hetpipe.plan/2"), "format is 'hetpipe.plan/2', this version reads 'hetpipe.plan/1'"),
    (two_stages(stratgy="auto"), 'unknown key "stratgy"; did you mean "strategy"?'),
    (with_stage(0, layer=[0, 1]), 'unknown key "pipelines[0].stages[0].layer"; did you mean "layers"?'),
    (two_stages(pipelines=[]), "the plan has no pipelines; give at least one"),
    (
        two_stages(global_batch_size=8),
        "num_samples of the pipelines add up to 7, global_batch_size is 8; each sample needs a pipeline",
    ),
    (two_stages(zero=4), "zero is 4; 0, 1, 2 and 3 are known"),
    (
        two_stages(zero=3, layer_zero=[3, 3, 1]),
        "layer_zero is [3, 3, 1], and zero 3; give each of the 4 layers a number from 1 to zero, at least "
        "one of them zero itself",
    ),
    (
        two_stages(zero=2, gradient_dtype="bf16"),
        "zero is 2, and gradient_dtype is 'bf16'; gradients that are summed in each microbatch would be "
        "rounded each time: give zero 1, or leave gradient_dtype out",
    ),
    (two_stages(zero=3, layer_zero=[3, 0, 1, 1]), "layer_zero is [3, 0, 1, 1], and zero 3; give each"),
    (two_stages(zero=3, layer_zero=[2, 2, 1, 1]), "layer_zero is [2, 2, 1, 1], and zero 3; give each"),
    (two_stages(layer_zero=[1, 1, 1, 1]), "layer_zero is [1, 1, 1, 1], and zero 0; give each"),
    (with_stage(0, devices=[]), "a stage names 0 devices; give one (groups come later)"),
    (with_stage(0, devices=["a/0", "a/1"]), "a stage names 2 devices; give one (groups come later)"),
    (with_stage(0, layers=[2, 2]), "layers [2, 2] are not a range [start, stop) of at least one layer"),
    (with_stage(0, layers=[-1, 3]), "layers [-1, 3] are not a range [start, stop) of at least one layer"),
    (with_stage(0, in_flight=0), "in_flight is 0; give at least 1"),
    (with_stage(0, segment_layers=2), "segment_layers is 2 and recompute is false; set recompute true"),
    (with_stage(1, segment_layers=3), "segment_layers is 3; give 1, 2, 4, 8 or another power of two"),
    (with_stage(1, segment_layers=-1), "segment_layers is -1; give 1, 2, 4, 8 or another power of two"),
    (with_stage(1, segment_layers=True), "pipelines[0].stages[1].segment_layers: "),
    (with_stage(0, in_flight=1.5), "pipelines[0].stages[0].in_flight: "),
    (
        with_stage(1, layers=[2, 4]),
        "stages[1].layers starts at 2, the stage before it stops at 3; stages must cover all layers in order",
    ),
    (
        with_stage(1, in_flight=3),
        "in_flight rises from 2 to 3 at stages[1]",
    ),
    (
        with_pipeline(stages=[]),
        "a pipeline has 0 stages, microbatch_size 2 and num_samples 7; each must be at least 1",
    ),
    (with_pipeline(microbatch_size=0), "microbatch_size 0 and num_samples 7; each must be at least 1"),
]


@pytest.mark.parametrize(("data", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_refusals_name_file_value_and_remedy(data: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        plan_from_data(data, "plan.json")
    assert str(caught.value).startswith("plan.json: ") and message in str(caught.value)


def test_pipelines_must_cover_the_same_layers() -> None:
    short, long = (Pipeline(1, 1, (Stage(("a/0",), (0, stop), 1),)) for stop in (2, 3))
    with pytest.raises(InputError, match="the pipelines stop at different layers; each must cover them all"):
        Plan("manual", "small", 2, (short, long))


def test_plan_must_match_profile_and_cluster() -> None:
    problem = random_problem(0)
    profile, cluster = problem.profile, problem.cluster

    def plan(model: str, device: str, stop: int) -> Plan:
        return Plan("manual", model, 1, (Pipeline(1, 1, (Stage((device,), (0, stop), 1),)),))

    name = cluster.devices[0].name
    check_plan(plan("random", name, profile.num_layers), profile, cluster)
    with pytest.raises(InputError, match=rf"layers \[0, 2\) in 1 stages, 'random' has {profile.num_layers}"):
        check_plan(plan("random", name, 2), profile, cluster)
    with pytest.raises(InputError, match="the plan is for 'other', the profile for 'random'"):
        check_plan(plan("other", name, profile.num_layers), profile, cluster)
    with pytest.raises(InputError, match="unknown device 'a/9'; did you mean"):
        check_plan(plan("random", "a/9", profile.num_layers), profile, cluster)


def test_what_cannot_be_sharded_by_layer_is_refused() -> None:
    problem = random_problem(0)
    profile, cluster = problem.profile, problem.cluster
    first, second = (device.name for device in cluster.devices[:2])
    whole = (0, profile.num_layers)

    def plan(zero: int, *stages: Stage, samples: int = 1) -> Plan:
        pipelines = tuple(Pipeline(1, samples, (stage,)) for stage in stages)
        return Plan("manual", "random", samples * len(stages), pipelines, zero=zero)

    one, other = Stage((first,), whole, 1), Stage((second,), whole, 1)
    for zero, stages, message in (
        (2, (one, one), f"zero is 2, and device '{first}' serves 2 stages"),
        (2, (one, dataclasses.replace(other, recompute=True)), "are recomputed several at once"),
        (2, (one, dataclasses.replace(other, offload=("optimizer states",))), "a stage has offload"),
    ):
        with pytest.raises(InputError, match=message):
            plan(zero, *stages, samples=2)

    # as they are held, weights are used neither in 16 bits nor by compiled blocks
    kinds = {name: dataclasses.replace(kind) for name, kind in profile.kinds.items()}
    halves = dataclasses.replace(profile, dtype="bfloat16-autocast", kinds=kinds)
    compiled = dataclasses.replace(profile, compiled=True)
    check_plan(plan(3, one, other), profile, cluster)
    for changed, message in ((halves, "keeps copies of all weights in 16 bits"), (compiled, "are compiled")):
        check_plan(plan(2, one, other), changed, cluster)
        with pytest.raises(InputError, match=f"zero is 3, and .*{message}.*; give zero 2"):
            check_plan(plan(3, one, other), changed, cluster)
