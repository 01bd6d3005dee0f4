"""The loss scale: as torch's own, exact, and gone from what the user gets."""

import math
import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

import user_tasks
from cost_model.cluster import CPU
from cost_model.cluster_file import read_cluster
from cost_model.dtypes import BFLOAT16_AUTOCAST, FLOAT16_AUTOCAST
from cost_model.errors import InputError
from hetpipe.models.chain import ChainModel
from hetpipe.runtime.loss_scale import BACKOFF, GROWTH, GROWTH_INTERVAL, SMALLEST, LossScale
from hetpipe.simulation.schedule_selection import lower
from hetpipe.training.user_loop import RankStages, execute
from runs import chain_plan, cluster_file, made_up_profile_of


def test_the_scale_is_that_of_torchs_grad_scaler():
    defaults = torch.amp.GradScaler("cpu")
    assert (defaults.get_growth_factor(), defaults.get_backoff_factor()) == (GROWTH, BACKOFF)
    assert defaults.get_growth_interval() == GROWTH_INTERVAL
    assert LossScale().value == defaults.get_scale()
    rng, ours = random.Random(0), LossScale()
    scale, tracker = torch.tensor(ours.value), torch.zeros((), dtype=torch.int32)
    for _ in range(30_000):
        finite = rng.random() > 1 / 3000
        torch._amp_update_scale_(
            scale, tracker, torch.tensor(0.0 if finite else 1.0), GROWTH, BACKOFF, GROWTH_INTERVAL
        )
        ours = ours.after_step(finite=finite)
        assert (ours.value, ours.good_steps) == (float(scale), int(tracker))
    assert ours.value != LossScale().value


def test_it_neither_vanishes_nor_leaves_float32():
    scale = LossScale()
    for _ in range(200):
        scale = scale.after_step(finite=False)
    assert scale.value == SMALLEST
    most = LossScale(2.0**126, GROWTH_INTERVAL - 1)
    assert most.after_step(finite=True).value == 2.0**126 and math.isfinite(float(torch.tensor(2.0**126)))


@pytest.mark.parametrize(
    "wrong", [{"value": 0.0}, {"value": math.inf}, {"value": math.nan}, {"good_steps": -1}]
)
def test_what_is_no_scale_is_refused(wrong):
    with pytest.raises(InputError, match="the loss scale is"):
        LossScale(**wrong)


def stages_in(folder: Path, dtype: str) -> RankStages:
    layers = ChainModel.from_module(user_tasks.build_linear, torch.zeros(1, 8))
    cluster = read_cluster(cluster_file(folder))
    profile = made_up_profile_of(layers, "mine", CPU, 1e-4, dtype=dtype, sequence_length=1)
    program = lower(chain_plan("mine", [0, 3], 4, batch=8), profile, cluster)
    return RankStages(program, layers, user_tasks.squared_error, profile=profile, cluster=cluster, seed=3)


def batch() -> tuple[dict[str, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {"x": torch.randn(8, 8, generator=generator)}, torch.randn(8, 4, generator=generator)


def stepped(folder: Path, dtype: str, scale: LossScale | None) -> tuple[list[Tensor], float, float]:
    """Return the weights after a clipped step of AdamW, with loss and norm."""
    stages = stages_in(folder, dtype)
    if scale is not None:
        stages.loss_scale = scale
    optimizer = torch.optim.AdamW(stages.parameters(), lr=1e-2)
    outcome = execute(stages.program, stages, *batch(), optimizer=optimizer, clip_norm=0.5)
    weights = [value.detach().clone() for value in stages.parameters()]
    stages.close()
    assert outcome.finite
    return weights, outcome.loss, outcome.gradient_norm


def test_a_power_of_two_changes_no_bit_where_nothing_leaves_the_range(tmp_path):
    plain = stepped(tmp_path, BFLOAT16_AUTOCAST, None)
    scaled = stepped(tmp_path, BFLOAT16_AUTOCAST, LossScale(2.0**20))
    assert all(torch.equal(*pair) for pair in zip(plain[0], scaled[0], strict=True))
    assert plain[1:] == scaled[1:]


def test_gradients_left_to_the_user_are_those_of_the_loss(tmp_path):
    found = {}
    for dtype in ("float32", FLOAT16_AUTOCAST):
        stages = stages_in(tmp_path, dtype)
        outcome = execute(stages.program, stages, *batch())
        found[dtype] = torch.cat([value.grad.flatten() for value in stages.parameters()])
        assert outcome.gradient_norm == pytest.approx(float(found[dtype].norm()), rel=1e-4)
        assert (outcome.loss_scale is None) == (dtype == "float32")
        stages.close()
    exact, close = found.values()
    assert 0 < float((close - exact).norm()) < 0.005 * float(exact.norm())


def test_small_gradients_live_by_the_scale(tmp_path):
    inputs, labels = batch()
    norms = {}
    for name, value in (("float32", None), ("scaled", 2.0**16), ("unscaled", 1.0)):
        stages = stages_in(tmp_path, "float32" if value is None else FLOAT16_AUTOCAST)
        if value is not None:
            stages.loss_scale = LossScale(value)
        # a loss of so many terms that its gradients are below float16's smallest number, 6e-8
        norms[name] = execute(stages.program, stages, inputs, labels, num_terms=10**9).gradient_norm
        stages.close()
    assert norms["scaled"] == pytest.approx(norms["float32"], rel=0.02)
    assert norms["unscaled"] == 0.0 < norms["float32"]
