"""The largest microbatch by kind and stage of ZeRO: by hand, in Poplar's rules, and in the bound."""

from collections.abc import Mapping

import pytest

from cost_model.cluster import Cluster, Device, Link, Node
from cost_model.errors import InfeasibleError, InputError
from cost_model.layer_profile import LayerProfile, LayerTimes
from cost_model.profile import KindProfile, ModelProfile
from cost_model.sharding import Sharding
from hetpipe.simulation.prediction import evaluator
from partition.baselines.catalogue import BASELINES
from partition.baselines.largest_microbatch import largest_microbatches
from partition.bounds.best_bound import bound_space, fractional_bound_s
from partition.plan import Plan
from partition.problem import Problem, problem_of

SECONDS: Mapping[int, float] = {1: 1.0, 2: 1.5, 4: 2.5, 8: 4.5, 16: 8.5}
"""Of a layer's forward, twice as long backward: half a second, and half a second for each sample."""


def lab(
    sizes: Mapping[str, tuple[int, ...]],
    memory_bytes: Mapping[str, float],
    batch: int,
    microbatch_size: int | None = None,
    *,
    dtype: str = "float32",
    speed: float = 1.0,
) -> Problem:
    """Two devices of each kind, `large` of a speed; 8 layers of 1 byte, 2 of states, 1 a sample saves."""
    profile = ModelProfile(
        model="lab",
        sequence_length=8,
        dtype=dtype,
        layers=tuple(LayerProfile(f"layer {index}", 1.0, 0.0, 1.0) for index in range(8)),
        kinds={
            kind: KindProfile(
                "measured",
                own,
                (LayerTimes(tuple(SECONDS[s] for s in own), tuple(2 * SECONDS[s] for s in own)),) * 8,
            )
            for kind, own in sizes.items()
        },
    )
    devices = tuple(
        Device(f"a/{index}", "a", kind, memory_bytes[kind], speed=speed if kind == "large" else 1.0)
        for index, kind in enumerate(kind for kind in sizes for _ in range(2))
    )
    return problem_of(profile, Cluster("lab", Link(0.0, 1e9), (Node("a", devices),)), batch, microbatch_size)


def sizes_of(plan: Plan) -> dict[str, int]:
    return {entry.stages[0].device: entry.microbatch_size for entry in plan.pipelines}


@pytest.mark.parametrize(
    ("sharding", "largest"),
    # weights, gradients and states are 8 + 8 + 16 bytes, a sample saves 8: 32 + 8 x 2 = 48 of 52. Without
    # states 16 + 8 x 4; with gradients of two layers, the last and what is summed of the microbatch before,
    # 8 + 2 + 8 x 5; with the weights of two layers, the second on its way, 2 + 2 + 8 x 6.
    [(Sharding.NONE, 2), (Sharding.STATES, 4), (Sharding.GRADIENTS, 5), (Sharding.WEIGHTS, 6)],
)
def test_the_more_is_sharded_the_larger_a_microbatch_fits(sharding, largest):
    problem = lab({"kind": (1, 2, 4, 8)}, {"kind": 52.0}, 64)
    assert largest_microbatches(problem, sharding) == {"a/0": largest, "a/1": largest}


@pytest.mark.parametrize("sharding", list(Sharding))
def test_none_is_larger_than_was_profiled_or_fits_or_is_asked_for(sharding):
    sizes, memory = {"large": (1, 2, 4, 8), "small": (1, 2)}, {"large": 1e6, "small": 1e6}
    assert list(largest_microbatches(lab(sizes, memory, 64), sharding).values()) == [8, 8, 2, 2]
    assert list(largest_microbatches(lab(sizes, memory, 5), sharding).values()) == [5, 5, 2, 2]
    assert list(largest_microbatches(lab(sizes, memory, 64, 4), sharding).values()) == [4] * 4
    assert set(largest_microbatches(lab(sizes, {"large": 9.0, "small": 9.0}, 64), sharding).values()) == {0}


def test_a_device_that_the_model_does_not_fit_on_is_left_out():
    sizes = {"large": (1, 2, 4), "small": (1, 2)}
    problem = lab(sizes, {"large": 1e6, "small": 30.0}, 8)
    assert sizes_of(BASELINES["poplar-0"](problem, None)) == {"a/0": 4, "a/1": 4}
    with pytest.raises(InfeasibleError, match=r"poplar-0: .* bytes are missing"):
        BASELINES["poplar-0"](lab(sizes, {"large": 30.0, "small": 30.0}, 8), None)


def test_weights_with_copies_in_16_bits_are_not_sharded():
    problem = lab({"kind": (1, 2)}, {"kind": 50.0}, 8, dtype="float16-autocast")
    assert largest_microbatches(problem, Sharding.GRADIENTS) == {"a/0": 2, "a/1": 2}
    with pytest.raises(InputError, match="zero is 3"):
        largest_microbatches(problem, Sharding.WEIGHTS)


def test_poplar_runs_the_largest_microbatch_that_fits_though_no_other_kind_was_profiled_at_it():
    # the larger the faster. Of 32 + 8 x b bytes 11 fit in 120; `small` was profiled at 4 at most
    problem = lab({"large": (1, 2, 4, 8, 16), "small": (1, 2, 4)}, {"large": 120.0, "small": 120.0}, 300)
    assert problem.microbatch_sizes == (1, 2, 4)
    assert sizes_of(BASELINES["poplar-0"](problem, None)) == {"a/0": 11, "a/1": 11, "a/2": 4, "a/3": 4}
    asked = lab({"large": (1, 2, 4, 8, 16), "small": (1, 2, 4)}, {"large": 120.0, "small": 120.0}, 300, 2)
    assert set(sizes_of(BASELINES["poplar-0"](asked, None)).values()) == {2}


@pytest.mark.parametrize("zero", [2, 3])
def test_rounds_have_any_microbatch_that_is_computed_in_their_time(zero):
    # `small` does b samples in 12 (b + 1) s, at most 4; `large` in 6 (b + 1) s. In the 60 s of 4 on `small`
    # the others do 9, which no kind was profiled at: 26 a round, the most a second of all rounds
    sizes, memory = {"large": (1, 2, 4, 8, 16), "small": (1, 2, 4)}, {"large": 105.0, "small": 105.0}
    problem = lab(sizes, memory, 260, speed=2.0)
    plan = BASELINES[f"poplar-{zero}"](problem, None)
    assert sizes_of(plan) == {"a/0": 9, "a/1": 9, "a/2": 4, "a/3": 4}
    assert {entry.num_microbatches for entry in plan.pipelines} == {10}


@pytest.mark.parametrize("name", ["poplar-0", "poplar-2", "whale-dp"])
def test_the_bound_speaks_of_sizes_that_one_kind_alone_was_profiled_at(name):
    problem = lab({"large": (1, 2, 4, 8, 16), "small": (1, 2)}, {"large": 1e6, "small": 1e6}, 128, speed=2.0)
    plan = BASELINES[name](problem, None)
    assert max(sizes_of(plan).values()) > 2
    assert fractional_bound_s(problem) <= evaluator(problem.profile, problem.cluster)(plan).step_s
    assert bound_space(problem).startswith("all plans with microbatches up to 16,")
