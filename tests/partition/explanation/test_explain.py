import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import pytest

from cost_model.cluster import Cluster, Link
from cost_model.profile import ModelProfile
from cost_model.sharding import OwnerRange
from hetpipe.reporting.explanation import explanation_sentences
from hetpipe.simulation.prediction import evaluator
from partition.estimates.optimizer_sharding import with_state_owners
from partition.estimates.plan_memory import plan_memory
from partition.explanation.explain import Explanation, Limit, explain
from partition.plan import Pipeline, Plan, Stage
from partition.problem import problem_of
from random_plans import random_case, random_plan
from small_case import equal_plan, equal_stages, plan_of, small_cluster, small_plan, small_profile


def explained(
    plan: Plan,
    profile: ModelProfile,
    cluster: Cluster,
    waits: Mapping[str, Mapping[str, float]] | None = None,
) -> tuple[Explanation, list[str]]:
    problem = problem_of(profile, cluster, plan.global_batch_size)
    found = explain(plan, problem, evaluator(profile, cluster), waits)
    return found, explanation_sentences(found, plan, problem)


def test_the_busiest_stage_is_limited_by_compute():
    found, lines = explained(small_plan(), small_profile(), small_cluster())
    assert [stage.limit for stage in found.stages] == [Limit.COMPUTE, Limit.WHOLE_LAYERS]
    # 3 layers of 14 s a microbatch on a/0, 6 s on b/0: 4 of each
    assert found.stages[0].busy * found.step_s == pytest.approx(4 * 14 + 0.76)
    assert lines[0].startswith("a/0 has layers 0-2, limited by compute: busy ")
    assert lines[1].startswith("b/0 has layer 3, limited by whole layers: busy ")
    assert "with one more layer the step would be" in lines[1]


def test_a_stage_that_takes_no_more_layers_is_limited_by_memory():
    # a/0 holds the head and lacks room for block1 as well
    plan = plan_of([("b/0", 0, 3, 2), ("a/0", 3, 4, 1)], 4)
    need = plan_memory(plan, small_profile(), "a/0").total_bytes
    cluster = small_cluster(fast_bytes=need + 100)
    found, lines = explained(plan, small_profile(), cluster)
    more = plan_memory(plan_of([("b/0", 0, 2, 2), ("a/0", 2, 4, 1)], 4), small_profile(), "a/0").total_bytes
    stage = found.stages[1]
    assert stage.limit is Limit.MEMORY
    assert stage.free_bytes == pytest.approx(100)
    assert stage.more_bytes == pytest.approx(more - need - 100)
    assert stage.more_step is None
    assert "limited by memory: 100 B of" in lines[1] and "one more layer would need" in lines[1]


def test_a_stage_behind_a_slow_link_is_limited_by_it():
    cluster = replace(small_cluster(), network=Link(0.0, 0.5))
    profile = replace(small_profile(), links={})
    found, lines = explained(small_plan(), profile, cluster)
    # 10 bytes a microbatch at 0.5 bytes a second: 20 s each way, four times
    assert found.stages[1].limit is Limit.LINK
    assert found.stages[1].link_busy * found.step_s == pytest.approx(80)
    assert "limited by the link b/0 to a/0" in lines[1] or "limited by the link a/0 to b/0" in lines[1]


def test_a_link_is_busy_for_each_microbatch_not_for_each_sample():
    cluster = replace(small_cluster(), network=Link(0.0, 0.5))
    profile = replace(small_profile(), links={})
    plan = plan_of([("a/0", 0, 3, 2), ("b/0", 3, 4, 1)], 4, microbatch_size=2)
    found, _ = explained(plan, profile, cluster)
    # 4 samples in 2 microbatches of 20 bytes at 0.5 bytes a second: twice 40 s each way
    assert found.stages[1].link_busy * found.step_s == pytest.approx(80)


def test_a_wait_counts_as_a_share_of_the_step_not_in_seconds():
    def limit(layer_s: float, sync_s: float) -> tuple[Limit, str | None]:
        profile, cluster = equal_stages(2, layer_s, 2 * layer_s)
        replicas = tuple(
            Pipeline(1, count, (Stage((name,), (0, 2), 1),)) for name, count in (("n/0", 3), ("n/1", 1))
        )
        plan = Plan("manual", "made-up", 4, replicas)
        found, _ = explained(plan, profile, cluster, {"n/1": {"sync": sync_s}})
        assert found.step_s == pytest.approx(3 * 6 * layer_s)
        return found.stages[1].limit, found.stages[1].waits_for

    assert limit(100.0, 20.0) == (Limit.COMPUTE, None)  # 20 s of 1,800: 1.1 %
    assert limit(0.001, 0.012) == (Limit.SYNC, "sync")  # 12 ms of 18: 67 %


def test_a_replica_that_waits_for_its_gradients_is_limited_by_sync():
    profile, cluster = equal_stages(2)
    replicas = tuple(
        Pipeline(1, count, (Stage((name,), (0, 2), 1),)) for name, count in (("n/0", 3), ("n/1", 1))
    )
    plan = Plan("manual", "made-up", 4, replicas)
    found, lines = explained(plan, profile, cluster, {"n/1": {"sync": 12.0}})
    assert [stage.limit for stage in found.stages] == [Limit.COMPUTE, Limit.SYNC]
    assert lines[1].startswith("pipeline 1, n/1 has all layers, limited by the sync of gradients")


def test_a_left_out_device_tells_what_it_would_add_at_most():
    profile, cluster = equal_stages(4)
    plan = plan_of([("n/0", 0, 4, 1)], 4)
    found, lines = explained(plan, profile, cluster)
    # four equal devices without one: 4/3 of the time
    assert [entry.device for entry in found.left_out] == ["n/1", "n/2", "n/3"]
    assert found.left_out[0].at_most == pytest.approx(1 / 3, rel=1e-4)
    assert any(
        line.startswith("n/1-3 are left out") and "add each 33.3% of speed at most" in line for line in lines
    )


def test_a_device_without_which_nothing_fits_is_not_called_superfluous():
    profile = small_profile()
    whole = plan_memory(plan_of([("b/0", 0, 4, 1)], 4), profile, "b/0").total_bytes
    found, lines = explained(
        plan_of([("b/0", 0, 4, 1)], 4), profile, small_cluster(fast_bytes=whole, slow_bytes=whole)
    )
    assert 0 < found.left_out[0].at_most < float("inf")
    assert "a/0 is left out" in " ".join(lines)


def test_a_plan_of_one_device_says_that_it_is_best_and_a_pipeline_what_one_device_takes():
    profile, cluster = equal_stages(2)
    _, lines = explained(plan_of([("n/0", 0, 2, 1)], 4), profile, cluster)
    assert "the fastest single device, n/0, is the plan itself: it is best" in lines
    found, lines = explained(equal_plan((2, 1), 8), profile, cluster)
    # 8 microbatches of 6 s, against fill and drain of 3 s and 8 x 3 s
    single = next(entry for entry in found.alternatives if entry.name == "single")
    assert single.slower == pytest.approx(48 / 27 - 1)
    assert any("would take 1.78 times as long" in line for line in lines)


def test_a_worse_plan_than_the_plain_one_is_called_so():
    profile, cluster = equal_stages(2, link=Link(100.0, 1e9))
    _, lines = explained(equal_plan((2, 1), 2), profile, cluster)
    assert any("faster than this plan: use it" in line for line in lines)


def test_what_does_not_fit_gives_its_reason():
    profile = small_profile()
    plan = small_plan()
    need = max(plan_memory(plan, profile, name).total_bytes for name in plan.device_names)
    found, lines = explained(plan, profile, small_cluster(fast_bytes=need, slow_bytes=need))
    assert found.alternatives[0].slower is None
    assert any(line.startswith("the fastest single device does not fit: layers [0, 4) ") for line in lines)


def test_the_states_of_a_sharded_plan_follow_the_layer_that_is_moved():
    # b/1 has the states of layer 1, and holds it no more if a/1 takes it; a/0 those of layer 2, as b/0 might
    pipelines = (
        Pipeline(1, 4, (Stage(("a/0",), (0, 3), 2), Stage(("b/0",), (3, 4), 1))),
        Pipeline(1, 4, (Stage(("a/1",), (0, 1), 2), Stage(("b/1",), (1, 4), 1))),
    )
    cluster = small_cluster()
    nodes = tuple(
        replace(node, devices=(*node.devices, replace(node.devices[0], name=f"{node.name}/1")))
        for node in cluster.nodes
    )
    profile, cluster = small_profile(), replace(cluster, nodes=nodes)
    owned = Plan("manual", profile.model, 8, pipelines, zero=1, state_owners=("a/0", "b/1", "a/0", "b/0"))
    halves = OwnerRange(1, "b/1", 0.0, 0.5), OwnerRange(1, "a/0", 0.5, 1.0)
    cut = replace(owned, owner_ranges=halves)
    words = "layer 1 (block0) is cut between owners of its optimizer states: b/1 50%, a/0 50%"
    assert words in explained(cut, profile, cluster)[1]
    for plan in (owned, replace(owned, state_owners=None), cut):
        found, lines = explained(plan, profile, cluster)
        assert [stage.device for stage in found.stages] == ["a/0", "b/0", "a/1", "b/1"]
        # a/0 and b/1 have neighbours of one layer, which keep it
        assert [stage.more_step is None for stage in found.stages] == [True, False, False, True]
        assert sum("with one more layer the step would be" in line for line in lines) == 2


def test_every_plan_can_be_explained():
    rng = random.Random(0)
    kinds = Counter[tuple[bool, bool]]()
    for seed in range(60):
        problem = random_case(seed)
        plan = random_plan(rng, problem)
        if rng.random() < 0.5:
            plan = with_state_owners(plan, problem.profile, problem.cluster)
        found, lines = explained(plan, problem.profile, problem.cluster)
        assert [stage.device for stage in found.stages] == [
            stage.device for pipeline in plan.pipelines for stage in pipeline.stages
        ]
        assert len(lines) >= len(found.stages) + 2, seed
        kinds[plan.zero == 1, len(plan.pipelines) > 1] += 1
    assert len(kinds) == 4 and min(kinds.values()) > 3


def test_pipelines_alike_are_explained_together():
    profile, cluster = equal_stages(6)
    pairs = [(f"n/{index}", f"n/{index + 1}") for index in (0, 2, 4)]
    pipelines = tuple(
        Pipeline(1, 4, (Stage((first,), (0, 3), 2), Stage((second,), (3, 6), 1))) for first, second in pairs
    )
    plan = Plan("manual", "made-up", 12, pipelines)
    found, lines = explained(plan, profile, cluster)
    assert len(found.stages) == 6
    stages = [line for line in lines if " have layers " in line]
    assert [line.partition(" have ")[0] for line in stages] == [
        "3 pipelines (0-2), n/0, n/2, n/4",
        "3 pipelines (0-2), n/1, n/3, n/5",
    ]
    assert "busy " in stages[0] and "limited by" in stages[0]
    # a pipeline with other layers is told of alone
    other = Pipeline(1, 4, (Stage(("n/4",), (0, 2), 2), Stage(("n/5",), (2, 6), 1)))
    _, lines = explained(Plan("manual", "made-up", 12, (*pipelines[:2], other)), profile, cluster)
    assert [line.partition(" ha")[0] for line in lines[:4]] == [
        "2 pipelines (0-1), n/0, n/2",
        "2 pipelines (0-1), n/1, n/3",
        "pipeline 2, n/4",
        "pipeline 2, n/5",
    ]
