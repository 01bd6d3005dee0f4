"""Training with gradients in bf16: losses near those in float32, owners alike, with sharded states too."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import user_tasks
from cost_model.dtypes import GRADIENT_BF16
from hetpipe.models.chain import ChainModel
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.run_report import read_report
from hetpipe.training.trainer import AdamW, Trainer
from partition.plan import Pipeline, Plan, Stage
from runs import cluster_file, made_up_profile_of

PLAN = Plan(
    "manual",
    "mine",
    8,
    (
        Pipeline(2, 4, (Stage(("here/0",), (0, 2), 2), Stage(("here/1",), (2, 4), 1))),
        Pipeline(2, 4, (Stage(("here/2",), (0, 4), 2),)),
    ),
)
SHARDED = replace(PLAN, zero=1, state_owners=("here/0", "here/2", "here/1", "here/2"))


def losses(plan: Plan, folder: Path, steps: int) -> torch.Tensor:
    layers = ChainModel.from_module(user_tasks.build_gpt2, user_tasks.gpt2_example(), name="mine")
    trainer = Trainer(
        user_tasks.build_gpt2,
        user_tasks.sequences(40),
        AdamW(3e-3),
        user_tasks.next_token_loss,
        cluster=cluster_file(folder.parent),
        plan=plan,
        profile=made_up_profile_of(layers, "mine", sequence_length=user_tasks.LENGTH),
        count_terms=user_tasks.num_next_tokens,
        folder=folder,
        save=False,
    )
    trainer.fit(steps)
    run = RunFolder(folder)
    report = read_report(run.report)
    assert report.owners_agree and report.gradient_dtype == plan.gradient_dtype
    return torch.tensor([step["loss"] for step in run.read_metrics()])


@pytest.mark.slow
def test_losses_are_near_those_in_float32(tmp_path):
    exact = losses(PLAN, tmp_path / "float32", 40)
    assert float(exact[-5:].mean()) < 0.9 * float(exact[0])  # it learns
    found = losses(replace(SHARDED, gradient_dtype=GRADIENT_BF16), tmp_path / "bf16", 40)
    apart = (found - exact).abs() / exact
    assert 0 < float(apart.max()) < 1e-3, float(apart.max())
