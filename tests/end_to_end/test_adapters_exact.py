"""Adapters beside Llama, GPT-2 and BERT under five plans: gradients and losses are those of peft alone.

AdamW divides a gradient by its own size, so that of one which is nearly zero it makes a step of full length,
in a direction that rounding decides. Where there are such (GPT-2 with dropout), one process in float32
differs from itself at another microbatch size by up to 1e-5 of the loss, in float64 by 1e-15. So losses in
float32 are held against what one process differs from itself, and in float64 against 1e-12.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import peft_models
import user_tasks
from cost_model.cluster_file import read_cluster
from hetpipe.models.block_structure import lists_of_blocks
from hetpipe.models.keyed_dropout import PREFIX, KeyedDropout
from hetpipe.runtime.processes import RankGroup, run_ranks
from hetpipe.simulation.schedule_selection import lower
from partition.plan import Pipeline, Plan, Stage
from peft_mains import BATCH, SEED, STEPS, Setting, batch, optimizer_of, train_settings
from runs import chain_plan, cluster_file, made_up_profile_of

TWO_PIPELINES = Plan(
    "manual", "mine", BATCH,
    (
        Pipeline(2, 5, (Stage(("here/0",), (0, 6), 3),)),
        Pipeline(1, 3, (Stage(("here/1",), (0, 2), 2), Stage(("here/2",), (2, 6), 1))),
    ),
)  # fmt: skip
PLANS = {
    "one device": chain_plan("mine", [0, 6], 4, BATCH),
    "recompute by layer": chain_plan("mine", [0, 4, 6], 2, BATCH, recompute=True, segment_layers=1),
    "even on three": chain_plan("mine", [0, 2, 4, 6], 2, BATCH),
    "two pipelines": TWO_PIPELINES,
    "uneven on four": chain_plan("mine", [0, 1, 2, 5, 6], 1, BATCH),
}
SETTINGS = [
    Setting(architecture, dropout, dtype)
    for architecture in peft_models.TARGETS
    for dropout, dtype in ((0.0, torch.float64), (0.3, torch.float32))
]
SETTINGS.append(Setting("GPT2LMHeadModel", 0.3, torch.float64))
PAIRS = {
    (name, setting)
    for place, name in enumerate(PLANS)
    for other, setting in enumerate(SETTINGS)
    if (2 * place + other) % 5 < 3
}
"""Each setting under three plans, each plan with four settings and more: what any has to do with one another
is in some, and a rank builds a model for each."""
LOSSES = 2e-6
"""How far losses in float32 may differ, relatively, where those of one process do not differ by more."""


@cache
def by_peft_alone(
    setting: Setting, microbatch: int = BATCH
) -> tuple[list[float], Mapping[str, Tensor], Mapping[str, Tensor]]:
    """Losses of peft's loop in one process, first gradients of adapters, and all weights at its beginning."""
    model = setting.model().train()
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    optimizer, losses = optimizer_of(list(trained.values())), []
    gradients: dict[str, Tensor] = {}
    dropout = KeyedDropout(SEED)
    for number, block in enumerate(model.get_submodule(lists_of_blocks(model)[0][0]).children(), start=1):
        block.register_forward_pre_hook(lambda *_, layer=number: dropout.enter_layer(layer))
    for step in range(STEPS):
        optimizer.zero_grad()
        losses.append(0.0)
        for first in range(0, BATCH, microbatch):
            ids = batch(step)[first : first + microbatch]
            dropout.at(step, range(first, first + len(ids)))
            with dropout:
                dropout.enter_layer(PREFIX)
                logits = model(input_ids=ids).logits
            loss = user_tasks.next_token_loss(logits, ids) / BATCH
            loss.backward()
            losses[-1] += loss.item()
        if not gradients:
            gradients = {name: value.grad.clone() for name, value in trained.items()}
        optimizer.step()
    return losses, gradients, before


@cache
def own_difference(setting: Setting) -> float:
    """How far one process is from itself at other microbatch sizes: the most of any of its losses."""
    losses = by_peft_alone(setting)[0]
    others = [by_peft_alone(setting, microbatch)[0] for microbatch in (1, 2, 3, 4)]
    return max(abs(mine / theirs - 1) for other in others for mine, theirs in zip(other, losses, strict=True))


def check(name: str, setting: Setting, events: list[dict[str, Any]]) -> None:
    """What the ranks of a plan have is what one process has, and the same wherever several have it."""
    losses, gradients, before = by_peft_alone(setting)
    frozen = before.keys() - gradients.keys()
    largest = max(float(value.abs().max()) for value in gradients.values())
    rel = 1e-12 if setting.dtype == torch.float64 else max(LOSSES, 2 * own_difference(setting))
    seen: dict[str, Tensor] = {}
    for event in events:
        where = f"{name}, {setting}, rank {event['rank']}"
        assert event["losses"] == pytest.approx(losses, rel=rel), where
        for key, value in event["gradients"].items():
            limit = 1e-12 if setting.dtype == torch.float64 else 1e-5
            assert float((value - gradients[key]).abs().max()) <= limit * largest, (where, key)
        for key, value in event["weights"].items():
            assert torch.equal(value, before[key]) == (key in frozen), (where, key)
            assert torch.equal(value, seen.setdefault(key, value)), (where, key)
    assert {key for event in events for key in event["gradients"]} == gradients.keys()
    assert seen.keys() == before.keys()


@pytest.mark.slow
@pytest.mark.parametrize("all_pairs", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_five_plans_train_adapters_as_peft_alone_does(tmp_path, all_pairs):
    cluster = read_cluster(cluster_file(tmp_path))
    for num_ranks in (1, 2, 3, 4):
        plans = {name: plan for name, plan in PLANS.items() if len(plan.device_names) == num_ranks}
        cases = []
        for setting in SETTINGS:
            dtype = str(setting.dtype).removeprefix("torch.")
            profile = made_up_profile_of(
                setting.chain(), "mine", dtype=dtype, sequence_length=user_tasks.LENGTH
            )
            cases += [
                (name, setting, lower(plan, profile, cluster), profile)
                for name, plan in plans.items()
                if all_pairs or (name, setting) in PAIRS
            ]
        events: list[dict[str, Any]] = []
        devices = tuple(f"here/{rank}" for rank in range(num_ranks))
        run_ranks(train_settings, (cases, cluster), RankGroup(devices, (1,) * num_ranks), events.append)
        assert len(events) == num_ranks * len(cases)
        for name, setting, *_ in cases:
            check(name, setting, [e for e in events if (e["name"], e["setting"]) == (name, setting)])
    # the masks of adapters are there, and the plan is not what draws them
    for plain, dropped in zip(SETTINGS[:-1:2], SETTINGS[1::2], strict=True):
        assert abs(first_loss(plain) - first_loss(dropped)) > 1e-5 * first_loss(plain)
    # what the bound in float32 leaves open is rounding: the same steps in float64 leave nothing
    blurred, sharp = SETTINGS[3], SETTINGS[-1]
    assert (blurred.architecture, blurred.dropout) == (sharp.architecture, sharp.dropout)
    assert own_difference(sharp) < 1e-14 < 1e-6 * own_difference(blurred)
    assert all(own_difference(setting) < LOSSES for setting in SETTINGS if setting != blurred)


def first_loss(setting: Setting) -> float:
    return by_peft_alone(setting)[0][0]
