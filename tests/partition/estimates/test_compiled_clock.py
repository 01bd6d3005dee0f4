"""Compiled clocks and cuts are those of the interpreted loops, to the last bit."""

import random

from partition.estimates.clocks import MANY_STAGES, Clocks
from partition.estimates.compiled_clock import CompiledClock
from partition.estimates.pipeline_clock import PipelineClock, Seconds


def random_seconds(rng: random.Random, count: int, most_s: float) -> Seconds:
    def some(number: int) -> tuple[float, ...]:
        return tuple(most_s * rng.random() for _ in range(number))

    links = [(rng.random(), rng.random(), rng.random(), rng.random()) for _ in range(count - 1)]
    return Seconds(some(count), some(count), tuple(links))


def test_makespans_are_the_same() -> None:
    rng = random.Random(0)
    for _ in range(200):
        count = rng.randint(2, 8)
        full = random_seconds(rng, count, 3.0)
        flights = sorted((rng.randint(1, 12) for _ in range(count)), reverse=True)
        compiled, interpreted = CompiledClock(full, flights), PipelineClock(full, flights)
        last = random_seconds(rng, count, 1.0) if rng.random() < 0.5 else None
        for number in rng.sample(range(1, 50), 4):
            assert compiled.makespan_s(number, last) == interpreted.makespan_s(number, last)


def test_a_search_compiles_once_it_has_made_many_clocks() -> None:
    clocks, full = Clocks(), random_seconds(random.Random(1), 4, 1.0)
    first = clocks.of(full, [4, 3, 2, 1])
    for _ in range(MANY_STAGES // 4):
        later = clocks.of(full, [4, 3, 2, 1])
    assert isinstance(first, PipelineClock) and isinstance(later, CompiledClock)
    assert first.makespan_s(20) == later.makespan_s(20)
