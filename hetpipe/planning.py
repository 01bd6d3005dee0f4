"""Planning with the simulator's verdict: ties `partition`'s search to the instruction lists that will run."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from cost_model.cluster import Cluster
from cost_model.profile import ModelProfile
from hetpipe.costs import ProgramCosts
from hetpipe.instructions import Program, Schedule
from hetpipe.lowering import choose_schedule, lower
from hetpipe.schedule_choice import Choice
from hetpipe.simulator import simulate
from hetpipe.trace import Trace
from partition.plan import DevicePrediction, Plan, Prediction, check_plan
from partition.problem import Evaluate


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
    with _collector_paused():
        return _prediction(lower(plan, profile, cluster), profile, cluster)


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
        figures = _prediction(choice.program, profile, cluster)
    if (old := plan.predicted) is not None:
        figures = replace(
            figures,
            bound_s=old.bound_s,
            bound_space=old.bound_space,
            fractional_bound_s=old.fractional_bound_s,
        )
    return replace(choice.program.plan, predicted=figures), choice


def _prediction(program: Program, profile: ModelProfile, cluster: Cluster) -> Prediction:
    trace, plan = simulate(ProgramCosts(program, profile, cluster)), program.plan
    step_s = trace.makespan_s
    devices = {
        name: DevicePrediction(
            memory_bytes=plan.memory(profile, name).total_bytes,
            busy=trace.busy_s(rank) / step_s if step_s else 0.0,
        )
        for rank, name in enumerate(trace.device_names)
    }
    rate = plan.global_batch_size / step_s if step_s else float("inf")
    return Prediction(step_s=step_s, samples_per_s=rate, bubble=trace.bubble, devices=devices)


def evaluator(profile: ModelProfile, cluster: Cluster) -> Evaluate:
    """The verdict that `partition.solver` asks for."""

    def evaluate(plan: Plan) -> Prediction:
        return predict(plan, profile, cluster)

    return evaluate
