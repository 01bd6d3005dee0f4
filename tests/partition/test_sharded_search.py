"""Sharded optimizer states on more than a few devices, and in the memory that their owners leave."""

from dataclasses import replace

import pytest

from cost_model.cluster import Link
from hetpipe.simulation.prediction import evaluator
from node_problems import problem_of_nodes
from partition.auto import auto, enter_by_owners, enter_sharded_for_speed
from partition.estimates.optimizer_sharding import fits, owned_elsewhere, unsharded
from partition.estimates.plan_memory import plan_memories
from partition.estimates.ranking import Contest, Ranking
from partition.local_search.moves import EvaluateSet, PipelineSet
from partition.local_search.pipeline_search import Begun, PipelineSearch
from partition.local_search.searched_plans import improved_starts, plans_of, with_sync
from partition.plan import Plan
from partition.problem import Problem

KINDS = {"fast": 1.0, "slow": 0.3}
NODES = [("fast", 4), ("fast", 4), ("slow", 4), ("slow", 4)]


def bytes_left(plan: Plan, problem: Problem) -> dict[str, float]:
    """Return what each device of a plan has of its memory beside all that it needs."""
    needs = plan_memories(plan, problem.profile, problem.cluster)
    return {
        name: problem.cluster.device(name).usable_bytes - need.total_bytes for name, need in needs.items()
    }


def begun_without_sharding(problem: Problem) -> tuple[Contest, PipelineSearch]:
    """Return a contest with the best pipelines of a search, states unsharded."""
    search = PipelineSearch(problem)
    ranking = Ranking(problem, evaluator(problem.profile, problem.cluster))
    contest = Contest(ranking, search.costs, search.effort.choice)
    contest.enter_all(plans_of(search, improved_starts(search)[:3]))
    return contest, search


def test_sixteen_devices_shard_states_for_speed_and_then_by_their_owners() -> None:
    # Memory for two of seven layers with their states, and for four without: shorter pipelines, more of them,
    # once each keeps the states of a part of its layers.
    problem = problem_of_nodes(
        KINDS, NODES, network=Link(1e-3, 1e6), batch=128, num_layers=7, parameter_bytes=1e4, memory_bytes=9e4
    )
    contest, search = begun_without_sharding(problem)
    assert contest.best is not None and contest.best.zero == 0
    steps = [contest.step_s]
    for enter in (enter_sharded_for_speed, enter_by_owners):
        enter(contest, search)
        assert contest.best.zero == 1 and fits(contest.best, problem.profile, problem.cluster)
        steps.append(contest.step_s)
    easier = owned_elsewhere(problem, contest.best)
    bare = replace(contest.best, zero=0, state_owners=None, owner_ranges=())
    assert bytes_left(bare, easier) == pytest.approx(bytes_left(contest.best, problem))
    assert steps[1] < 0.93 * steps[0] and steps[2] < 0.99 * steps[1]


def test_where_memory_is_ample_nothing_is_sharded_for_speed() -> None:
    problem = problem_of_nodes(KINDS, NODES, network=Link(1e-3, 1e6), batch=128, num_layers=7)
    contest, search = begun_without_sharding(problem)
    before = contest.best
    enter_sharded_for_speed(contest, search)
    enter_by_owners(contest, search)
    assert contest.best is before


def test_owners_are_not_searched_by_where_the_best_plan_is_below_what_the_search_promised() -> None:
    problem = problem_of_nodes(
        KINDS, NODES, network=Link(1e-3, 1e6), batch=128, num_layers=7, parameter_bytes=1e4, memory_bytes=9e4
    )
    contest, search = begun_without_sharding(problem)
    promised_s = enter_sharded_for_speed(contest, search)
    assert 0 < promised_s < 1.006 * contest.step_s
    before_s = contest.step_s
    enter_by_owners(contest, search, 1.01 * before_s)
    assert contest.step_s == before_s
    enter_by_owners(contest, search, promised_s)
    assert contest.step_s < before_s


def test_a_search_for_plans_to_shard_begins_with_several_pipelines(monkeypatch: pytest.MonkeyPatch) -> None:
    # Without states there is room for two pipelines; a single one has nothing to shard.
    nodes, network = [("fast", 2), ("slow", 2)], Link(1e-3, 1e6)
    problem = problem_of_nodes(
        KINDS, nodes, network=network, batch=48, num_layers=7, parameter_bytes=1e4, memory_bytes=9e4
    )
    search = PipelineSearch(unsharded(problem, 0.0))
    begun = search.begun(with_sync(search))
    assert {len(entry.timed) > 1 for entry in begun.sets} == {False, True}
    assert begun.of_several().sets == [entry for entry in begun.sets if len(entry.timed) > 1]

    walked, walk = list[list[int]](), PipelineSearch.walked

    def noting(self: PipelineSearch, begun: Begun, judge: EvaluateSet) -> list[PipelineSet]:
        if self.problem.profile != problem.profile:
            walked.append([len(entry.timed) for entry in begun.sets])
        return walk(self, begun, judge)

    monkeypatch.setattr(PipelineSearch, "walked", noting)
    auto(problem, evaluator(problem.profile, problem.cluster))
    assert any(walked) and all(number > 1 for numbers in walked for number in numbers)


def test_where_single_pipelines_alone_begin_nothing_walks_on() -> None:
    single = PipelineSet(1.0, (), "")
    assert Begun([single], [single], [single]).of_several() == Begun([], [], [])
