"""Planning with the simulator's verdict: ties `partition`'s search to the instruction lists that will run."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from cost_model.cluster import Cluster
from cost_model.profile import ModelProfile
from hetpipe.costs import ProgramCosts
from hetpipe.lowering import lower
from hetpipe.simulator import simulate
from hetpipe.trace import Trace
from partition.plan import DevicePrediction, Plan, Prediction
from partition.problem import Evaluate


def simulate_plan(plan: Plan, profile: ModelProfile, cluster: Cluster) -> Trace:
    """The predicted trace of one step of a plan."""
    with _collector_paused():
        return simulate(ProgramCosts(lower(plan, profile, cluster), profile, cluster))


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
    trace = simulate_plan(plan, profile, cluster)
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
