"""Each stage runs once before the first step, so that nothing is loaded while messages are under way."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

import user_tasks
from cost_model.cluster import CPU
from cost_model.cluster_file import read_cluster
from hetpipe.models.chain import ChainModel
from hetpipe.runtime.rank_setup import slices
from hetpipe.runtime.step_outcome import StepOutcome
from hetpipe.simulation.schedule_selection import lower
from hetpipe.training.user_loop import RankStages, execute
from partition.plan import Pipeline, Plan, Stage
from runs import RECOMPUTE, chain_plan, cluster_file, made_up_profile_of

BATCH = 8


def several_stages() -> Plan:
    """Three stages on one device, beside a second pipeline there; a microbatch at the end is smaller."""
    here = ("here/0",)
    first = Pipeline(2, 5, (Stage(here, (0, 2), 2), Stage(here, (2, 3), 2), Stage(here, (3, 6), 1)))
    return Plan("manual", "mine", BATCH, (first, Pipeline(3, 3, (Stage(here, (0, 6), 1),))))


def stages_of(folder: Path, plan: Plan, dtype: str) -> RankStages:
    chain = ChainModel.from_module(user_tasks.build, torch.zeros(1, user_tasks.NUM_FEATURES))
    cluster = read_cluster(cluster_file(folder))
    profile = made_up_profile_of(chain, "mine", CPU, 1e-4, dtype=dtype, sequence_length=1)
    program = lower(plan, profile, cluster)
    return RankStages(program, chain, user_tasks.squared_error, profile=profile, cluster=cluster, seed=3)


def batch() -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {"x": torch.randn(BATCH, 8, generator=generator)}, torch.randn(BATCH, 4, generator=generator)


def stepped(
    folder: Path, plan: Plan, dtype: str, *, rehearsed: bool
) -> tuple[StepOutcome, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Outcome, gradients and weights of a first step with dropout."""
    stages = stages_of(folder, plan, dtype)
    stages.rehearsed = not rehearsed
    optimizer = torch.optim.AdamW(stages.parameters(), lr=1e-2)
    outcome = execute(stages.program, stages, *batch(), optimizer=optimizer)
    named = stages.named_parameters()
    gradients = {name: value.grad.clone() for name, value in named.items() if value.grad is not None}
    stages.close()
    return outcome, gradients, {name: value.detach().clone() for name, value in named.items()}


PLANS = {
    **{str(options): chain_plan("mine", [0, 6], 4, batch=BATCH, **options) for options in RECOMPUTE},
    "several": several_stages(),
}


@pytest.mark.parametrize("dtype", ["float32", "float16-autocast"])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_the_first_step_is_the_same_bit_by_bit(tmp_path, plan, dtype):
    with_one = stepped(tmp_path, plan, dtype, rehearsed=True)
    without = stepped(tmp_path, plan, dtype, rehearsed=False)
    assert (with_one[0].loss, with_one[0].gradient_norm) == (without[0].loss, without[0].gradient_norm)
    assert with_one[0].loss_scale == without[0].loss_scale
    for found, expected in zip(with_one[1:], without[1:], strict=True):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_rehearsal_runs_every_stage_and_leaves_nothing(tmp_path):
    stages = stages_of(tmp_path, several_stages(), "float32")
    ran: list[tuple[int, int]] = []
    plain = stages.model.run

    def run(start: int, stop: int, *arguments: Any) -> Any:
        ran.append((start, stop))
        return plain(start, stop, *arguments)

    stages.model.run = run  # type: ignore[method-assign]
    before = {name: value.detach().clone() for name, value in stages.named_parameters().items()}
    states = random.getstate(), torch.get_rng_state()
    inputs, labels = batch()
    stages.executor.rehearse(slices(stages.program, 0, inputs, labels, 1 / BATCH), stages.chain.layer_names)
    assert {(0, 2), (2, 3), (3, 6), (0, 6)} <= set(ran)
    assert random.getstate() == states[0] and torch.equal(torch.get_rng_state(), states[1])
    for name, value in stages.named_parameters().items():
        assert torch.equal(value, before[name])
        assert value.grad is None or not value.grad.any()
    stages.close()
