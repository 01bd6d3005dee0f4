import copy
import json
import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_model.cluster import Link
from cost_model.errors import InputError
from cost_model.interpolation import interpolate
from cost_model.layer_costs import Prices
from cost_model.memory import trained_bytes
from cost_model.profile import profile_from_data, profile_text, read_profile
from hetpipe.simulation.prediction import predict
from partition.plan_file import plan_from_data, plan_text, read_plan
from places import GOLDEN
from random_problems import in_two_precisions, random_problem, random_profile
from small_case import check_golden, small_cluster, small_plan, small_profile


def data() -> dict[str, Any]:
    return copy.deepcopy(json.loads(profile_text(small_profile())))


def test_profile_survives_the_file(tmp_path: Path):
    path = tmp_path / "profile.json"
    path.write_text(profile_text(small_profile()))
    assert read_profile(path) == small_profile()
    assert read_profile(path).sha256 == small_profile().sha256


def test_optional_keys_may_be_left_out():
    short = data()
    for layer in short["layers"]:
        del layer["workspace_bytes"]
    del short["links"], short["kinds"]["fast"]["optimizer_s_per_byte"]
    profile = profile_from_data(short, "p")
    assert profile.layers[1].workspace_bytes == 0
    assert profile.kinds["fast"].optimizer_s_per_byte == 0


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("format",), "hetpipe.profile/9", "p: format is 'hetpipe.profile/9', this version reads"),
        (
            ("dtype",),
            "banana",
            "p: dtype 'banana' is unknown; known: float32, float64, tf32, bfloat16-autocast, float16-",
        ),
        (("dtype",), "bf16", "p: dtype 'bf16' is unknown; known: float32"),
        (("modle",), "x", 'p: unknown key "modle"; did you mean "model"?'),
        (
            ("layers", 1, "output_bytes"),
            1,
            'unknown key "layers[1].output_bytes"; did you mean "output_bytes_per',
        ),
        (("layers", 0, "parameter_bytes"), -1, "parameter_bytes of layer 'embeddings' is -1"),
        (("layers", 0, "parameter_bytes"), "1", "layers[0].parameter_bytes: input should be a valid number"),
        (("layers", 1, "name"), "embeddings", "the name 'embeddings' appears twice"),
        (
            ("layers", 3, "tied_to"),
            "embedding",
            "layers[3].tied_to names 'embedding'; did you mean \"embeddings\"",
        ),
        *(
            (("layers", 0, key), -1.0, f"{key} of layer 'embeddings' is -1.0; give zero or more")
            for key in (
                "output_bytes_per_sample",
                "saved_bytes_per_sample",
                "workspace_bytes",
                "tied_bytes",
                "unreached_bytes",
            )
        ),
        (
            ("layers", 0, "workspace_by_size"),
            [[2, 1.0], [1, 2.0]],
            "2.0 bytes at 1 after 1.0 at 2; sizes rise",
        ),
        (
            ("layers", 0, "workspace_by_size"),
            [[1, 2.0], [2, 1.0]],
            "1.0 bytes at 2 after 2.0 at 1; sizes rise",
        ),
        (("layers", 0, "workspace_by_size"), [[1, -2.0]], "workspace_by_size of layer 'embeddings' has -2.0"),
        (("layers", 0, "workspace_by_size"), [[0, 2.0]], "has 2.0 bytes at 0 after 0.0 at 0; sizes rise"),
        (("layers", 0, "workspace_by_size"), [[1, 2.0, 3.0]], "layers[0].workspace_by_size[0]"),
        (("layers", 0, "workspace_by_size"), [[1, float("nan")]], "should be a finite number"),
        (("layers", 1, "workspace_by_size"), [[1, 2.0]], "'block0' has both workspace_bytes and"),
        (("kinds", "fast", "source"), "guessed", "source 'guessed' is unknown"),
        (
            ("kinds", "fast", "microbatch_sizes"),
            [2, 1],
            "microbatch_sizes [2, 1] must be at least one size, rising",
        ),
        (("kinds", "fast", "microbatch_sizes"), [], "microbatch_sizes [] must be at least one size"),
        (("kinds", "fast", "microbatch_sizes"), [1, 2, 4], "layers[0].forward_s has 2 entries for 3"),
        (("kinds", "fast", "layers"), [], "kinds.fast has 0 layers, the model 4; profile it again"),
        (("kinds", "fast", "optimizer_s_per_byte"), -1, "optimizer_s_per_byte is -1"),
        (
            ("kinds", "fast", "layers", 0, "forward_s"),
            [-1.0, 1.0],
            "kinds.fast.layers[0]: forward_s holds -1.0; give",
        ),
        (
            ("kinds", "slow", "layers", 3, "backward_s"),
            [-2.0, 1.0],
            "kinds.slow.layers[3]: backward_s holds -2.0; give",
        ),
        (
            ("kinds", "fast", "layers", 2, "forward_s"),
            [float("inf"), 1.0],
            "kinds.fast.layers[2].forward_s[0]: input should be a finite number",
        ),
        (
            ("kinds", "slow", "layers", 0, "forward_s"),
            [4000.0, 4000.0],
            "kinds.slow.layers[0]: forward_s holds 4000.0 s for one layer; is it in milliseconds?",
        ),
        (
            ("kinds", "slow", "layers", 1, "forward_s"),
            [1.0, 1.0, 1.0],
            "kinds.slow: layers[1].forward_s has 3 entries for 2 microbatch_sizes",
        ),
        (("kinds", "fast", "layers", 0, "forward"), [1.0, 1.0], 'did you mean "forward_s"?'),
        (
            ("kinds", "fast", "layers", 2, "backward_s"),
            [1.0, float("nan")],
            "kinds.fast.layers[2].backward_s[1]: input should be a finite number",
        ),
        (
            ("kinds", "slow", "layers", 1, "backward_s"),
            [1.0, 3601.0],
            "kinds.slow.layers[1]: backward_s holds 3601.0 s for one layer; is it in milliseconds?",
        ),
        (
            ("kinds", "slow", "layers", 1, "backward_s"),
            [1.0],
            "kinds.slow: layers[1].backward_s has 1 entries for 2 microbatch_sizes",
        ),
        (("kinds", "fast", "standard_error"), -0.1, "kinds.fast: standard_error is -0.1; give zero or more"),
        (("layers",), [], "has no layers"),
    ],
)
def test_a_mistake_is_refused_and_named(path: tuple[Any, ...], value: object, message: str):
    changed = data()
    place = changed
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(InputError) as caught:
        profile_from_data(changed, "p")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_workspace_by_size_survives_the_file_in_place_of_the_number():
    by_size = data()
    del by_size["layers"][1]["workspace_bytes"]
    by_size["layers"][1]["workspace_by_size"] = [[1, 4.0], [4, 10.0]]
    profile = profile_from_data(by_size, "p")
    assert json.loads(profile_text(profile)) == by_size
    block0, block1 = profile.layers[1:3]
    assert [block0.workspace_at(size) for size in (1, 2, 4, 5)] == [4.0, 6.0, 10.0, 12.0]
    assert [block1.workspace_at(size) for size in (1, 2, 4, 5)] == [5.0] * 4


@pytest.mark.parametrize("seed", range(30))
def test_a_random_profile_written_and_read_back_is_equal(seed: int, tmp_path: Path):
    rng = random.Random(seed)
    profile = random_profile(rng, rng.randint(2, 9), rng.randint(1, 3), tied=rng.random() < 0.5)
    link = Link(rng.choice([0.0, rng.random()]), rng.uniform(1.0, 1e12))
    known = replace(profile.kinds["kind 0"], standard_error=rng.random(), standard_error_of="here")
    profile = replace(profile, links={"kind 0>kind 0": link}, kinds={**profile.kinds, "kind 0": known})
    path = tmp_path / "profile.json"
    path.write_text(profile_text(profile))
    again = read_profile(path)
    assert again == profile
    assert again.sha256 == profile.sha256 and profile_text(again) == profile_text(profile)


def test_a_missing_key_is_named():
    changed = data()
    del changed["layers"][2]["name"]
    with pytest.raises(InputError, match=r'key "layers\[2\].name" is missing'):
        profile_from_data(changed, "p")


def test_layers_that_are_not_the_models_are_refused():
    profile = small_profile()
    profile.check_layers(["embeddings", "block0", "block1", "head"])
    with pytest.raises(InputError, match="'made-up' has 4 layers, the model 3; profile it again"):
        profile.check_layers(["embeddings", "block0", "head"])
    with pytest.raises(InputError, match=r"layers\[2\] .* is 'block1', of the model 'block2'"):
        profile.check_layers(["embeddings", "block0", "block2", "head"])


def test_standard_error_survives_the_file_and_leaves_no_trace_where_unknown():
    unknown = data()
    assert "standard_error" not in unknown["kinds"]["fast"]
    known = copy.deepcopy(unknown)
    known["kinds"]["fast"] |= {"standard_error": 0.014, "standard_error_of": "block0 forward, microbatch 1"}
    profile = profile_from_data(known, "p")
    assert profile.kinds["fast"].standard_error == 0.014
    assert json.loads(profile_text(profile)) == known
    unknown["kinds"]["fast"]["standard_error"] = None
    assert profile_from_data(unknown, "p") == small_profile()


def test_unknown_kind_is_refused_with_the_nearest():
    with pytest.raises(InputError, match="no kind 'fats'; did you mean \"fast\""):
        small_profile().kind("fats")


def test_interpolation_by_hand():
    # measured 1 s, 1.5 s, 2.5 s at 1, 2, 4: between 2 and 4 0.5 s a sample, and so beyond 4
    sizes, values = [1, 2, 4], [1.0, 1.5, 2.5]
    assert [interpolate(sizes, values, size) for size in (1, 2, 3, 4, 6)] == [1.0, 1.5, 2.0, 2.5, 3.5]
    assert interpolate([2, 4], [6.0, 4.0], 8) == 4.0  # never falling beyond the last
    assert interpolate([2], [6.0], 1) == interpolate([2, 4], [6.0, 7.0], 1) == 3.0


@given(
    st.lists(st.tuples(st.integers(1, 64), st.floats(0, 10)), min_size=1, unique_by=lambda pair: pair[0]),
    st.floats(0.1, 100),
    st.floats(0.1, 100),
)
def test_interpolation_is_exact_and_monotone(pairs: list[tuple[int, float]], one: float, two: float):
    sizes = sorted(size for size, _ in pairs)
    values = sorted(value for _, value in pairs)
    assert [interpolate(sizes, values, size) for size in sizes] == values
    low, high = sorted((one, two))
    assert interpolate(sizes, values, low) <= interpolate(sizes, values, high) + 1e-9


@given(
    st.lists(st.tuples(st.integers(1, 64), st.floats(0, 10)), min_size=2, unique_by=lambda pair: pair[0]).map(
        sorted
    ),
    st.floats(0, 1),
)
def test_interpolation_stays_between_its_neighbours(pairs: list[tuple[int, float]], share: float):
    """Also where a larger microbatch was measured faster; and it is never negative beyond the ends."""
    sizes, values = zip(*pairs, strict=True)
    for (low, one), (high, other) in pairwise(pairs):
        inside = interpolate(sizes, values, low + share * (high - low))
        assert min(one, other) - 1e-9 <= inside <= max(one, other) + 1e-9
    assert 0 <= interpolate(sizes, values, share * sizes[0]) <= values[0]
    assert interpolate(sizes, values, (1 + share) * sizes[-1]) >= values[-1] >= 0


def test_price_is_profile_over_speed():
    prices, device = Prices(small_profile()), small_cluster().device("b/0")
    assert prices.forward_s(device, 1, 3, samples=1) == 8.0  # two blocks of 2 s, twice that on the slow kind
    assert prices.backward_s(device, 1, 3, samples=2) == 32.0
    assert prices.backward_s(device, 1, 3, samples=1, recompute=True) == 24.0
    # trained: 360 + 300 - 250 tied = 410 bytes at 0.002 s
    assert prices.optimizer_s(device, [0, 3]) == pytest.approx(0.82)


def test_tied_layers_know_their_home():
    profile = small_profile()
    assert (profile.tied_home(3), profile.tied_bytes(3)) == (0, 250)
    assert (profile.tied_home(1), profile.tied_bytes(1)) == (1, 0)


def test_files_are_as_the_golden_ones():
    profile, cluster, plan = small_profile(), small_cluster(), small_plan()
    check_golden("profile.json", profile_text(profile))
    check_golden(
        "plan.json",
        plan_text(
            type(plan)(
                strategy=plan.strategy,
                model=plan.model,
                global_batch_size=plan.global_batch_size,
                pipelines=plan.pipelines,
                predicted=predict(plan, profile, cluster).figures,
                profile_sha256=profile.sha256,
                cluster_sha256=cluster.sha256,
            )
        ),
    )


def test_golden_files_are_read_back():
    folder = GOLDEN
    assert read_profile(folder / "profile.json") == small_profile()
    plan = read_plan(folder / "plan.json")
    assert plan.pipelines == small_plan().pipelines
    assert plan.predicted == predict(small_plan(), small_profile(), small_cluster()).figures


def test_a_plan_file_that_rises_in_flight_is_refused():
    changed = json.loads(plan_text(small_plan(in_flight=(2, 2))))
    changed["pipelines"][0]["stages"][1]["in_flight"] = 3
    with pytest.raises(InputError, match="in_flight rises from 2 to 3"):
        plan_from_data(changed, "plan.json")


def test_a_profile_of_version_1_counts_a_lowered_copy_of_every_weight_under_autocast():
    data = small_profile().to_json() | {"format": "hetpipe.profile/1"}
    assert profile_from_data(data, "p") == small_profile()
    found = profile_from_data(data | {"dtype": "bfloat16-autocast"}, "p")
    assert [layer.lowered_bytes for layer in found.layers] == [
        layer.parameter_bytes / 2 for layer in small_profile().layers
    ]
    with pytest.raises(InputError, match=r"more than its parameter_bytes 400, of which they are a part"):
        replace(small_profile().layers[0], unreached_bytes=401.0)


def test_a_kind_has_bytes_of_its_own_and_trains_the_same():
    profile = in_two_precisions(random_problem(3)).profile
    assert profile_from_data(json.loads(json.dumps(profile.to_json())), "p") == profile
    assert profile.on("kind 1").layers == profile.kinds["kind 1"].held != profile.layers
    assert profile.on("kind 0") == profile.on("unheard of") == profile
    assert trained_bytes(profile.on("kind 1"), [0, 1, 2]) == trained_bytes(profile, [0, 1, 2])
    data = profile.to_json()
    data["kinds"]["kind 1"]["held"][1]["parameter_bytes"] *= 2
    with pytest.raises(InputError, match=r"kinds\.kind 1\.held are other layers"):
        profile_from_data(data, "p")
