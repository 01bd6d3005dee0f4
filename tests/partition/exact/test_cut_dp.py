"""The cuts of a pipeline of few devices beside all that there are, by their clocks."""

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise, product

import pytest

from cost_model.cluster import Device
from partition.estimates.timed_pipeline import PipelineTiming, TimedStage
from partition.local_search.starts import SearchSpace
from wish_cases import wish_case


def all_cuts(space: SearchSpace, devices: Sequence[Device], size: int) -> Iterator[PipelineTiming]:
    """Give the timings of all cuts of an order that fit, each stage with and without recompute."""
    count, layers = len(devices), space.problem.profile.num_layers
    for inner in combinations(range(1, layers), count - 1):
        for again in product((False, True), repeat=count):
            parts = zip(devices, pairwise((0, *inner, layers)), again, strict=True)
            stages = [TimedStage(device, *cut, recompute) for device, cut, recompute in parts]
            timing = space.timings.pipeline(stages, size).timing
            if timing.fits:
                yield timing


@pytest.mark.parametrize("order", [("n1/0", "n2/0", "n0/0"), ("n2/0", "n1/0", "n0/0")])
def test_no_stage_is_recomputed_in_vain(order: tuple[str, ...]) -> None:
    """Where gradients wait there is no room for more in flight: cuts for it took 9 and 5 % longer."""
    space = SearchSpace(wish_case(0))
    devices = [space.problem.cluster.device(name) for name in order]
    samples = space.problem.global_batch_size
    found = space.cut_optimizer.recut(devices, 1, samples)
    assert found is not None
    least_s = min(timing.time_s(samples) for timing in all_cuts(space, devices, 1))
    assert found.timing.time_s(samples) == pytest.approx(least_s)
