"""The drafts of a strategy whose pipelines share devices, and the best plan of them."""

import math
from dataclasses import replace

from cost_model.errors import InfeasibleError
from partition.baselines.strategy import TooManyDevicesError, least_of, shortfall
from partition.estimates.pipeline_costs import PipelineCosts
from partition.estimates.ranking import best_plan, instructions
from partition.estimates.shared_pipelines import Draft, SharedPipelineCosts
from partition.estimates.step_estimate import StepEstimate
from partition.plan import Plan
from partition.problem import Evaluate, Problem

LEAST = ", even with one microbatch of each pipeline in flight"


class Drafts:
    """The plans that came of a strategy's drafts, with their estimates, and what others lack."""

    def __init__(self, strategy: str, problem: Problem) -> None:
        self.costs = PipelineCosts(problem)
        self._strategy, self._problem = strategy, problem
        self._shared, self._estimate = SharedPipelineCosts(self.costs), StepEstimate(self.costs)
        self._estimated: list[tuple[float, Plan]] = []
        self._errors: list[InfeasibleError] = []

    def enter(self, draft: Draft) -> float:
        """Enter the plans of a draft; return the seconds of the best, inf where memory takes none."""
        made = [(seconds, self._named(plan)) for seconds, plan in self._shared.plans(draft)]
        if not made:
            plan = self._named(self._one_in_flight(draft))
            lacking = shortfall(self._problem, plan, LEAST)
            if lacking is not None:
                self._errors.append(lacking)
                return math.inf
            made = [(self._estimate.estimate_s(plan), plan)]
        self._estimated += made
        return min(seconds for seconds, _ in made)

    def enter_plan(self, plan: Plan) -> None:
        """Enter a plan that another rule has made, and that fits."""
        self._estimated.append((self._estimate.estimate_s(plan), self._named(plan)))

    @property
    def plans(self) -> list[Plan]:
        """The plans that fit, those of least estimate first."""
        return [plan for _, plan in sorted(self._estimated, key=lambda entry: entry[0])]

    def best(self, evaluate: Evaluate | None) -> Plan:
        """Return the best plan; of the two of least estimate, if the simulator is given.

        Raises: InfeasibleError of the draft that lacks least, if memory took none; TooManyDevicesError if the
            simulator takes minutes for the plan.
        """
        if not self._estimated:
            raise least_of(self._strategy, self._errors)
        if evaluate is not None and (count := instructions(self.plans[0])) > MOST_INSTRUCTIONS:
            raise TooManyDevicesError(
                f"{self._strategy}: a step of its plan is some {count:,} instructions, and such plans are "
                f"simulated up to {MOST_INSTRUCTIONS:,}, since more take minutes; exclude devices, give "
                "fewer samples a step, or let `auto` choose"
            )
        return best_plan(self._problem, evaluate, self._estimated)

    def _named(self, plan: Plan) -> Plan:
        return replace(plan, strategy=self._strategy)

    def _one_in_flight(self, draft: Draft) -> Plan:
        """Return the plan of a draft that needs least memory; all are in flight where nothing goes back."""
        first_trained = self.costs.prices.first_trained
        pipelines = (
            each.planned(
                [1 if stage.stop > first_trained else each.num_microbatches for stage in each.stages],
                self.costs,
            )
            for each in draft
        )
        return self._problem.plan(self._strategy, tuple(pipelines))


MOST_DEVICES = 32
MOST_INSTRUCTIONS = 1_000_000


def check_few_devices(strategy: str, problem: Problem) -> None:
    """Check that plans whose pipelines share devices are simulated in the time that one waits.

    Raises: TooManyDevicesError above MOST_DEVICES.
    """
    count = len(problem.cluster.devices)
    if count > MOST_DEVICES:
        raise TooManyDevicesError(
            f"{strategy}: {count:,} devices; its pipelines share devices, and such plans are made for "
            f"at most {MOST_DEVICES}, since simulating more takes long; exclude "
            f"{count - MOST_DEVICES:,} or let `auto` choose"
        )
