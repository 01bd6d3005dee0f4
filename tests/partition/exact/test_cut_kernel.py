"""The compiled loop of `cut_dp` finds the cuts of the interpreted one."""

import random

import pytest

from cost_model.cluster import Cluster, Device, Link, Node
from partition.estimates.clocks import MANY_STAGES
from partition.estimates.pipeline_clock import Seconds
from partition.local_search.starts import SearchSpace
from partition.problem import Problem
from random_problems import random_problem, random_profile


def slow_between_nodes(seed: int) -> Problem:
    """Return a problem of equal devices, so that places of an order differ in the link behind them alone."""
    nodes = tuple(
        Node(name, tuple(Device(f"{name}/{at}", name, "kind 0", 120.0) for at in range(3)), Link(0.0, 20.0))
        for name in "abc"
    )
    profile = random_profile(random.Random(seed), 9)
    return Problem(profile, Cluster("lab", Link(0.2, 0.05), nodes), 24, (1, 2, 4))


@pytest.mark.parametrize(
    "problem", [*map(random_problem, range(12)), *map(slow_between_nodes, range(4))], ids=range(16)
)
def test_cuts_are_the_same(problem: Problem) -> None:
    interpreted, compiled = SearchSpace(problem), SearchSpace(problem)
    for _ in range(MANY_STAGES):
        compiled.costs.clocks.of(Seconds((1.0,), (1.0,), ()), [1])
    assert compiled.costs.clocks.many and not interpreted.costs.clocks.many
    rng = random.Random(0)
    for _ in range(20):
        devices = rng.sample(problem.cluster.devices, rng.randint(1, len(problem.cluster.devices)))
        size, samples = rng.choice(problem.microbatch_sizes), rng.randint(1, 60)
        one, other = (space.cut_optimizer.recut(devices, size, samples) for space in (interpreted, compiled))
        assert (one and one.stages) == (other and other.stages)
