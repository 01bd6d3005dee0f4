"""Which of some plans is best: by the simulator, or by a closed-form estimate where none is given.

The family of estimates, each as cheap as its caller needs it. Only the simulator's seconds are shown to a
user.

- Z (`closed_forms.makespan_bound_s`): one pipeline, from the seconds of its stages and links. All others
  but the one for shared devices are made of it.
- `PipelineCosts.makespan_s`: Z of one pipeline that does the batch, with the sums of tied weights, the norm
  and the optimizer. `bound_of_pipeline_s`: Z alone, of a pipeline of several.
- `estimate_s` (here): a step of any plan. Of one pipeline `makespan_s`; of several with gradient sync, and
  with the loads of devices that serve several stages.
- `PipelineTiming.quick_s`: Z of equal microbatches with all in flight that fits, for cuts and orders.
  `PipelineTiming.time_s`: the clock of 1F1B, for any number of samples, by which samples are shared out.
  Both know no plan and no batch, so neither gradient sync nor norm.
- `SharedPipelineCosts.plans`: pipelines of which several visit a device, by the loads of devices: what a
  device waits in one pipeline it computes for another, so that Z of each alone says little.
- `busy_s` (here) and `interleaved._least_s`: bounds, not estimates; a plan above them needs no simulation.

What is left apart gives other plans if it is merged.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from cost_model.cluster import Device
from cost_model.memory import trained_bytes
from cost_model.network import NORM_BYTES
from partition.estimates.closed_forms import cap_in_flight
from partition.estimates.effort import ChoiceEffort
from partition.estimates.gradient_sync import SyncCosts
from partition.estimates.pipeline_costs import PipelineCosts
from partition.plan import Pipeline, Plan
from partition.problem import Evaluate, Problem

NUM_EVALUATED = 2  # plans of a baseline, least estimates first, that the simulator chooses between
QUICK = 20  # times as fast, instruction by instruction, are plans whose devices serve one stage each

Rank = tuple[int, tuple[str, ...], tuple[tuple[int, ...], ...]]


def rank(plan: Plan) -> Rank:
    """Return what breaks ties, on all machines alike: fewer devices, then names, then numbers."""
    numbers = tuple(
        (pipeline.microbatch_size, pipeline.num_samples, *stage.layers, stage.in_flight)
        for pipeline in plan.pipelines
        for stage in pipeline.stages
    )
    return (len(plan.device_names), plan.device_names, numbers)


class Ranking:
    """A sort key of plans: seconds of a step, then `rank`; remembers what it was asked.

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


class Contest:
    """The best plan so far, of sources that enter their plans one after the other.

    step_s is the best plan's step, inf while there is none.
    """

    def __init__(self, ranking: Ranking, costs: PipelineCosts, effort: ChoiceEffort) -> None:
        self._ranking, self._costs, self._effort = ranking, costs, effort
        self.best: Plan | None = None
        self.step_s = math.inf

    def enter(
        self, plans: Iterable[Plan], *, always: int | None = None, most_lost: int | None = None
    ) -> None:
        """Simulate plans of one source, likely ones first, as far as effort goes and they may win.

        always: how many are simulated whatever they take; None: as effort has it. most_lost: after so many in
        a row that are clearly worse the rest is left, as likely to be.
        """
        effort = self._effort
        budget, lost = effort.most_instructions, 0
        least = effort.always_simulated if always is None else always
        for index, plan in enumerate(filter(self._costs.problem.forced.allows, plans)):
            weight = instructions(plan)
            if index >= (1 if weight > effort.heavy_instructions else least) and weight > budget:
                continue
            if max(busy_s(self._costs, plan).values()) > self.step_s:
                continue
            if lost == most_lost:
                break
            budget -= weight
            lost = lost + 1 if self._ranking(plan)[0] > effort.clearly * self.step_s else 0
            self.enter_all([plan])

    def enter_all(self, plans: Iterable[Plan]) -> None:
        """Simulate plans whatever they take."""
        for plan in filter(self._costs.problem.forced.allows, plans):
            if self.best is None or self._ranking(plan) < self._ranking(self.best):
                self.best, self.step_s = plan, self._ranking(plan)[0]


def instructions(plan: Plan) -> int:
    """Return about how many instructions the simulator runs through, or could in its time for the plan."""
    count = sum(pipeline.num_microbatches * (6 * len(pipeline.stages) - 4) for pipeline in plan.pipelines)
    alone = sum(len(pipeline.stages) for pipeline in plan.pipelines) == len(plan.device_names)
    return count // QUICK if alone else count


def by_estimate(costs: PipelineCosts, plans: Iterable[Plan]) -> list[Plan]:
    """Return plans, least estimate first."""
    return sorted(plans, key=lambda plan: estimate_s(costs, plan))


def best_plan(problem: Problem, evaluate: Evaluate | None, estimated: Iterable[tuple[float, Plan]]) -> Plan:
    """Return the plan of least estimate (seconds); with evaluate, of the two least the best one."""
    ranked = sorted(estimated, key=lambda pair: (_rounded(pair[0]), rank(pair[1])))
    near = [plan for _, plan in ranked[:NUM_EVALUATED]]
    return min(near, key=Ranking(problem, evaluate)) if evaluate else near[0]


def estimate_s(costs: PipelineCosts, plan: Plan) -> float:
    """Return the closed-form seconds of a step of any plan.

    Of several pipelines: the longest Z, or the busiest device if that is longer, and after it the longest
    optimizer step, the gradient sync of the device that has most of it, and the norm. Nothing overlaps.
    """
    if len(plan.pipelines) == 1 and len(plan.device_names) == len(plan.pipelines[0].stages):
        (pipeline,) = plan.pipelines
        flights = [stage.in_flight for stage in pipeline.stages]
        return costs.makespan_s(costs.layout(pipeline), pipeline.microbatch_size, flights)
    cluster, optimizer_s = costs.problem.cluster, 0.0
    whole = trained_bytes(costs.problem.profile, range(plan.num_layers))
    for name in plan.device_names:
        layers, device = plan.layers_of(name), cluster.device(name)
        per_byte = costs.problem.profile.kind(device.kind).optimizer_s_per_byte / device.speed
        if per_byte * whole > optimizer_s:  # else even all layers would not be longer
            optimizer_s = max(optimizer_s, costs.prices.optimizer_s(device, layers))
    sync = SyncCosts(costs)
    norm_s = sync.ring_s(NORM_BYTES, plan.device_names)
    pipelines_s = max(costs.bound_of_pipeline_s(pipeline) for pipeline in plan.pipelines)
    longest_s = max(pipelines_s, *busy_s(costs, plan).values())
    return longest_s + optimizer_s + sync.exposed_of_plan_s(plan) + norm_s


def busy_s(costs: PipelineCosts, plan: Plan) -> dict[str, float]:
    """Return the seconds for which each device computes in a step: none is shorter than the most of them."""
    seconds: dict[str, float] = {}
    for pipeline in plan.pipelines:
        for device, start, stop in costs.layout(pipeline):
            spent = total_s(costs, pipeline, device, start, stop)
            seconds[device.name] = seconds.get(device.name, 0.0) + spent
    return seconds


def total_s(costs: PipelineCosts, pipeline: Pipeline, device: Device, start: int, stop: int) -> float:
    """Return the seconds of forward and backward of all samples of a pipeline."""
    return costs.total_s(device, start, stop, pipeline.microbatch_size, pipeline.num_samples)


def variants(costs: PipelineCosts, plan: Plan) -> Iterator[Plan]:
    """Give a plan of one pipeline with other in_flight, each within memory.

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
    for flight in dict.fromkeys(cap_in_flight(flights, caps) for flights in wanted):
        yield costs.plan(plan.strategy, layout, samples, flight)
