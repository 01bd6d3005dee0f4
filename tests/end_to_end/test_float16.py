"""Training in float16: steps that overflow are skipped everywhere, resumed bit by bit, near float32."""

import dataclasses

import pytest
import torch
from safetensors.torch import load_file

import user_tasks
from cost_model.dtypes import BFLOAT16_AUTOCAST, FLOAT16_AUTOCAST, FLOAT32
from hetpipe.models.chain import ChainModel
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.settings import Settings
from hetpipe.runtime.loss_scale import LossScale
from hetpipe.training.checkpoint import manifest_text, read_manifest
from hetpipe.training.run import train
from hetpipe.training.trainer import AdamW, Trainer
from partition.plan import Pipeline, Plan, Stage
from runs import chain_plan, cluster_file, made_up_profile_of


def profile_in_float16():
    layers = ChainModel.from_module(user_tasks.build_linear, torch.zeros(1, 8))
    return made_up_profile_of(layers, "mine", dtype=FLOAT16_AUTOCAST, sequence_length=1)


def tensors(folder: RunFolder, step: int) -> dict[str, torch.Tensor]:
    files = sorted((folder.checkpoints / f"step-{step:06d}").glob("*.safetensors"))
    return {key: value for path in files for key, value in load_file(path).items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


TWO_PIPELINES = Plan(
    "manual",
    "mine",
    16,
    (
        Pipeline(4, 8, (Stage(("here/0",), (0, 1), 2), Stage(("here/1",), (1, 3), 1))),
        Pipeline(4, 8, (Stage(("here/2",), (0, 3), 2),)),
    ),
)
SHARDED = dataclasses.replace(TWO_PIPELINES, zero=1, state_owners=("here/0", "here/2", "here/1"))
GRADIENTS = dataclasses.replace(SHARDED, zero=2)
ROUNDED = dataclasses.replace(SHARDED, gradient_dtype="bf16")


CHAIN = chain_plan("mine", [0, 1, 2, 3], 4)
FIRST, LAST = user_tasks.spiky_task, user_tasks.overflowing_task
OTHERS = [(TWO_PIPELINES, LAST), (SHARDED, FIRST), (ROUNDED, LAST), (GRADIENTS, FIRST)]
CASES = [
    *((CHAIN, task) for task in (FIRST, LAST)),
    *((TWO_PIPELINES, FIRST), (SHARDED, LAST), (ROUNDED, FIRST), (GRADIENTS, LAST)),
    # each by itself is among those before
    *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in OTHERS),
]


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "task"), CASES)
def test_an_overflow_at_one_stage_skips_the_step_everywhere_and_halves_the_scale(tmp_path, plan, task):
    """Of the second step: in the gradients of layer 0 alone, or where the last layer's are made."""
    folder = RunFolder(tmp_path / "run")
    settings = Settings(steps=4, learning_rate=1e-2, every=1)
    train(settings, cluster_file(tmp_path), profile_in_float16(), plan, folder, make_task=task)
    metrics = folder.read_metrics()
    assert [entry["finite"] for entry in metrics] == [True, False, True, True]
    assert [entry["loss_scale"] for entry in metrics] == [2.0**16, 2.0**16, 2.0**15, 2.0**15]
    first, second, third = (tensors(folder, step) for step in (1, 2, 3))
    assert same(first, second)
    assert not any(torch.equal(first[key], third[key]) for key in first)
    manifests = [read_manifest(folder.checkpoints / f"step-{step:06d}") for step in (1, 2, 3)]
    assert [manifest.optimizer["steps"] for manifest in manifests] == [1, 1, 2]
    scales = [manifest.loss_scale for manifest in manifests]
    assert [(scale.value, scale.good_steps) for scale in scales if scale] == [
        (2.0**16, 1),
        (2.0**15, 0),
        (2.0**15, 1),
    ]


@pytest.mark.slow
def test_a_resumed_run_has_the_bits_of_one_that_never_ended(tmp_path):
    profile, task = profile_in_float16(), user_tasks.overflowing_task
    plan = chain_plan("mine", [0, 1, 3], 4)
    whole, parts = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "parts")
    settings = Settings(steps=5, learning_rate=1e-2, every=1)
    cluster = cluster_file(tmp_path)
    train(settings, cluster, profile, plan, whole, make_task=task)
    train(
        dataclasses.replace(settings, steps=3, total_steps=5), cluster, profile, plan, parts, make_task=task
    )
    source = parts.checkpoints / "step-000003"
    again = dataclasses.replace(settings, resume_from=str(source))
    train(again, cluster, profile, plan, parts, make_task=task)
    assert same(tensors(whole, 5), tensors(parts, 5))
    ends = [read_manifest(folder.checkpoints / "step-000005").loss_scale for folder in (whole, parts)]
    assert ends[0] == ends[1] and ends[0] is not None and (ends[0].value, ends[0].good_steps) == (2.0**15, 3)
    # the scale is taken from the checkpoint, and not begun anew
    manifest = dataclasses.replace(read_manifest(source), loss_scale=LossScale(2.0**8, 1999))
    (source / "manifest.json").write_text(manifest_text(manifest))
    other = RunFolder(tmp_path / "other")
    train(again, cluster, profile, plan, other, make_task=task)
    assert [entry["loss_scale"] for entry in other.read_metrics()] == [2.0**8, 2.0**9]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [BFLOAT16_AUTOCAST, FLOAT16_AUTOCAST])
def test_sharded_gradients_in_16_bits_are_those_of_the_same_plan_without(tmp_path, dtype):
    """Each microbatch's are in float32 when they are summed: nothing but the order of sums differs."""
    layers = ChainModel.from_module(user_tasks.build_gpt2, user_tasks.gpt2_example(), name="mine")
    whole = Plan(
        "manual",
        "mine",
        8,
        (
            Pipeline(2, 5, (Stage(("here/0",), (0, 4), 2),)),
            Pipeline(1, 3, (Stage(("here/1",), (0, 2), 2), Stage(("here/2",), (2, 4), 1))),
        ),
    )
    losses, norms = [], []
    for zero in (0, 2):
        folder = tmp_path / str(zero)
        trainer = Trainer(
            user_tasks.build_gpt2,
            user_tasks.sequences(40),
            AdamW(3e-3),
            user_tasks.next_token_loss,
            cluster=cluster_file(tmp_path),
            plan=dataclasses.replace(whole, zero=zero),
            profile=made_up_profile_of(layers, "mine", dtype=dtype, sequence_length=user_tasks.LENGTH),
            count_terms=user_tasks.num_next_tokens,
            folder=folder,
            save=False,
        )
        trainer.fit(4)
        rows = RunFolder(folder).read_metrics()
        losses.append([row["loss"] for row in rows])
        norms.append([row["gradient_norm"] for row in rows])
    assert losses[1][0] == losses[0][0]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert norms[1][0] == pytest.approx(norms[0][0], rel=1e-6)
    assert norms[1] == pytest.approx(norms[0], rel=1e-3)


@pytest.mark.slow
def test_losses_are_near_those_of_float32_over_80_steps(tmp_path):
    layers = ChainModel.from_module(user_tasks.build_gpt2, user_tasks.gpt2_example(), name="mine")
    losses = {}
    for dtype in (FLOAT32, BFLOAT16_AUTOCAST, FLOAT16_AUTOCAST):
        trainer = Trainer(
            user_tasks.build_gpt2,
            user_tasks.sequences(40),
            AdamW(3e-3),
            user_tasks.next_token_loss,
            cluster=cluster_file(tmp_path),
            plan=chain_plan("mine", [0, 2, 4], 4, batch=8),
            profile=made_up_profile_of(layers, "mine", dtype=dtype, sequence_length=user_tasks.LENGTH),
            count_terms=user_tasks.num_next_tokens,
            folder=tmp_path / dtype,
            save=False,
        )
        trainer.fit(80)
        losses[dtype] = torch.tensor([step["loss"] for step in RunFolder(tmp_path / dtype).read_metrics()])
    exact = losses[FLOAT32]
    assert len(exact) == 80 and float(exact[-20:].mean()) < 0.5 * float(exact[0])  # it learns
    for dtype, most in ((BFLOAT16_AUTOCAST, 0.02), (FLOAT16_AUTOCAST, 0.005)):
        apart = (losses[dtype] - exact).abs() / exact
        assert 0 < float(apart.max()) < most, (dtype, float(apart.max()))
