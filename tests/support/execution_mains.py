"""What the ranks of the tests of `execute` run: a training loop of one's own."""

from typing import Any

import torch
from torch import Tensor

import user_tasks
from cost_model.cluster import Cluster
from cost_model.profile import ModelProfile
from hetpipe.models.chain import ChainModel
from hetpipe.program.instructions import Program
from hetpipe.runtime.processes import Emit
from hetpipe.training.user_loop import RankStages, execute, trace_of

SEED = 5


def chain_of() -> ChainModel:
    return ChainModel.from_module(user_tasks.build_plain, torch.zeros(1, user_tasks.NUM_FEATURES))


def batch(step: int, count: int) -> tuple[dict[str, Tensor], Tensor]:
    chosen = user_tasks.samples(64)[step * count : (step + 1) * count]
    return {"x": torch.stack([x for x, _ in chosen])}, torch.stack([y for _, y in chosen])


def user_loop(
    program: Program, profile: ModelProfile, cluster: Cluster, steps: int, *, rank: int, emit: Emit
) -> None:
    """Steps with SGD, then, unless states are sharded, one without; emits losses, gradients and trace."""
    stages = RankStages(
        program, chain_of(), user_tasks.squared_error, profile=profile, cluster=cluster, seed=SEED,
        dtype=torch.float64,
    )  # fmt: skip
    optimizer = torch.optim.SGD(stages.parameters() or [torch.zeros(1)], lr=0.05, momentum=0.9)
    count = program.plan.global_batch_size
    for step in range(steps):
        outcome = execute(program, stages, *batch(step, count), optimizer=optimizer, step=step, clip_norm=0.5)
        emit({"event": "step", "rank": rank, "loss": outcome.loss, "norm": outcome.gradient_norm})
    if not program.plan.zero:
        before = {name: value.detach().clone() for name, value in stages.named_parameters().items()}
        outcome = execute(program, stages, *batch(steps, count), step=steps, num_terms=7)
        gradients: dict[str, Any] = {}
        for name, value in stages.named_parameters().items():
            assert torch.equal(value, before[name])
            assert value.grad is not None
            gradients[name] = value.grad.tolist()
        emit({"event": "gradients", "rank": rank, "gradients": gradients})
    trace = trace_of(program, outcome)
    counts = [sum(event.rank == other for event in trace.events) for other in range(len(program.ranks))]
    emit({"event": "trace", "rank": rank, "counts": counts})
    stages.close()
