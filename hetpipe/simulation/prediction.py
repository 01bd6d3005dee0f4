"""What a plan is expected to do: lowered and simulated once, then passed on; and what planners ask."""

import dataclasses
import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from cost_model.cluster import Cluster
from cost_model.layer_costs import Prices
from cost_model.network import Network
from cost_model.profile import ModelProfile
from hetpipe.program.costs import ProgramCosts
from hetpipe.program.gradient_buckets import gradient_buckets, with_collectives
from hetpipe.program.instructions import Program, Schedule
from hetpipe.program.trace import Trace
from hetpipe.simulation.collective_selection import with_best_collectives
from hetpipe.simulation.fast_simulator import MANY, StepTimes, has_clock, num_computations, step_times
from hetpipe.simulation.schedule_selection import Choice, choose_schedule, lower
from hetpipe.simulation.simulator import simulate
from partition.estimates.plan_memory import plan_memories
from partition.plan import DeviceFigures, Figures, Plan
from partition.problem import Evaluate, check_plan, problem_of_plan

LOADED_AFTER, WORTH_IT = 300_000, 2_000
"""Computations that an evaluator has simulated from which on it compiles the loop, for plans of so many."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """A plan under a schedule: the choice of it, the costs of its program, the simulated step, its figures.

    plan: as it runs, with the in_flight of the schedule and with the figures.
    """

    plan: Plan
    choice: Choice
    costs: ProgramCosts
    trace: Trace
    figures: Figures

    @property
    def program(self) -> Program:
        """What every rank runs."""
        return self.choice.program

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.figures.step_s

    @property
    def samples_per_s(self) -> float:
        """Samples of all devices together in a second."""
        return self.figures.samples_per_s

    @property
    def bubble(self) -> float:
        """Idle share of the makespan over the devices used, in [0, 1]."""
        return self.figures.bubble

    @property
    def devices(self) -> Mapping[str, DeviceFigures]:
        """Bytes and busy share of each device by name."""
        return self.figures.devices


def predict(
    plan: Plan, profile: ModelProfile, cluster: Cluster, schedule: Schedule | None = None
) -> Prediction:
    """Return what a plan is expected to do under a schedule, None for `default_schedule`.

    A bound that the plan has is kept if it was made from this profile and cluster; `with_bound` computes one.
    Whether the program fits the devices is for `verify` to say.

    Raises: InputError if the plan is not for the profile or the cluster, or the schedule not for the plan.
    """
    check_plan(plan, profile, cluster)
    choice = choose_schedule(plan, profile, cluster, schedule)
    costs = ProgramCosts(choice.program, profile, cluster)
    with _collector_paused():
        trace = choice.trace or simulate(costs)
    figures = _figures(choice.program.plan, _times_of(trace), profile, cluster)
    if (known := plan.predicted) is not None and _made_from(plan, profile, cluster):
        figures = dataclasses.replace(
            figures,
            bound_s=known.bound_s,
            bound_space=known.bound_space,
            fractional_bound_s=known.fractional_bound_s,
            bound_without=known.bound_without,
        )
    plan = dataclasses.replace(choice.program.plan, predicted=figures)
    return Prediction(plan, choice, costs, trace, figures)


def _made_from(plan: Plan, profile: ModelProfile, cluster: Cluster) -> bool:
    """Return whether what a plan says it was made from is this, as far as it says it."""
    return plan.profile_sha256 in (None, profile.sha256) and plan.cluster_sha256 in (None, cluster.sha256)


def simulate_plan(
    plan: Plan, profile: ModelProfile, cluster: Cluster, schedule: Schedule | None = None
) -> Trace:
    """Return the predicted trace of one step of a plan; as `predict`."""
    return predict(plan, profile, cluster, schedule).trace


def with_bound(prediction: Prediction, profile: ModelProfile, cluster: Cluster) -> Prediction:
    """Return a prediction with the hashes of profile and cluster, and with a bound.

    That of the plan where it was made from this profile and cluster and has one, else a fractional one. None
    is computed where a kind of the cluster was not profiled.
    """
    plan = prediction.plan
    if prediction.figures.bound_s is not None and plan.profile_sha256 and plan.cluster_sha256:
        return prediction
    if all(device.kind in profile.kinds for device in cluster.devices):
        from partition.bounds.best_bound import Bound, bound_space, fractional_bound_s
        from partition.solver import with_figures

        problem = problem_of_plan(plan, profile, cluster)
        bound = Bound(fractional_bound_s(problem), bound_space(problem))
        plan = with_figures(plan, problem, prediction.figures, bound)
    else:
        plan = dataclasses.replace(plan, profile_sha256=profile.sha256, cluster_sha256=cluster.sha256)
    assert plan.predicted is not None
    return dataclasses.replace(prediction, plan=plan, figures=plan.predicted)


def evaluator(profile: ModelProfile, cluster: Cluster) -> Evaluate:
    """Return the function that gives `partition.solver` the figures of candidates, and remembers them."""
    network, prices = Network(cluster, profile.links, profile.all_reduces), Prices(profile)
    known: dict[Plan, Figures] = {}
    simulated = 0  # computations

    def evaluate(plan: Plan) -> Figures:
        nonlocal simulated
        key = dataclasses.replace(plan, strategy="", predicted=None, profile_sha256=None, cluster_sha256=None)
        if key not in known:
            simulated += num_computations(plan)
            many = WORTH_IT if simulated > LOADED_AFTER else MANY
            running = _running(plan, cluster, network, prices, many=many)
            known[key] = _figures(*running, profile, cluster)
        return known[key]

    return evaluate


def _running(
    plan: Plan, cluster: Cluster, network: Network, prices: Prices, *, many: int
) -> tuple[Plan, StepTimes]:
    """Return the plan as it runs under the default schedule, and the times of its step."""
    profile = prices.profile
    with _collector_paused():
        if not has_clock(plan):
            program = lower(plan, profile, cluster)
            costs = ProgramCosts(program, profile, cluster, network, prices)
            return program.plan, _times_of(simulate(costs))
        buckets = with_collectives(plan, gradient_buckets(plan, profile), profile, network, prices=prices)
        program = Program(plan, buckets, (), first_trained=profile.first_trained)
        costs = ProgramCosts(program, profile, cluster, network, prices)
        _, times = with_best_collectives(costs, many=many)
        return plan, times or step_times(costs, many=many)


def _times_of(trace: Trace) -> StepTimes:
    return StepTimes(trace.makespan_s, tuple(map(trace.busy_s, range(len(trace.device_names)))))


def _figures(plan: Plan, times: StepTimes, profile: ModelProfile, cluster: Cluster) -> Figures:
    step_s, memories = times.step_s, plan_memories(plan, profile, cluster)
    devices = {
        name: DeviceFigures(memory_bytes=memories[name].total_bytes, busy=busy_s / step_s if step_s else 0.0)
        for name, busy_s in zip(plan.device_names, times.busy_s, strict=True)
    }
    rate = plan.global_batch_size / step_s if step_s else float("inf")
    return Figures(step_s=step_s, samples_per_s=rate, bubble=times.bubble, devices=devices)


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Search for no cycles of references: a million instructions have none, and it adds a quarter."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
