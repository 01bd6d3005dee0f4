"""Where the gain over the best other strategy comes from: from balanced computation, or from memory."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cost_model.errors import InfeasibleError
from cost_model.profile import ModelProfile
from partition.auto import auto
from partition.baselines.catalogue import BASELINES
from partition.baselines.strategy import TooManyDevicesError
from partition.exact.chain_search import AUTO
from partition.problem import Evaluate, Forced, Problem
from partition.solver import Outcome


@dataclass(frozen=True, slots=True)
class Gain:
    """The gain of `auto` over the best of the other strategies compared that fits, as ratios of step times.

    total = balance x memory. balance: what it would be if every device had memory for everything. memory: the
    rest. Where no other strategy fits, over, total and memory are None: all of it is memory's.
    """

    balance: float
    over: str | None = None
    total: float | None = None

    @property
    def memory(self) -> float | None:
        return None if self.total is None else self.total / self.balance

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "memory": self.memory}


def best_other(outcomes: Sequence[Outcome]) -> str | None:
    """Return the fastest strategy that fits, beside `auto`."""
    steps = step_seconds(outcomes)
    return min((name for name in steps if name != AUTO), key=steps.__getitem__, default=None)


def step_seconds(outcomes: Sequence[Outcome]) -> Mapping[str, float]:
    """Return predicted seconds of a step, by strategy, of those that fit."""
    return {
        outcome.strategy: outcome.plan.predicted.step_s
        for outcome in outcomes
        if outcome.plan is not None and outcome.plan.predicted is not None
    }


def gain(problem: Problem, evaluate: Evaluate, outcomes: Sequence[Outcome]) -> Gain | None:
    """Return the gain of `auto` among the outcomes; None where there is nothing to tell.

    That is where it has no plan, nothing is beside it, or steps take no time. With ample memory no
    constraints of the user apply.
    """
    steps = step_seconds(outcomes)
    if not steps.get(AUTO):
        return None
    ample = with_ample_memory(problem)
    others_s = []
    for name in sorted({outcome.strategy for outcome in outcomes} & BASELINES.keys()):
        try:
            others_s.append(evaluate(BASELINES[name](ample, evaluate)).step_s)
        except (InfeasibleError, TooManyDevicesError):
            continue
    if not others_s:
        return None
    balance = min(others_s) / evaluate(auto(ample, evaluate)).step_s
    over = best_other(outcomes)
    return Gain(balance, over, None if over is None else steps[over] / steps[AUTO])


def _ample_bytes(problem: Problem, profile: ModelProfile) -> float:
    """Return no less than the whole model needs on one device with every sample in flight."""
    states = sum(layer.parameter_bytes for layer in profile.layers)
    sample = sum(layer.saved_bytes_per_sample + 2 * layer.output_bytes_per_sample for layer in profile.layers)
    rest = sum(layer.workspace_at(max(problem.microbatch_sizes)) for layer in profile.layers)
    copies = 2 + profile.optimizer_bytes_per_parameter_byte
    needed = states * copies + rest + sum(layer.lowered_bytes for layer in profile.layers)
    return needed + 2 * problem.global_batch_size * sample


def with_ample_memory(problem: Problem) -> Problem:
    """Return the problem on devices that hold the whole model with every sample in flight."""
    needed = max(_ample_bytes(problem, problem.profile.on(device.kind)) for device in problem.cluster.devices)
    cluster = problem.cluster.with_devices(
        lambda device: dataclasses.replace(device, memory_bytes=2 * needed + 1, reserve_bytes=0.0)
    )
    return dataclasses.replace(problem, cluster=cluster, forced=Forced())
