"""Lower bounds for plans that shard states, gradients or weights: these are anywhere, for nothing."""

from dataclasses import replace

from cost_model.sharding import Sharding
from partition.bounds.best_bound import (
    Bound,
    bound_space,
    fractional_bound_s,
    pipeline_bound_s,
    proof_seconds,
)
from partition.estimates.optimizer_sharding import unsharded
from partition.local_search.pipeline_search import PipelineSearch
from partition.problem import Problem

AMPLE_BYTES = 1e24  # of a device, where a bound does not count memory
STATES = "optimizer states anywhere and for nothing"


def sharded_bound(problem: Problem, sharding: Sharding = Sharding.STATES) -> Bound:
    """Return a bound for plans whose optimizer states, on any device, cost neither memory nor time.

    Where gradients are sharded, too, no memory is counted: they, and weights, may be anywhere.
    """
    kept = STATES
    if sharding.by_layer:
        ample = problem.cluster.with_devices(lambda device: replace(device, memory_bytes=AMPLE_BYTES))
        problem = replace(problem, cluster=ample)
        kept = "memory not counted, states anywhere and for nothing"
    space = f"{bound_space(problem)}, {kept}"
    return Bound(fractional_bound_s(without_states(problem)), space, zero=int(sharding))


def sharded_pipeline_bound(problem: Problem, step_s: float, *, proof_s: float | None = None) -> Bound:
    """Return the bound for plans that shard optimizer states alone, with that of pipelines without states.

    What the proof of the pipeline bound counts but states and their steps is the same in such a plan. step_s:
    of the best one that is known, where the bound ends. proof_s: as in `best_bound`, beside the short search
    without states from which it begins.
    """
    bound, free = sharded_bound(problem), without_states(problem)
    proof_s = proof_seconds(problem) if proof_s is None else proof_s
    if proof_s <= 0 or bound.fractional_s <= 0:
        return bound
    search = PipelineSearch(free)
    search.begun(lambda _, clock_s: clock_s)
    if search.best is None:
        return bound
    most = problem.forced.num_pipelines
    pipeline_s, held_by = pipeline_bound_s(
        search, bound.fractional_s, proof_s, ceiling_s=step_s, most_pipelines=most
    )
    return bound.with_pipelines(problem, pipeline_s, held_by, f"{STATES}, ")


def without_states(problem: Problem) -> Problem:
    """Return the problem with optimizer states of no bytes, and an optimizer that takes no time."""
    profile = unsharded(problem, 0.0).profile
    kinds = {name: replace(kind, optimizer_s_per_byte=0.0) for name, kind in profile.kinds.items()}
    return replace(problem, profile=replace(profile, kinds=kinds))
