"""New sets out of pipelines that a search has seen: the best there are, of devices that there are."""

import math
import operator
from collections.abc import Iterator
from itertools import pairwise, product

import pytest

from partition.column_generation.pipeline_pool import Ceilings, PipelinePool
from partition.estimates.timed_pipeline import TimedStage, TimingCache
from partition.local_search.pipeline_search import PipelineSearch
from random_problems import random_problem
from searches import clock_s, worst_starts


def most_samples(seen: PipelinePool, timings: list, step_s: float, batch: int) -> int:
    """By trying every number of every pipeline: most samples in a step."""
    counts = seen.classes.counts
    entry = seen.classes.class_indices()
    columns: dict[tuple[int, ...], int] = {}
    for timing in timings:
        if timing.fits:
            names = [entry[stage.device.name] for stage in timing.stages]
            uses = tuple(names.count(place) for place in range(len(counts)))
            columns[uses] = max(columns.get(uses, 0), timing.most(step_s, batch))
    most = [
        min(count // use for use, count in zip(uses, counts, strict=True) if use) if samples else 0
        for uses, samples in columns.items()
    ]
    best = 0
    for amounts in product(*(range(most_of + 1) for most_of in most)):
        used = [
            sum(amount * uses[place] for amount, uses in zip(amounts, columns, strict=True))
            for place in range(len(counts))
        ]
        if all(use <= count for use, count in zip(used, counts, strict=True)):
            samples = columns.values()
            best = max(best, sum(amount * value for amount, value in zip(amounts, samples, strict=True)))
    return best


def searched(seeds: int) -> Iterator[tuple[int, PipelineSearch, float]]:
    """Yield (batch, a search that has made its starts, the least step of these) of problems that have any."""
    for seed in range(seeds):
        problem = random_problem(seed)
        search = PipelineSearch(problem)
        if found := search.starts():
            yield problem.global_batch_size, search, found[0].step_s


def made(search: PipelineSearch, most: int) -> TimingCache:
    """Return a timing cache in which the first few pipelines of a search were made."""
    timings = TimingCache(search.costs)
    for timing in search.timings.timings[:most]:
        channels = [(a.device, b.device) for a, b in pairwise(timing.stages)]
        timings.timing(timing.stages, channels, timing.microbatch_size)
    return timings


@pytest.mark.slow
def test_the_whole_pipelines_do_most_samples_of_all_sets() -> None:
    promised = 0
    for seed in range(25):
        problem = random_problem(seed)
        search = PipelineSearch(problem)
        found = search.starts()
        if not found:
            continue
        timings, batch = made(search, 8), problem.global_batch_size
        seen = PipelinePool(timings, search.classes.merged(), batch)
        longest_s = 3 * found[0].step_s
        step_s, pipelines = seen.pipelines(longest_s)
        best = most_samples(seen, timings.timings, step_s if pipelines else 0.997 * longest_s, batch)
        if not pipelines:
            assert math.isinf(step_s) and best < batch, seed
            continue
        assert step_s < longest_s
        samples = sum(pipeline.num_samples for pipeline in pipelines)
        assert samples >= min(batch, best * (1 - 1e-3)), seed
        entries = [stage.class_index for pipeline in pipelines for stage in pipeline.stages]
        for entry, count in enumerate(seen.classes.counts):
            assert entries.count(entry) <= count, seed
        promised += 1
    assert promised > 8


def test_pipelines_made_later_are_seen_too() -> None:
    problem = random_problem(3)
    search = PipelineSearch(problem)
    timings = TimingCache(search.costs)
    seen = PipelinePool(timings, search.classes.merged(), problem.global_batch_size)
    assert seen.pipelines(1e9) == (math.inf, [])
    found = search.starts()
    for pipeline in found[0].timed:
        timings.pipeline(pipeline.stages, pipeline.microbatch_size)
    step_s, pipelines = seen.pipelines(2 * found[0].step_s)
    assert pipelines and step_s < 2 * found[0].step_s


def test_ceilings_of_all_are_those_of_each() -> None:
    compared = 0
    for batch, search, found_s in searched(12):
        ceilings = Ceilings(batch)
        timings = [timing for timing in made(search, 60).timings if timing.fits]
        for part in (timings[:7], [], timings[7:]):
            ceilings.take(part)
        for share in (0.01, 0.5, 0.9, 1.0, 1.5, 3.0):
            step_s = share * found_s
            assert ceilings.in_step(step_s) == [timing.no_more(step_s, batch) for timing in timings]
        compared += len(timings)
        for place, timing in enumerate(timings):
            done = ceilings.most(place, found_s)
            assert ceilings.was_asked(place) and done == timing.most(found_s, batch)
        less = [timing.most(0.8 * found_s, batch) for timing in timings]
        assert all(map(operator.ge, ceilings.in_step(0.8 * found_s), less))
    assert compared > 50


def test_what_was_asked_before_changes_no_answer() -> None:
    compared = 0
    for batch, search, found_s in searched(12):
        classes = search.classes.merged()
        asked = PipelinePool(made(search, 60), classes, batch)
        for share in (1.5, 0.9, 1.2, 3.0, 1.2, 0.99):
            timings, step_s = made(search, 60), share * found_s
            answers = [pool.least(step_s) for pool in (asked, PipelinePool(timings, classes, batch))]
            most: dict[tuple[int, ...], int] = {}
            for timing in timings.timings if answers[1] else []:
                uses = asked.uses(timing)
                if all(use <= count for use, count in zip(uses, classes.counts, strict=True)):
                    samples = timing.most(answers[1].step_s, batch) if timing.fits else 0
                    most[uses] = max(most.get(uses, 0), samples)
            done = [{uses: best[0] for uses, best in each.best.items()} if each else {} for each in answers]
            assert done[0] == done[1] == {uses: samples for uses, samples in most.items() if samples}
            compared += len(most)
    assert compared > 50


@pytest.mark.slow
def test_a_mixed_set_is_judged_as_it_is() -> None:
    mixed = 0
    for search, worst in worst_starts(16):
        for entry in search.recombined(worst, lambda _, seconds: 2 * seconds):
            assert entry.step_s == pytest.approx(2 * clock_s(search, entry))
            mixed += 1
    assert mixed > 2


def test_a_pipeline_that_takes_more_devices_than_there_are_is_none() -> None:
    refused = 0
    for seed in range(40):
        problem = random_problem(seed)
        search, layers = PipelineSearch(problem), problem.profile.num_layers
        seen = PipelinePool(
            timings := TimingCache(search.costs),
            search.classes.merged(),
            problem.global_batch_size,
        )
        group, other = seen.classes.members[0], seen.classes.members[-1][0]
        count = len(group) + 1
        if count > layers or other is group[0]:
            continue
        stages = [TimedStage(group[0], start, stop) for start, stop in pairwise([*range(count), layers])]
        timing = timings.timing(stages, [(group[0], other)] * (count - 1), 1)
        assert seen.pipelines(1e9) == (math.inf, [])
        refused += timing.fits
    assert refused > 5
