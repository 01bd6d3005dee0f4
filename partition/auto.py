"""`auto`: the best plan of every source there is, by the simulator; never worse than a baseline."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

from cost_model.errors import InfeasibleError
from partition.baselines.layer_splits import BASELINES, Strategy, TooManyStagesError
from partition.bounds.best_bound import fractional_bound_s
from partition.constraints.forced_plans import forced_plans
from partition.estimates.gradient_sync import SyncCosts
from partition.estimates.optimizer_sharding import sharded_plans, unsharded
from partition.estimates.pipeline_costs import PipelineCosts
from partition.estimates.ranking import Ranking, estimate_s, total_s, variants
from partition.estimates.timed_pipeline import TimedPipeline
from partition.exact.chain_search import AUTO, search_chains
from partition.exact.feasibility import least_pipeline
from partition.local_search.moves import Found
from partition.local_search.pipeline_search import PipelineSearch
from partition.plan import Plan
from partition.problem import Evaluate, Forced, Problem
from partition.shared_devices.interleaved import interleaved_plans
from partition.shared_devices.shifted_cuts import memory_binds, shared_plans

MANY_DEVICES = 8
FEW_DEVICES = 5  # up to which all orders of one pipeline are tried with every in_flight
NUM_CHAINS = 16
INSTRUCTIONS = 60_000  # that the verdict may simulate of each source beyond its first plans
OUR_OWN = 3
MOST_SHARDED = 12  # devices up to which sharded states are searched for, where they are not needed
LEAST_GAIN = 0.02  # relative, that they must promise
QUICK = 20  # times as fast, instruction by instruction, are plans whose devices serve one stage each
MOST_LOST, CLEARLY = 3, 1.05
HEAVY = 60_000  # instructions of a plan beyond which only the best by estimate is simulated


def auto(problem: Problem, evaluate: Evaluate | None = None, *, search: PipelineSearch | None = None) -> Plan:
    """The best of `PipelineSearch`, of single and interleaved pipelines, of shared devices and baselines.

    Never worse than a baseline: each that could be faster is a candidate. Ties go to fewer devices. Of
    candidates whose busiest device alone is busy for longer than the best plan's step none is simulated.

    Raises: InfeasibleError with the least that is missing, over all orders and cuts, or why nothing that is
        forced can be.
    """
    verdict = Ranking(problem, evaluate)
    if problem.forced != Forced():
        plans = [plan for plan in forced_plans(problem, _simulator(evaluate)) if problem.forced.allows(plan)]
        return dataclasses.replace(min(plans, key=verdict), strategy=AUTO)
    search = search or PipelineSearch(problem)
    costs = search.costs
    best = _pipelines(search, verdict)
    best = _best(list(_baselines(problem, evaluate)), verdict, costs, len(BASELINES), best)
    if best is None or memory_binds(problem, costs):
        best = _best(list(_sharded(problem, best, verdict)), verdict, costs, OUR_OWN, best)
    if best is None:
        best = _last(search, verdict)
    return dataclasses.replace(best, strategy=AUTO)


def _pipelines(search: PipelineSearch, verdict: Ranking, known: Sequence[TimedPipeline] = ()) -> Plan | None:
    """The best of `PipelineSearch`, shared devices and interleaved pipelines. known: starts."""
    problem, costs = search.problem, search.costs
    found = _found(search, known)
    ours = sorted(_ours(search, found), key=lambda plan: estimate_s(costs, plan))
    best = _best(ours, verdict, costs, OUR_OWN)
    settled = (
        search.plan(AUTO, entry.timed) for entry in search.settled(found, lambda plan: verdict(plan)[0])
    )
    best = min((plan for plan in (best, *settled) if plan is not None), key=verdict, default=None)
    if best is None or memory_binds(problem, costs):
        ceiling_s = verdict(best)[0] if best else math.inf
        shared = shared_plans(search.tables, costs, best, ceiling_s)
        best = _best(shared, verdict, costs, OUR_OWN, best, MOST_LOST)
    ceiling_s = verdict(best)[0] if best else math.inf
    return _best(interleaved_plans(problem, costs, ceiling_s), verdict, costs, OUR_OWN, best)


def _last(search: PipelineSearch, verdict: Ranking) -> Plan:
    """A plan where the search has found none: of the pipeline that fits if any does, improved.

    Raises: InfeasibleError if none fits.
    """
    problem = search.problem
    least = least_pipeline(problem)
    known = [search.timings.pipeline(least.stages, least.microbatch_size)]
    devices = known[0].devices
    for size in problem.microbatch_sizes:
        pipeline = search.cut_optimizer.recut(devices, size, problem.global_batch_size)
        known += [pipeline] if pipeline is not None else []
    known = [
        pipeline for pipeline in known if pipeline.timing.fits
    ]  # not one that fits as a single microbatch
    better = _pipelines(search, verdict, known) if known else None
    plans = (least.plan(AUTO, problem), better)
    return min((plan for plan in plans if plan is not None), key=verdict)


def _simulator(evaluate: Evaluate | None) -> Evaluate:
    """Raises: InfeasibleError if none was given."""
    if evaluate is None:
        raise InfeasibleError("forced plans need the simulator", missing_bytes=0.0)
    return evaluate


def _found(search: PipelineSearch, known: Sequence[TimedPipeline] = ()) -> list[Found]:
    """The sets of the search, least estimates first, with gradient sync."""
    sync = SyncCosts(search.costs)
    return _distinct(search.search(lambda timed, seconds: seconds + sync.exposed_s(timed), known))


def _ours(search: PipelineSearch, found: Sequence[Found]) -> Iterator[Plan]:
    for entry in found:
        plan = search.plan(AUTO, entry.timed)
        if plan is not None:
            yield plan
    if len(search.problem.cluster.devices) <= FEW_DEVICES:
        for chain in search_chains(search.problem).plans[:NUM_CHAINS]:
            yield from variants(search.costs, chain)


def _sharded(problem: Problem, best: Plan | None, verdict: Ranking) -> Iterator[Plan]:
    """Plans with sharded optimizer states, where they could be faster than the best so far."""
    if best is not None:
        least_s = fractional_bound_s(unsharded(problem, 0.0))
        if len(problem.cluster.devices) > MOST_SHARDED or least_s * (1 + LEAST_GAIN) > verdict(best)[0]:
            return

    def plans_of(smaller: Problem) -> Iterator[Plan]:
        search = PipelineSearch(smaller)
        return _ours(search, _found(search))

    costs = PipelineCosts(problem)
    yield from sorted(sharded_plans(problem, plans_of), key=lambda plan: estimate_s(costs, plan))


def _distinct(found: Sequence[Found]) -> list[Found]:
    seen: dict[object, Found] = {}
    for entry in found:
        seen.setdefault(tuple(pipeline.stages for pipeline in entry.timed), entry)
    return list(seen.values())


def _baselines(problem: Problem, evaluate: Evaluate | None) -> Iterator[Plan]:
    """What each baseline would choose; in a large cluster by its estimate, to be simulated if it may win."""
    if len(problem.cluster.devices) > MANY_DEVICES:
        evaluate = None
    for baseline in BASELINES.values():
        try:
            yield baseline(problem, evaluate)
        except (InfeasibleError, TooManyStagesError):
            continue


def _best(
    plans: Sequence[Plan],
    verdict: Ranking,
    costs: PipelineCosts,
    least: int,
    best: Plan | None = None,
    most_lost: int | None = None,
) -> Plan | None:
    """The best of the plans and the one so far; the first `least` are always asked about, if they may win.

    most_lost: after so many in a row that are clearly worse the rest is left, as likely to be.
    """
    budget, lost = INSTRUCTIONS, 0
    for index, plan in enumerate(plans):
        weight = instructions(plan)
        if index >= (1 if weight > HEAVY else least) and weight > budget:
            continue
        if best is not None and busiest_s(plan, costs) > verdict(best)[0]:
            continue
        if lost == most_lost:
            break
        budget -= weight
        lost = lost + 1 if best is not None and verdict(plan)[0] > CLEARLY * verdict(best)[0] else 0
        if best is None or verdict(plan) < verdict(best):
            best = plan
    return best


def instructions(plan: Plan) -> int:
    """About how many instructions the simulator runs through, or could in its time for the plan."""
    count = sum(pipeline.num_microbatches * (6 * len(pipeline.stages) - 4) for pipeline in plan.pipelines)
    alone = sum(len(pipeline.stages) for pipeline in plan.pipelines) == len(plan.device_names)
    return count // QUICK if alone else count


def busiest_s(plan: Plan, costs: PipelineCosts) -> float:
    """Seconds for which the busiest device computes: no step is shorter."""
    busy: dict[str, float] = {}
    for pipeline in plan.pipelines:
        for device, start, stop in costs.layout(pipeline):
            seconds = total_s(costs, pipeline, device, start, stop)
            busy[device.name] = busy.get(device.name, 0.0) + seconds
    return max(busy.values())


STRATEGIES: Mapping[str, Strategy] = {**BASELINES, AUTO: auto}
