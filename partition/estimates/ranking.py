"""Which of some plans is best: by the simulator, or by a closed-form estimate where none is given."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from cost_model.cluster import Device
from cost_model.memory import trained_bytes
from cost_model.network import NORM_BYTES
from partition.estimates.closed_forms import cap_in_flight, makespan_bound_s
from partition.estimates.gradient_sync import SyncCosts
from partition.estimates.pipeline_costs import PipelineCosts
from partition.plan import Pipeline, Plan
from partition.problem import Evaluate, Problem

NUM_EVALUATED = 2  # plans of a strategy, by estimate

Rank = tuple[int, tuple[str, ...], tuple[tuple[int, ...], ...]]


def rank(plan: Plan) -> Rank:
    """What breaks ties between plans: fewer devices, then names, then numbers, so that machines agree."""
    numbers = tuple(
        (pipeline.microbatch_size, pipeline.num_samples, *stage.layers, stage.in_flight)
        for pipeline in plan.pipelines
        for stage in pipeline.stages
    )
    return (len(plan.device_names), plan.device_names, numbers)


class Ranking:
    """Sort key of plans: seconds of a step, then `rank`; remembers what it was asked.

    Seconds are rounded to ten digits, so that ties are ties on every machine.
    """

    def __init__(self, problem: Problem, evaluate: Evaluate | None) -> None:
        self._step_s = _simulated(evaluate) if evaluate else partial(estimate_s, PipelineCosts(problem))
        self._keys: dict[object, tuple[float, Rank]] = {}

    def __call__(self, plan: Plan) -> tuple[float, Rank]:
        key = (plan.pipelines, plan.state_owners)
        if key not in self._keys:
            self._keys[key] = (_rounded(self._step_s(plan)), rank(plan))
        return self._keys[key]


def _simulated(evaluate: Evaluate) -> Callable[[Plan], float]:
    return lambda plan: evaluate(plan).step_s


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.9e}")


def best_plan(problem: Problem, evaluate: Evaluate | None, estimated: Iterable[tuple[float, Plan]]) -> Plan:
    """The plan of least estimate (seconds); with evaluate, the one of the two least that evaluates best."""
    ranked = sorted(estimated, key=lambda entry: (_rounded(entry[0]), rank(entry[1])))
    near = [plan for _, plan in ranked[:NUM_EVALUATED]]
    return min(near, key=Ranking(problem, evaluate)) if evaluate else near[0]


def estimate_s(costs: PipelineCosts, plan: Plan) -> float:
    """Closed-form seconds of a step of any plan.

    Of several pipelines: the longest Z, or the busiest device if that is longer, and after it the longest
    optimizer step, the gradient sync of the device that has most of it, and the norm. Nothing overlaps.
    """
    if len(plan.pipelines) == 1 and len(plan.device_names) == len(plan.pipelines[0].stages):
        return costs.estimate_s(plan)
    cluster, busy_s, optimizer_s = costs.problem.cluster, dict.fromkeys(plan.device_names, 0.0), 0.0
    longest_s = 0.0
    for pipeline in plan.pipelines:
        totals = [total_s(costs, pipeline, *stage) for stage in costs.layout(pipeline)]
        for stage, seconds in zip(pipeline.stages, totals, strict=True):
            busy_s[stage.device] += seconds
        longest_s = max(longest_s, _makespan_s(costs, pipeline, totals))
    whole = trained_bytes(costs.problem.profile, range(plan.num_layers))
    for name in plan.device_names:
        layers, device = plan.layers_of(name), cluster.device(name)
        per_byte = costs.problem.profile.kind(device.kind).optimizer_s_per_byte / device.speed
        if per_byte * whole > optimizer_s:  # else even all layers would not be longer
            optimizer_s = max(optimizer_s, costs.prices.optimizer_s(device, layers))
    sync = SyncCosts(costs)
    norm_s = sync.ring_s(NORM_BYTES, plan.device_names)
    return max(longest_s, *busy_s.values()) + optimizer_s + sync.exposed_of_plan_s(plan) + norm_s


def total_s(costs: PipelineCosts, pipeline: Pipeline, device: Device, start: int, stop: int) -> float:
    """Seconds of forward and backward of all samples of a pipeline."""
    whole, rest = divmod(pipeline.num_samples, pipeline.microbatch_size)
    seconds = whole * costs.busy_s(device, start, stop, pipeline.microbatch_size)
    return seconds + (costs.busy_s(device, start, stop, rest) if rest else 0.0)


def _makespan_s(costs: PipelineCosts, pipeline: Pipeline, total_s: Sequence[float]) -> float:
    """Z of a pipeline as if its devices served nothing else."""
    layout, samples = costs.layout(pipeline), pipeline.microbatch_size
    busy, hops, _ = costs.busy_and_links(layout, samples)
    return makespan_bound_s(
        busy,
        hops,
        pipeline.num_microbatches,
        total_s=total_s,
        link_rest_s=costs.busy_and_links(layout, pipeline.num_samples - samples)[2],
        in_flight=[pipeline.in_flight(stage) for stage in range(len(layout))],
    )


def variants(costs: PipelineCosts, plan: Plan) -> Iterator[Plan]:
    """A plan of one pipeline with other in_flight, each within memory.

    One and two more, fewer, and all as in GPipe.
    """
    (pipeline,) = plan.pipelines
    layout, samples = costs.layout(pipeline), pipeline.microbatch_size
    flights = [stage.in_flight for stage in pipeline.stages]
    num_stages, num_microbatches = len(flights), costs.num_microbatches(samples)
    wanted = (
        flights,
        [flight + 1 for flight in flights[:-1]] + flights[-1:],
        [flight + 2 for flight in flights[:-1]] + flights[-1:],
        [num_stages - stage for stage in range(num_stages)],
        [num_microbatches] * num_stages,
    )
    caps = costs.caps(layout, samples)
    for flight in dict.fromkeys(cap_in_flight(entry, caps) for entry in wanted):
        yield costs.plan(plan.strategy, layout, samples, flight)
