"""Which of some plans is best: by the simulator, or by a closed-form estimate where none is given.

The family of estimates, each as cheap as its caller needs it. Only the simulator's seconds are shown to a
user.

- Z (`closed_forms.makespan_bound_s`): one pipeline, from the seconds of its stages and links.
- `PipelineTiming`: of the stages of any pipeline. `bound_s`: Z of its samples. `quick_s`: Z of equal
  microbatches with all in flight that fits, for cuts and orders. `time_s`: the clock of 1F1B for any number
  of samples, by which samples are shared out. None knows a plan, so neither gradient sync nor norm.
- `StepEstimate.estimate_s`: a step of any plan, from the timings of its pipelines.
- `StepEstimate.least_s` and `interleaved._least_s`: bounds, not estimates; a plan above them needs no
  simulation.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain

from partition.estimates.effort import ChoiceEffort
from partition.estimates.pipeline_costs import PipelineCosts
from partition.estimates.plan_memory import plan_memories
from partition.estimates.step_estimate import StepEstimate, shares_devices
from partition.estimates.weight_gathers import gathers_s
from partition.plan import Plan
from partition.problem import Evaluate, Problem

NUM_KEPT = 3  # plans of each number of pipelines that a ranking remembers
NUM_EVALUATED = 2  # plans of a baseline, least estimates first, that the simulator chooses between
TOLERANCE = 1e-9  # relative, of a bound: rounding
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
        self._step_s = _simulated(evaluate) if evaluate else StepEstimate(PipelineCosts(problem)).estimate_s
        self._keys: dict[object, tuple[float, Rank]] = {}
        self._of_number: dict[int, list[Plan]] = {}
        self._kinds = {device.name: device.kind for device in problem.cluster.devices}

    def __call__(self, plan: Plan) -> tuple[float, Rank]:
        key = (plan.pipelines, plan.zero, plan.state_owners, plan.owner_ranges, plan.layer_zero)
        if key not in self._keys:
            self._keys[key] = own = (_rounded(self._step_s(plan)), rank(plan))
            if math.isfinite(own[0]):
                self._keep(plan)
        return self._keys[key]

    def near(self, step_s: float, most: int) -> list[Plan]:
        """Return the best plans, of each number of pipelines a few, as far as they are within a step."""
        ranked = sorted(chain.from_iterable(self._of_number.values()), key=self)[:most]
        return [plan for plan in ranked if self(plan)[0] <= step_s]

    def _keep(self, plan: Plan) -> None:
        """Remember a plan if it is one of the best unlike ones of its number of pipelines."""
        best = self._of_number.setdefault(len(plan.pipelines), [])
        if len(best) < NUM_KEPT or self(plan) < self(best[-1]):
            alike = next((other for other in best if self._stages(other) == self._stages(plan)), None)
            if alike is None or self(plan) < self(alike):
                others = [other for other in best if other is not alike]
                best[:] = sorted([*others, plan], key=self)[:NUM_KEPT]

    def _stages(self, plan: Plan) -> Counter[object]:
        """Return the pipelines of a plan by the kinds of their devices and the layers of these."""
        kind = self._kinds
        return Counter(
            tuple((kind[stage.device], stage.layers) for stage in pipeline.stages)
            for pipeline in plan.pipelines
        )


def _simulated(evaluate: Evaluate) -> Callable[[Plan], float]:
    return lambda plan: evaluate(plan).step_s


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.9e}")


class Contest:
    """The best plan so far, of sources that enter their plans one after the other.

    step_s is the best plan's step, inf while there is none.
    """

    def __init__(self, ranking: Ranking, costs: PipelineCosts, effort: ChoiceEffort) -> None:
        self.ranking, self._effort = ranking, effort
        self._estimate, self._costs = StepEstimate(costs), costs
        self.best: Plan | None = None
        self.step_s = math.inf

    def _allows(self, plan: Plan) -> bool:
        """Return whether a plan is as the user wants it; and fits, where all outputs of a stage wait."""
        problem = self._costs.problem
        if not problem.forced.allows(plan):
            return False
        if not self._costs.prices.first_trained:
            return True  # made to fit
        memories = plan_memories(plan, problem.profile, problem.cluster)
        return all(
            memory.total_bytes <= problem.cluster.device(name).usable_bytes
            for name, memory in memories.items()
        )

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
        for index, plan in enumerate(filter(self._allows, plans)):
            weight = instructions(plan)
            if index >= (1 if weight > effort.heavy_instructions else least) and weight > budget:
                continue
            if self._estimate.least_s(plan) > self.step_s * (1 + TOLERANCE):
                continue
            if gathers_s(plan, self._costs) > self.step_s:
                continue
            if lost == most_lost:
                break
            budget -= weight
            lost = lost + 1 if self.ranking(plan)[0] > effort.clearly * self.step_s else 0
            self.enter_all([plan])

    def enter_all(self, plans: Iterable[Plan]) -> None:
        """Simulate plans whatever they take."""
        for plan in filter(self._allows, plans):
            if self.best is None or self.ranking(plan) < self.ranking(self.best):
                self.best, self.step_s = plan, self.ranking(plan)[0]


def instructions(plan: Plan) -> int:
    """Return about how many instructions the simulator runs through, or could in its time for the plan."""
    count = sum(pipeline.num_microbatches * (6 * len(pipeline.stages) - 4) for pipeline in plan.pipelines)
    return count if shares_devices(plan) else count // QUICK


def by_estimate(costs: PipelineCosts, plans: Iterable[Plan]) -> list[Plan]:
    """Return plans, least estimate first."""
    return sorted(plans, key=StepEstimate(costs).estimate_s)


def best_plan(problem: Problem, evaluate: Evaluate | None, estimated: Iterable[tuple[float, Plan]]) -> Plan:
    """Return the plan of least estimate (seconds); with evaluate, of the two least the best one."""
    ranked = sorted(estimated, key=lambda pair: (_rounded(pair[0]), rank(pair[1])))
    near = [plan for _, plan in ranked[:NUM_EVALUATED]]
    return min(near, key=Ranking(problem, evaluate)) if evaluate else near[0]


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
    ((timed, _),) = StepEstimate(costs).timed(plan)
    within = partial(timed.timing.within_memory, num_microbatches)
    for flight in dict.fromkeys(map(within, wanted)):
        yield costs.plan(plan.strategy, layout, samples, flight)
