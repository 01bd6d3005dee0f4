"""Changes of whole plans by the simulator: never slower, within memory, and where they are left out."""

import math
import random
from dataclasses import replace

import pytest

from cost_model.cluster import Link
from hetpipe.simulation.prediction import evaluator
from node_problems import problem_of_nodes
from partition.estimates.plan_memory import plan_memories
from partition.estimates.ranking import Ranking
from partition.estimates.timed_pipeline import TimedStage
from partition.local_search.pipeline_search import PipelineSearch
from partition.local_search.tuned_plans import StepSeconds, more_in_flight, tuned
from partition.plan import Plan
from partition.problem import Forced, Pin, Problem


def simulated(problem: Problem) -> StepSeconds:
    evaluate = evaluator(problem.profile, problem.cluster)
    return lambda plan: evaluate(plan).step_s


def plan_of(search: PipelineSearch, *pipelines: list[tuple[str, int, int]]) -> Plan:
    """Return the plan of pipelines of stages (device, first layer, layer after it), microbatches of one."""
    device = search.problem.cluster.device
    timed = [
        search.timings.pipeline([TimedStage(device(name), start, stop) for name, start, stop in stages], 1)
        for stages in pipelines
    ]
    plan = search.plan("by hand", timed)
    assert plan is not None
    return plan


def random_plan(seed: int) -> tuple[PipelineSearch, Plan]:
    """Return three pipelines of random stages on two kinds of devices, whose cards send and sum."""
    rng = random.Random(seed)
    problem = problem_of_nodes(
        {"fast": 1.0, "slow": rng.uniform(0.3, 0.8)},
        [("fast", 3), ("slow", 2), ("slow", 2), ("fast", 2)],
        network=Link(1e-3, 1e3),
        batch=60,
        output_bytes=rng.uniform(0, 2e3),
        parameter_bytes=rng.uniform(1e3, 1e4),
        memory_bytes=rng.choice((2e5, 1e9)),
        sizes=(1,),
    )
    devices = [device.name for device in problem.cluster.devices]
    rng.shuffle(devices)
    pipelines = []
    for number in rng.choice(((2, 3, 4), (1, 4, 4), (3, 3, 3))):
        bounds = [0, *sorted(rng.sample(range(1, 8), number - 1)), 8]
        pipelines.append([(devices.pop(), *bounds[at : at + 2]) for at in range(number)])
    search = PipelineSearch(problem)
    return search, plan_of(search, *pipelines)


def test_tuned_plans_are_no_slower_and_fit() -> None:
    shorter = 0
    for seed in range(12):
        search, plan = random_plan(seed)
        problem, step_s = search.problem, simulated(search.problem)
        (better,) = tuned(search, [plan], step_s)
        assert step_s(better) <= step_s(plan)
        assert sum(entry.num_samples for entry in better.pipelines) == problem.global_batch_size
        for name, memory in plan_memories(better, problem.profile, problem.cluster).items():
            assert memory.total_bytes <= problem.cluster.device(name).usable_bytes
        assert tuned(search, [plan], step_s) == [better]  # the same each time
        shorter += step_s(better) < 0.99 * step_s(plan)
    assert shorter > 6


def sums_behind() -> tuple[PipelineSearch, Plan, StepSeconds]:
    """Two pipelines of five layers and one, all pinned: the second stages sum 120 kB over 3 kB/s.

    Their clocks need two microbatches in flight in front; with more the stages behind end sooner.
    """
    problem = problem_of_nodes(
        {"kind": 1.0}, [("kind", 2), ("kind", 1), ("kind", 1)], network=Link(0.0, 3e3), batch=24, num_layers=6
    )
    layers = tuple(
        replace(layer, parameter_bytes=120e3 if at == 5 else 1.0)
        for at, layer in enumerate(problem.profile.layers)
    )
    pins = Pin("n0/0", 0, 5), Pin("n0/1", 0, 5), Pin("n1/0", 5, 6), Pin("n2/0", 5, 6)
    problem = replace(problem, profile=replace(problem.profile, layers=layers), forced=Forced(pins))
    search = PipelineSearch(problem)
    plan = plan_of(search, [("n0/0", 0, 5), ("n1/0", 5, 6)], [("n0/1", 0, 5), ("n2/0", 5, 6)])
    return search, plan, simulated(problem)


def test_more_in_flight_in_front_hides_the_sums_behind() -> None:
    search, plan, step_s = sums_behind()
    (better,) = tuned(search, [plan], step_s)
    assert step_s(better) < 0.92 * step_s(plan)
    before, after = ([entry.stages[0].in_flight for entry in each.pipelines] for each in (plan, better))
    assert min(after) > max(before)


def test_cuts_move_unless_they_are_forced() -> None:
    search, plan, step_s = sums_behind()
    (pinned,) = tuned(search, [plan], step_s)
    assert search.problem.forced.allows(pinned)
    free = PipelineSearch(replace(search.problem, forced=Forced()))
    (better,) = tuned(free, [plan], step_s)
    assert [entry.stages[0].stop for entry in better.pipelines] < [5, 5]
    assert step_s(better) < step_s(pinned)


def test_pipelines_of_slower_cards_do_less() -> None:
    # no clock knows that the messages of two of three pipelines wait for each other at one card
    problem = problem_of_nodes(
        {"kind": 1.0},
        [("kind", 2)] * 2 + [("kind", 1)] * 2,
        network=Link(0.0, 1.0),
        batch=60,
        output_bytes=2.5,
        parameter_bytes=1.0,
        num_layers=2,
    )
    search, step_s = PipelineSearch(problem), simulated(problem)
    plan = plan_of(
        search,
        [("n0/0", 0, 1), ("n1/0", 1, 2)],
        [("n0/1", 0, 1), ("n1/1", 1, 2)],
        [("n2/0", 0, 1), ("n3/0", 1, 2)],
    )
    assert [entry.num_samples for entry in plan.pipelines] == [20, 20, 20]
    (better,) = tuned(search, [plan], step_s)
    *slower, faster = (entry.num_samples for entry in better.pipelines)
    assert max(slower) < 19 and faster > 24 and step_s(better) < 0.94 * step_s(plan)


def test_a_plan_that_takes_as_long_as_its_clocks_is_simulated_once() -> None:
    problem = problem_of_nodes({"kind": 1.0}, [("kind", 2)], network=Link(0.0, 1e12), batch=24)
    search, asked = PipelineSearch(problem), list[Plan]()
    plan, step_s = plan_of(search, [("n0/0", 0, 3), ("n0/1", 3, 8)]), simulated(problem)

    def counted(one: Plan) -> float:
        asked.append(one)
        return step_s(one)

    assert tuned(search, [plan], counted) == [] and asked == [plan]


@pytest.mark.parametrize("changed", [{"zero": 1}, {"shared": True}])
def test_sharded_and_shared_plans_are_left(changed: dict[str, int]) -> None:
    search, plan, step_s = sums_behind()
    if "zero" in changed:
        plan = replace(plan, zero=1)
    else:
        first, second = plan.pipelines
        ends = replace(second.stages[1], devices=("n1/0",))
        plan = replace(plan, pipelines=(first, replace(second, stages=(second.stages[0], ends))))
    assert tuned(search, [plan], step_s) == []


def test_the_best_by_what_is_in_flight_are_changed_further() -> None:
    search, _, step_s = sums_behind()
    free = PipelineSearch(replace(search.problem, forced=Forced()))
    plans = [
        plan_of(free, [("n0/0", 0, cut), ("n1/0", cut, 6)], [("n0/1", 0, cut), ("n2/0", cut, 6)])
        for cut in (5, 4, 2, 1)
    ]
    *better, worst = tuned(free, plans, step_s)
    assert len(better) == free.effort.tuning.changed_further == 3
    assert [one.pipelines[0].stages[0].stop for one in better] == [4, 4, 3]
    assert worst.pipelines[0].stages[0].stop == 1
    assert step_s(better[0]) < min(map(step_s, plans))


def test_a_ranking_knows_the_best_unlike_plans_of_each_number_of_pipelines() -> None:
    problem = problem_of_nodes({"kind": 1.0}, [("kind", 4)], network=Link(0.0, 1e9), batch=24)
    search = PipelineSearch(problem)

    def pair(number: int, cut: int) -> list[tuple[str, int, int]]:
        return [(f"n0/{number}", 0, cut), (f"n0/{number + 1}", cut, 8)]

    singles = [plan_of(search, pair(0, cut)) for cut in (4, 3, 2, 1)]
    both, others = plan_of(search, pair(0, 4), pair(2, 4)), plan_of(search, pair(2, 4))
    ranking = Ranking(problem, evaluator(problem.profile, problem.cluster))
    for plan in (*reversed(singles), others, both):
        ranking(plan)
    # three of each number, of which those on other devices of a kind are the same
    assert ranking.near(math.inf, 9) == [both, *singles[:3]]
    assert ranking.near(ranking(singles[1])[0], 9) == [both, *singles[:2]]
    assert ranking.near(math.inf, 1) == [both]


def test_more_in_flight_in_front_of_messages_between_nodes_alone() -> None:
    search, plan, _ = sums_behind()
    timed = search.timed(plan)
    more = more_in_flight(plan, timed, 3)
    flights = [[stage.in_flight for stage in entry.stages] for entry in more.pipelines]
    before = [[stage.in_flight for stage in entry.stages] for entry in plan.pipelines]
    assert flights == [[first + 3, last] for first, last in before]
    inside = problem_of_nodes({"kind": 1.0}, [("kind", 2)], network=Link(0.0, 1e3), batch=24)
    within = PipelineSearch(inside)
    one = plan_of(within, [("n0/0", 0, 3), ("n0/1", 3, 8)])
    assert more_in_flight(one, within.timed(one), 3) == one
