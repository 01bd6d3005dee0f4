"""The clock of a step whose messages share the network: by hand, and where none meet the simulator's."""

import itertools
from collections import Counter
from dataclasses import replace

import pytest

from clock_cases import Case, cases, enough
from hetpipe.program.costs import ProgramCosts
from hetpipe.program.instructions import Direction, Sync, Transfer
from hetpipe.simulation.prediction import predict
from hetpipe.simulation.shared_network import VARIED, _exchange_s, shared_step_s
from hetpipe.simulation.simulator import simulate
from partition.bounds.best_bound import fractional_bound_s
from small_case import meeting_chains, whole_model_on_two_nodes_of_two

SEEDS = range(150)
SLACK = 1 + 1e-9  # rounding


def exact_s(costs: ProgramCosts) -> float:
    """Return the step with computations as measured, and connections that get the same."""
    step_s = shared_step_s(costs, varied=0.0, uneven=1.0)
    assert step_s is not None
    return step_s


def chains(count: int) -> ProgramCosts:
    return predict(*meeting_chains(count)).costs


def norm_s(costs: ProgramCosts) -> float:
    ready_s = dict.fromkeys(range(len(costs.device_names)), 0.0)
    return max(costs.norm_due([0.0] * 100, ready_s).values())


@pytest.mark.parametrize(("count", "shared_s"), [(1, 8), (2, 10), (3, 12)])
def test_messages_that_meet_are_all_as_late_as_the_last_by_turns(count: int, shared_s: float):
    # forward to 1, messages to 1 + count, forward and backward of 3 s, messages of count, backward of 2 s
    costs = chains(count)
    assert exact_s(costs) == pytest.approx(shared_s + norm_s(costs))
    if count == 2:  # by turns: the first messages are there at 2 and 3, the gradients at 6 and 7
        assert simulate(costs).makespan_s == pytest.approx(9 + norm_s(costs))


def meet(case: Case) -> bool:
    """Return whether two routes, or a route and a sum, have anything in common, or there are several sums."""
    users = Counter(
        resource
        for pipeline in case.plan.pipelines
        for resources in case.routes(pipeline)
        for resource in resources
    )
    users.update(case.costs.summed_resources())
    return len(case.program.buckets) > 1 or max(users.values(), default=0) > 1


def test_where_no_messages_meet_it_is_the_simulator_s_step():
    counted: Counter[str] = Counter()
    for case in cases(SEEDS):
        if meet(case) or case.plan.sharding.by_layer:
            continue
        assert exact_s(case.costs) == pytest.approx(case.trace.makespan_s, rel=1e-9), case.seed
        counted.update(["any", *case.features])
    enough(counted, 8, "any")


def most_used_s(costs: ProgramCosts) -> float:
    """Return for how long the messages between stages, and the sums, use some resource at least."""
    used: Counter[int] = Counter()
    for entry in itertools.chain.from_iterable(costs.program.ranks):
        if isinstance(entry, Transfer) and entry.direction is Direction.SEND:
            route = costs.route(entry)
            used.update(dict.fromkeys(route.resources, route.link.occupancy_s(costs.transfer_bytes(entry))))
    for index in range(len(costs.program.buckets)):
        used.update(_exchange_s(costs, Sync(index))[1])
    return max(used.values(), default=0.0)


def test_no_step_is_shorter_than_what_its_devices_and_its_network_have_to_do():
    counted: Counter[str] = Counter()
    for case in cases(SEEDS):
        step_s, varied_s = exact_s(case.costs), shared_step_s(case.costs)
        longest_s = max(map(case.trace.busy_s, range(len(case.costs.device_names))))
        assert step_s * SLACK >= max(longest_s, most_used_s(case.costs)), case.seed
        assert varied_s is not None
        assert varied_s >= (1 - VARIED) * fractional_bound_s(case.problem), case.seed
        assert varied_s == shared_step_s(case.costs)
        counted.update(["any", *case.features])
        counted["other than by turns"] += abs(step_s / case.trace.makespan_s - 1) > 1e-6
    enough(counted, 20, "any", "pipelines on one card", "sharded states")
    enough(counted, 10, "other than by turns")
    enough(counted, 20, "shared devices", "measured links", "sums inside a backward")


def test_plans_that_go_layer_by_layer_have_no_such_step():
    plan, profile, cluster = whole_model_on_two_nodes_of_two()
    assert shared_step_s(predict(plan, profile, cluster).costs) is not None
    assert shared_step_s(predict(replace(plan, zero=2), profile, cluster).costs) is None
