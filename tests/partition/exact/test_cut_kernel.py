"""The compiled loop of `cut_dp` finds the cuts of the interpreted one."""

import random

import pytest

from partition.estimates.clocks import MANY_STAGES
from partition.estimates.pipeline_clock import Seconds
from partition.local_search.starts import SearchSpace
from random_problems import random_problem


@pytest.mark.parametrize("seed", range(12))
def test_cuts_are_the_same(seed: int) -> None:
    problem = random_problem(seed)
    interpreted, compiled = SearchSpace(problem), SearchSpace(problem)
    for _ in range(MANY_STAGES):
        compiled.costs.clocks.of(Seconds((1.0,), (1.0,), ()), [1])
    assert compiled.costs.clocks.many and not interpreted.costs.clocks.many
    rng = random.Random(seed)
    for _ in range(20):
        devices = rng.sample(problem.cluster.devices, rng.randint(1, len(problem.cluster.devices)))
        size, samples = rng.choice(problem.microbatch_sizes), rng.randint(1, 60)
        one, other = (space.cut_optimizer.recut(devices, size, samples) for space in (interpreted, compiled))
        assert (one and one.stages) == (other and other.stages)
