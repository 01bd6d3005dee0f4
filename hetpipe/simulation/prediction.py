"""Planning with the simulator's verdict: ties `partition`'s search to the instruction lists that will run."""

import dataclasses
import gc
from collections.abc import Iterator
from contextlib import contextmanager

from cost_model.cluster import Cluster
from cost_model.network import Network
from cost_model.profile import ModelProfile
from hetpipe.program.costs import ProgramCosts
from hetpipe.program.gradient_buckets import gradient_buckets, with_collectives
from hetpipe.program.instructions import Program, Schedule
from hetpipe.program.trace import Trace
from hetpipe.simulation.fast_simulator import StepTimes, has_clock, step_times
from hetpipe.simulation.schedule_selection import Choice, choose_schedule, lower
from hetpipe.simulation.simulator import simulate
from partition.plan import DevicePrediction, Plan, Prediction, check_plan
from partition.problem import Evaluate, problem_of_plan


def simulate_plan(
    plan: Plan, profile: ModelProfile, cluster: Cluster, schedule: Schedule | None = None
) -> Trace:
    """The predicted trace of one step of a plan."""
    with _collector_paused():
        return simulate(ProgramCosts(lower(plan, profile, cluster, schedule), profile, cluster))


@contextmanager
def _collector_paused() -> Iterator[None]:
    """No search for cycles of references: a million instructions have none, and it adds a quarter."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def predict(plan: Plan, profile: ModelProfile, cluster: Cluster) -> Prediction:
    """What a plan is expected to do, without a bound."""
    return evaluator(profile, cluster)(plan)


def scheduled(
    plan: Plan, profile: ModelProfile, cluster: Cluster, schedule: Schedule | None = None
) -> tuple[Plan, Choice]:
    """The plan as it runs under a schedule, in_flight and figures with it, its bound kept; and the choice.

    schedule: None is `default_schedule`.

    Whether memory takes it is for `verify` to say.

    Raises: InputError if the schedule is not for the plan.
    """
    check_plan(plan, profile, cluster)
    choice = choose_schedule(plan, profile, cluster, schedule)
    with _collector_paused():
        trace = simulate(ProgramCosts(choice.program, profile, cluster))
    figures = _prediction(choice.program.plan, _times_of(trace), profile)
    if (old := plan.predicted) is not None:
        figures = dataclasses.replace(
            figures,
            bound_s=old.bound_s,
            bound_space=old.bound_space,
            fractional_bound_s=old.fractional_bound_s,
        )
    return dataclasses.replace(choice.program.plan, predicted=figures), choice


def evaluator(profile: ModelProfile, cluster: Cluster) -> Evaluate:
    """The verdict that `partition.solver` asks for; remembers what it was asked."""
    network = Network(cluster, profile.links, profile.all_reduces)
    known: dict[Plan, Prediction] = {}

    def evaluate(plan: Plan) -> Prediction:
        key = dataclasses.replace(plan, strategy="", predicted=None, profile_sha256=None, cluster_sha256=None)
        if key not in known:
            known[key] = _prediction(*_running(plan, profile, cluster, network), profile)
        return known[key]

    return evaluate


def _running(plan: Plan, profile: ModelProfile, cluster: Cluster, network: Network) -> tuple[Plan, StepTimes]:
    """The plan as it runs under the default schedule, and the times of its step."""
    with _collector_paused():
        if not has_clock(plan):
            program = lower(plan, profile, cluster)
            return program.plan, _times_of(simulate(ProgramCosts(program, profile, cluster)))
        buckets = with_collectives(plan, gradient_buckets(plan, profile), profile, network)
        return plan, step_times(ProgramCosts(Program(plan, buckets, ()), profile, cluster, network))


def _times_of(trace: Trace) -> StepTimes:
    return StepTimes(trace.makespan_s, tuple(map(trace.busy_s, range(len(trace.device_names)))))


def _prediction(plan: Plan, times: StepTimes, profile: ModelProfile) -> Prediction:
    step_s = times.step_s
    devices = {
        name: DevicePrediction(
            memory_bytes=plan.memory(profile, name).total_bytes, busy=busy_s / step_s if step_s else 0.0
        )
        for name, busy_s in zip(plan.device_names, times.busy_s, strict=True)
    }
    rate = plan.global_batch_size / step_s if step_s else float("inf")
    return Prediction(step_s=step_s, samples_per_s=rate, bubble=times.bubble, devices=devices)


def figured(
    plan: Plan, profile: ModelProfile, cluster: Cluster, schedule: Schedule | None = None
) -> tuple[Plan, Choice]:
    """A given plan as it runs under a schedule, with its predicted figures, and with a bound if all kinds of
    the cluster were profiled; and the choice of the schedule."""
    plan, choice = scheduled(plan, profile, cluster, schedule)
    assert plan.predicted is not None
    figures = plan.predicted
    if all(device.kind in profile.kinds for device in cluster.devices):
        from partition.bounds.best_bound import Bound, bound_space, fractional_bound_s
        from partition.solver import with_figures

        problem = problem_of_plan(plan, profile, cluster)
        bound = Bound(fractional_bound_s(problem), bound_space(problem))
        return with_figures(plan, problem, lambda _: figures, bound), choice
    plan = dataclasses.replace(plan, profile_sha256=profile.sha256, cluster_sha256=cluster.sha256)
    return plan, choice
