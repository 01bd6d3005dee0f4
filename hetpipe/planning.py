"""Planning with the simulator's verdict: ties `partition`'s search to the instruction lists that will run."""

import dataclasses
import gc
from collections.abc import Iterator
from contextlib import contextmanager

from cost_model.cluster import Cluster
from cost_model.communication import Network
from cost_model.profile import ModelProfile
from hetpipe.costs import ProgramCosts
from hetpipe.instructions import Program
from hetpipe.lowering import gradient_buckets, lower, with_collectives
from hetpipe.simulator import simulate
from hetpipe.step_clock import StepTimes, has_clock, step_times
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
    return evaluator(profile, cluster)(plan)


def evaluator(profile: ModelProfile, cluster: Cluster) -> Evaluate:
    """The verdict that `partition.solver` asks for; remembers what it was asked."""
    network = Network(cluster, profile.links, profile.all_reduces)
    known: dict[Plan, Prediction] = {}

    def evaluate(plan: Plan) -> Prediction:
        key = dataclasses.replace(plan, strategy="", predicted=None, profile_sha256=None, cluster_sha256=None)
        if key not in known:
            known[key] = _prediction(plan, profile, _step_times(plan, profile, cluster, network))
        return known[key]

    return evaluate


def _step_times(plan: Plan, profile: ModelProfile, cluster: Cluster, network: Network) -> StepTimes:
    if not has_clock(plan):
        trace = simulate_plan(plan, profile, cluster)
        return StepTimes(trace.makespan_s, tuple(map(trace.busy_s, range(len(trace.device_names)))))
    with _collector_paused():
        buckets = with_collectives(plan, gradient_buckets(plan, profile), profile, network)
        return step_times(ProgramCosts(Program(plan, buckets, ()), profile, cluster, network))


def _prediction(plan: Plan, profile: ModelProfile, times: StepTimes) -> Prediction:
    step_s = times.step_s
    devices = {
        name: DevicePrediction(
            memory_bytes=plan.memory(profile, name).total_bytes, busy=busy_s / step_s if step_s else 0.0
        )
        for name, busy_s in zip(plan.device_names, times.busy_s, strict=True)
    }
    rate = plan.global_batch_size / step_s if step_s else float("inf")
    return Prediction(step_s=step_s, samples_per_s=rate, bubble=times.bubble, devices=devices)
