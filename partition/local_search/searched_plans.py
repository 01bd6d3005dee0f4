"""What a search of pipelines finds, as plans: its sets by clocks and gradient sync, each once."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from partition.estimates.gradient_sync import SyncCosts
from partition.estimates.ranking import variants
from partition.exact.chain_search import AUTO, search_chains
from partition.local_search.moves import EvaluateSet, PipelineSet
from partition.local_search.pipeline_search import PipelineSearch
from partition.plan import Plan
from partition.problem import Problem


def with_as_many(problem: Problem, number: int) -> Problem:
    """Return the problem of which each plan has a number of pipelines."""
    return replace(problem, forced=replace(problem.forced, num_pipelines=number))


def improved_starts(search: PipelineSearch, *, several: bool = False) -> list[PipelineSet]:
    """Return the sets of a search, each once, by their clocks and gradient sync; least step first.

    several: from those of several pipelines on.
    """
    judge = with_sync(search)
    begun = search.begun(judge)
    return each_once(search.walked(begun.of_several() if several else begun, judge))


def with_sync(search: PipelineSearch) -> EvaluateSet:
    """Return the evaluation of sets by their clocks and gradient sync."""
    sync = SyncCosts(search.costs)
    return lambda timed, seconds: seconds + sync.exposed_s(timed)


def each_once(sets: Iterable[PipelineSet]) -> list[PipelineSet]:
    """Return the sets in their order, of those of the same stages the first."""
    found: dict[object, PipelineSet] = {}
    for pipelines in sets:
        found.setdefault(tuple(pipeline.stages for pipeline in pipelines.timed), pipelines)
    return list(found.values())


def plans_of_sets(search: PipelineSearch, found: Sequence[PipelineSet]) -> Iterator[Plan]:
    """Give the plans of sets, and on few devices those of exact single pipelines."""
    yield from plans_of(search, found)
    chains = search.effort.choice.exact_chains
    if chains:
        for chain in search_chains(search.problem).plans[:chains]:
            yield from variants(search.costs, chain)


def plans_of(search: PipelineSearch, sets: Iterable[PipelineSet]) -> Iterator[Plan]:
    """Give the plans of sets that are plans."""
    plans = (search.plan(AUTO, pipelines.timed) for pipelines in sets)
    return (plan for plan in plans if plan is not None)
