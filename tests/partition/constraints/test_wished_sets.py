"""What is forced, as masks of stages, limits of the programme over pipelines, and sets to begin with."""

from dataclasses import replace

import numpy as np
import pytest

from cost_model.errors import InfeasibleError, InputError
from hetpipe.simulation.prediction import evaluator
from partition.column_generation.master_problem import Limits, solve_master
from partition.constraints.dealt_devices import dealt
from partition.constraints.wished_sets import WishedSets
from partition.exact.feasibility import least_pipelines
from partition.local_search.pipeline_search import PipelineSearch
from partition.problem import Forced, Pin, Problem
from partition.solver import compare, solve
from random_problems import random_problem, with_ample_memory


def forced(seed: int, *pins: Pin, **numbers: int) -> Problem:
    return replace(with_ample_memory(random_problem(seed)), forced=Forced(pins, **numbers))


def test_a_pinned_device_is_a_class_whose_memory_takes_its_layers_alone() -> None:
    problem = random_problem(0)
    device = problem.cluster.devices[0]
    pinned = replace(problem, forced=Forced((Pin(device.name, 1, 3),)))
    search, free = PipelineSearch(pinned), PipelineSearch(problem)
    (at,) = (c for c, group in enumerate(search.classes.members) if group[0].name == device.name)
    assert len(search.classes.members[at]) == 1 and search.limits == Limits(needed=(at,))
    for recompute in (False, True):
        caps, others = (it.tables.at(1).caps(recompute=recompute) for it in (search, free))
        assert np.count_nonzero(caps[at]) == (others[free.classes.class_indices()[device.name], 1, 3] > 0)
    merged = search.classes.merged()
    assert [group for group in merged.members if device in group] == [(device,)]


def test_limits_are_rows_of_the_programme() -> None:
    # a device of class 0 does 4 samples, one of class 1 does 1, both together 6
    uses, values, counts = [(1, 0), (0, 1), (1, 1)], [4.0, 1.0, 6.0], [2.0, 2.0]
    free = solve_master(uses, values, counts, integer=True)
    assert free.samples == 12 and free.amounts.tolist() == [0, 0, 2]
    three = solve_master(uses, values, counts, Limits(3, 3), integer=True)
    assert three.samples == 11 and round(three.amounts.sum()) == 3
    few = solve_master(uses, values, counts, Limits(most_devices=2), integer=True)
    assert few.samples == 8 and few.amounts.tolist() == [2, 0, 0]
    slow = solve_master(uses[:2], values[:2], counts, Limits(1, 1, needed=(1,)))
    assert not slow.met  # one pipeline cannot have both devices of class 1
    assert slow.prices[1] < 0  # more of them would be worth something


def test_limits_that_are_met_have_prices_as_without_them() -> None:
    uses, values, counts = [(1, 0), (0, 1)], [4.0, 1.0], [2.0, 2.0]
    free = solve_master(uses, values, counts)
    kept = solve_master(uses, values, counts, Limits(9, 1, 9, (0,)))
    assert kept.met and kept.samples == free.samples == 10
    assert kept.prices == pytest.approx(free.prices) and kept.each == pytest.approx(0.0)


def test_devices_are_dealt_out_around_the_pins() -> None:
    problem = forced(4, num_pipelines=2)
    names = [device.name for device in problem.cluster.devices]
    layers = problem.profile.num_layers
    problem = replace(problem, forced=Forced((Pin(names[0], 0, 1), Pin(names[1], 0, layers)), 2))
    seconds = dict.fromkeys(names, 1.0)
    found = dealt(problem, 2, seconds)
    assert found
    for arrangement in found:
        chains = [[device.name for device in chain] for chain in arrangement]
        assert [chain for chain in chains if chain[0] == names[0] and len(chain) > 1]
        assert [names[1]] in chains
        assert len({name for chain in chains for name in chain}) == sum(map(len, chains))
    assert dealt(problem, 1, seconds) == []


def test_every_start_is_a_set_that_is_wished_for() -> None:
    seen = 0
    for seed in range(5):
        problem = forced(seed, num_pipelines=2)
        for start in PipelineSearch(problem).starts():
            assert len(start.timed) == 2 and WishedSets(problem).hold(start.timed)
            seen += 1
    assert seen > 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seeds", "least"), [(range(5), 3), pytest.param(range(5, 30), 9, marks=pytest.mark.exhaustive)]
)
def test_no_bound_is_crossed_by_what_is_forced_nor_by_others(seeds: range, least: int) -> None:
    bounds = 0
    for seed in seeds:  # plans that share devices have no such bound
        problem = random_problem(seed)
        layers, names = problem.profile.num_layers, [device.name for device in problem.cluster.devices]
        for wish in (Forced(num_pipelines=1), Forced((Pin(names[-1], 0, layers // 2),)), Forced((), 2, 2)):
            wished = replace(problem, forced=wish)
            try:
                plan = solve(wished, evaluator(problem.profile, problem.cluster), proof_s=0.5)
            except (InfeasibleError, InputError):
                continue
            assert plan.predicted is not None and wish.allows(plan)
            assert plan.predicted.gap is None or plan.predicted.gap >= -1e-9
            bounds += "pipeline" in (plan.predicted.bound_space or "")
    assert bounds >= least
    problem = replace(random_problem(1), forced=Forced(num_pipelines=1))
    for outcome in compare(problem, evaluator(problem.profile, problem.cluster), proof_s=0.5):
        if outcome.plan is not None and outcome.plan.predicted is not None:
            assert outcome.plan.predicted.gap is None or outcome.plan.predicted.gap >= -1e-9


def test_several_pipelines_that_memory_takes_are_packed() -> None:
    # each pipeline takes two devices: three are one too few
    problem = with_ample_memory(random_problem(4))
    bytes_of = 4 * sum(layer.parameter_bytes for layer in problem.profile.layers)
    half = replace(
        problem,
        cluster=replace(
            problem.cluster,
            nodes=tuple(
                replace(
                    node,
                    devices=tuple(replace(device, memory_bytes=0.8 * bytes_of) for device in node.devices),
                )
                for node in problem.cluster.nodes
            ),
        ),
    )
    count = len(half.cluster.devices)
    fitting = replace(half, forced=Forced(num_pipelines=count // 2))
    found = least_pipelines(fitting)
    assert len(found.stages) == count // 2 and found.missing_bytes <= 0
    more = replace(half, forced=Forced(num_pipelines=count // 2 + 1))
    with pytest.raises(InfeasibleError, match=r"with pipelines = \d: even in the best of the orders"):
        least_pipelines(more)


def test_unequal_memories_hold_a_pipeline_each_or_the_least_one_is_named() -> None:
    problem = with_ample_memory(random_problem(4))
    nodes = tuple(
        replace(
            node,
            devices=tuple(
                replace(device, memory_bytes=1e6 + 1e3 * place) for place, device in enumerate(node.devices)
            ),
        )
        for node in problem.cluster.nodes
    )
    count = len(problem.cluster.devices)
    wide = replace(problem, cluster=replace(problem.cluster, nodes=nodes), forced=Forced(num_pipelines=count))
    assert sorted(map(len, least_pipelines(wide).stages)) == [1] * count
    small = replace(nodes[0], devices=(replace(nodes[0].devices[0], memory_bytes=9.0), *nodes[0].devices[1:]))
    tight = replace(wide, cluster=replace(wide.cluster, nodes=(small, *nodes[1:])))
    with pytest.raises(InfeasibleError, match=r"orders tried.* on 'a/0', which has 9 usable"):
        least_pipelines(tight)
