"""Searches of random small problems, and what every set that they find is. Shared by tests."""

import math
from collections.abc import Iterator

from partition.estimates.batch_split import share_out
from partition.local_search.moves import PipelineSet
from partition.local_search.pipeline_search import PipelineSearch
from random_problems import random_problem


def worst_starts(count: int) -> Iterator[tuple[PipelineSearch, PipelineSet]]:
    """Of random problems where there is a set at all: the search, and its worst start."""
    for seed in range(count):
        search = PipelineSearch(random_problem(seed))
        starts = [entry for entry in search.starts() if math.isfinite(entry.step_s)]
        if starts:
            yield search, max(starts, key=lambda entry: entry.step_s)


def clock_s(search: PipelineSearch, entry: PipelineSet) -> float:
    """Seconds in which a set does the batch; no two of its stages are on the same device."""
    names = [device.name for pipeline in entry.timed for device in pipeline.devices]
    assert len(names) == len(set(names))
    return share_out(entry.timed, search.problem.global_batch_size)[0]
