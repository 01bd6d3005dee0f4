"""Plans by step, money and energy: the front is not beaten, and limits are kept or said to be impossible."""

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import combinations
from math import inf

import pytest

from cost_model.cluster import Cluster, Device, Link, Node
from cost_model.errors import InfeasibleError, InputError
from cost_model.expenses import Expenses, Objective, expenses
from hetpipe.simulation.prediction import evaluator
from partition import auto as auto_module
from partition.explanation.device_sets import DeviceSet, device_sets, on_devices
from partition.explanation.pareto import Choice, Limits, best_within, pareto
from partition.problem import Evaluate, Forced, Pin, Problem, problem_of
from planned_once import once
from random_problems import closed_form, random_problem, with_ample_memory
from small_case import equal_stages, small_cluster, small_profile

Values = tuple[float, ...]

auto = once(auto_module.auto, 1)
"""Whichever test asks, a problem is planned once: each is evaluated in one way."""

SEEDS = (0, 2)  # three and two devices, all sets of which are planned for


@pytest.fixture(autouse=True, scope="module")
def _each_plan_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("partition.explanation.pareto.auto", auto)
        yield


def with_expenses(problem: Problem, seed: int) -> Problem:
    """A random price and power for each kind, node and memory."""
    rng = random.Random(seed)
    known: dict[object, tuple[float, float]] = {}

    def costed(device: Device) -> Device:
        price, watts = known.setdefault(device.device_class, (rng.uniform(0.1, 5), rng.uniform(50, 500)))
        return replace(device, price_per_hour=price, watts=watts)

    nodes = tuple(replace(node, devices=tuple(map(costed, node.devices))) for node in problem.cluster.nodes)
    return replace(problem, cluster=replace(problem.cluster, nodes=nodes))


@cache
def random_case(seed: int) -> tuple[Problem, Evaluate]:
    problem = with_expenses(with_ample_memory(random_problem(seed)), seed)
    return problem, closed_form(problem)


@cache
def values_on_all_sets(seed: int) -> tuple[Values, ...]:
    """Step, money and energy of what `auto` finds on every set of devices of a random case."""
    problem, evaluate = random_case(seed)
    names = [device.name for device in problem.cluster.devices]
    found = []
    for count in range(1, len(names) + 1):
        for chosen in combinations(names, count):
            plan = auto(on_devices(problem, frozenset(chosen)), evaluate)
            found.append(values(evaluate(plan).step_s, expenses(problem.cluster, plan.device_names)))
    return tuple(found)


def values(step_s: float, used: Expenses) -> Values:
    return tuple(objective.of(step_s, used) for objective in Objective)


def beats(one: Values, other: Values) -> bool:
    return all(a <= b for a, b in zip(one, other, strict=True)) and one != other


def test_expenses_count_whole_devices_for_the_whole_time():
    """3 + 1 an hour and 300 + 100 W: 0.9 s cost 4 * 0.9 / 3600 = 0.001 and take 360 J."""
    nodes = (
        Node("a", (Device("a/0", "a", "x", 1.0, price_per_hour=3.0, watts=300.0),)),
        Node("b", (Device("b/0", "b", "y", 1.0, price_per_hour=1.0, watts=100.0),)),
        Node("c", (Device("c/0", "c", "y", 1.0, watts=100.0),)),
    )
    cluster = Cluster("three", Link(0.0, 1.0), nodes)
    both = expenses(cluster, ["a/0", "b/0"])
    assert both == Expenses(per_hour=4.0, watts=400.0)
    assert both.money(0.9) == pytest.approx(0.001) and both.energy_j(0.9) == pytest.approx(360.0)
    assert expenses(cluster, ["a/0", "c/0"]) == Expenses(per_hour=None, watts=400.0)


def unequal_pair(fast_price: float, slow_price: float) -> Problem:
    """Layers of 17 s a sample in all on a/0, 34 s on b/0, which costs less."""
    cluster = small_cluster()
    prices = {"a": fast_price, "b": slow_price}
    nodes = tuple(
        replace(node, devices=tuple(replace(d, price_per_hour=prices[node.name]) for d in node.devices))
        for node in cluster.nodes
    )
    return problem_of(small_profile(), replace(cluster, nodes=nodes), 4)


def test_the_front_of_two_devices_by_hand():
    """The slow device takes twice as long for a quarter of the price: a step on it costs half as much.

    The fast one lies between: faster than the slow one alone, cheaper than both together.
    """
    problem = unequal_pair(4.0, 1.0)
    evaluate = evaluator(problem.profile, problem.cluster)
    front = pareto(problem, evaluate)
    used = [set(costed.plan.device_names) for costed in front.plans]
    assert used == [{"a/0", "b/0"}, {"a/0"}, {"b/0"}] or used == [{"a/0"}, {"b/0"}]
    alone = {
        name: evaluate(auto(on_devices(problem, frozenset({name})), evaluate)).step_s
        for name in ("a/0", "b/0")
    }
    assert front.plans[-1].step_s == alone["b/0"] == pytest.approx(2 * alone["a/0"])
    assert front.plans[-1].money == pytest.approx(alone["b/0"] / 3600)
    assert front.objectives == (Objective.STEP, Objective.MONEY)
    assert (front.num_sets, front.within, front.complete) == (3, 1.0, True)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_the_front_holds_the_fastest_plan_and_is_not_beaten(seed: int):
    problem, evaluate = random_case(seed)
    front = pareto(problem, evaluate, most_plans=100)
    mine = [tuple(costed.of(objective) for objective in Objective) for costed in front.plans]
    assert not any(beats(one, other) for one in mine for other in mine)
    assert mine == sorted(mine)
    assert mine[0][0] == evaluate(auto(problem, evaluate)).step_s
    assert front.within == 1.0
    for other in values_on_all_sets(seed):
        assert not all(beats(other, one) for one in mine)
        assert any(one == other or beats(one, other) for one in mine)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_no_plan_is_better_than_the_bounds_of_its_devices(seed: int):
    problem, evaluate = random_case(seed)
    for entry in device_sets(problem).sets:
        plan = auto(on_devices(problem, entry.names), evaluate)
        if set(plan.device_names) == entry.names:
            assert entry.least_s <= evaluate(plan).step_s


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_within_a_few_calls_is_said(seed: int):
    """No set that was left out has a plan farther beyond the front than the factor given."""
    problem, evaluate = random_case(seed)
    front = pareto(problem, evaluate, most_plans=2)
    mine = [[costed.of(objective) for objective in Objective] for costed in front.plans]
    assert front.planned <= 2
    for other in values_on_all_sets(seed):
        assert any(
            all(a <= front.within * b * (1 + 1e-9) for a, b in zip(one, other, strict=True)) for one in mine
        )


@pytest.mark.parametrize("objective", Objective)
@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_the_best_of_an_objective_within_limits_is_that_of_all_sets(seed: int, objective: Objective):
    problem, evaluate = random_case(seed)
    everything = values_on_all_sets(seed)
    place = list(Objective).index(objective)
    middle_s = sorted(found[0] for found in everything)[len(everything) // 2]
    choice = best_within(problem, evaluate, objective, Limits(deadline_s=middle_s), most_plans=100)
    assert choice.best.step_s <= middle_s
    assert choice.finished
    best = min(found[place] for found in everything if found[0] <= middle_s)
    assert choice.best.of(objective) == pytest.approx(best)
    assert choice.least is not None and choice.least <= best


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_a_budget_is_kept_and_the_fastest_plan_within_it_found(seed: int):
    problem, evaluate = random_case(seed)
    rates = sorted(entry.expenses.per_hour or 0.0 for entry in device_sets(problem).sets)
    budget = rates[len(rates) // 2]
    choice = best_within(problem, evaluate, Objective.STEP, Limits(budget_per_hour=budget), most_plans=100)
    spent = choice.best.expenses.per_hour
    assert spent is not None and spent <= budget
    everything = [(found[1] / found[0] * 3600, found[0]) for found in values_on_all_sets(seed)]
    fastest = min(step_s for per_hour, step_s in everything if per_hour <= budget * (1 + 1e-12))
    assert choice.best.step_s == pytest.approx(fastest)


def choose(problem: Problem, objective: Objective = Objective.STEP, **limits: float) -> Choice:
    return best_within(problem, evaluator(problem.profile, problem.cluster), objective, Limits(**limits))


def test_limits_that_cannot_be_kept_are_refused():
    problem = unequal_pair(4.0, 1.0)
    with pytest.raises(InfeasibleError, match=r"cost 0\.5 an hour or less, the cheapest cost 1; raise"):
        choose(problem, budget_per_hour=0.5)
    with pytest.raises(InfeasibleError, match="no plan has a step of 1 s or less: any takes"):
        choose(problem, deadline_s=1.0)
    fastest_s = choose(problem).best.step_s
    with pytest.raises(InfeasibleError, match="was found; the fastest one of 1 set of devices takes"):
        best_within(
            problem,
            evaluator(problem.profile, problem.cluster),
            Objective.MONEY,
            Limits(deadline_s=fastest_s * 0.999),
            most_plans=1,
        )
    with pytest.raises(InputError, match="leaves no time"):
        choose(problem, deadline_s=0.0)
    with pytest.raises(InputError, match="is none"):
        choose(problem, budget_per_hour=-1.0)


def test_a_budget_that_is_the_sum_of_prices_is_kept():
    problem = unequal_pair(0.1, 0.2)
    assert 0.1 + 0.2 > 0.3
    assert Limits(budget_per_hour=0.3).within_budget(expenses(problem.cluster, ["a/0", "b/0"]))
    assert not Limits(budget_per_hour=0.2999).within_budget(expenses(problem.cluster, ["a/0", "b/0"]))
    assert choose(problem, budget_per_hour=0.3).best.step_s == choose(problem).best.step_s


def test_what_is_not_known_of_a_device_is_asked_for():
    problem = problem_of(small_profile(), small_cluster(), 4)
    evaluate = evaluator(problem.profile, problem.cluster)
    with pytest.raises(InputError, match="neither prices nor watts are known of all devices of 'two'"):
        pareto(problem, evaluate)
    with pytest.raises(InputError, match="device 'a/0' has no `watts`"):
        choose(problem, Objective.ENERGY)
    with pytest.raises(InputError, match="device 'a/0' has no `price_per_hour`"):
        choose(problem, budget_per_hour=3.0)
    with pytest.raises(InputError, match="leave out --pin"):
        choose(replace(unequal_pair(4.0, 1.0), forced=Forced((Pin("a/0", 0, 2),))))


def test_forced_pipelines_are_kept_on_every_set_of_devices():
    problem = replace(unequal_pair(4.0, 1.0), forced=Forced(num_pipelines=2))
    choice = choose(problem, Objective.MONEY)
    assert len(choice.best.plan.pipelines) == 2


def test_equal_devices_are_counted_not_named():
    profile, cluster = equal_stages(6)
    problem = problem_of(profile, cluster, 6)
    found = device_sets(problem)
    assert found.complete
    assert [len(entry.names) for entry in found.sets] == [6, 5, 4, 3, 2, 1]
    assert found.sets[-1] == DeviceSet(frozenset({"n/0"}), found.sets[-1].least_s, Expenses(None, None))


def test_many_sets_are_thinned_out_and_said_to_be():
    profile, cluster = equal_stages(40)
    found = device_sets(problem_of(profile, cluster, 6), most=12)
    assert not found.complete
    assert [len(entry.names) for entry in found.sets] == [40, 36, 32, 28, 24, 20, 16, 12, 8, 4]


def test_a_limit_is_none_unless_it_is_given():
    assert Limits() == Limits(inf, inf)
    assert Limits().within_budget(Expenses(None, None))
