"""What a stage needs is counted from parts that others share: the memory of a device that has it alone."""

import random

import pytest

from cost_model.layer_costs import Prices
from cost_model.memory import StageShape, device_memory
from partition.estimates.stage_needs import StageNeeds
from random_problems import random_profile


@pytest.mark.parametrize("seed", range(12))
def test_memory_of_a_stage_is_that_of_a_device_with_it_alone(seed: int) -> None:
    rng = random.Random(seed)
    profile = random_profile(rng, rng.randint(2, 8), tied=seed % 2 == 1)
    needs, kind = StageNeeds(Prices(profile)), next(iter(profile.kinds))
    for _ in range(40):
        start = rng.randrange(profile.num_layers)
        stop = rng.randint(start + 1, profile.num_layers)
        shape = StageShape(start, stop, rng.randint(1, 5), rng.randint(1, 4), rng.random() < 0.5)
        assert needs.memory(shape, kind) == device_memory(profile.on(kind), [shape])
