"""Checks of many random problems, on all cores that have nothing else to do."""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import TypeVar

Result = TypeVar("Result")
MOST = 4
CHUNK = 5


def on_all_cores(check: Callable[[int], Result], seeds: Iterable[int]) -> list[Result]:
    """The results of a check, a function of a module, in order of the seeds; a failure names its seed.

    With `pytest -n` the other cores have tests of their own, and new processes would only load all again.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:
        return [_checked(check, seed) for seed in seeds]
    workers = min(MOST, len(os.sched_getaffinity(0)))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        return list(pool.map(partial(_checked, check), seeds, chunksize=CHUNK))


def _checked(check: Callable[[int], Result], seed: int) -> Result:
    try:
        return check(seed)
    except AssertionError as error:
        error.add_note(f"seed {seed}")
        raise
