"""Adapters beside Llama, GPT-2 and BERT under five plans: gradients and losses are those of peft alone."""

from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import peft_models
import user_tasks
from cost_model.cluster_file import read_cluster
from hetpipe.models.block_structure import find_blocks
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


@cache
def by_peft_alone(setting: Setting) -> tuple[list[float], Mapping[str, Tensor], Mapping[str, Tensor]]:
    """Losses of peft's loop in one process, first gradients of adapters, and all weights at its beginning."""
    model = setting.model().train()
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    optimizer, losses = optimizer_of(list(trained.values())), []
    gradients: dict[str, Tensor] = {}
    dropout = KeyedDropout(SEED)
    for number, block in enumerate(model.get_submodule(find_blocks(model)).children(), start=1):
        block.register_forward_pre_hook(lambda *_, layer=number: dropout.enter_layer(layer))
    for step in range(STEPS):
        ids = batch(step)
        dropout.at(step, range(BATCH))
        with dropout:
            dropout.enter_layer(PREFIX)
            logits = model(input_ids=ids).logits
        loss = user_tasks.next_token_loss(logits, ids) / BATCH
        optimizer.zero_grad()
        loss.backward()
        if not gradients:
            gradients = {name: value.grad.clone() for name, value in trained.items()}
        optimizer.step()
        losses.append(loss.item())
    return losses, gradients, before


def check(name: str, setting: Setting, events: list[dict[str, Any]]) -> None:
    """What the ranks of a plan have is what one process has, and the same wherever several have it."""
    losses, gradients, before = by_peft_alone(setting)
    frozen = before.keys() - gradients.keys()
    largest = max(float(value.abs().max()) for value in gradients.values())
    seen: dict[str, Tensor] = {}
    for event in events:
        where = f"{name}, {setting}, rank {event['rank']}"
        assert event["losses"] == pytest.approx(losses, rel=2e-6), where
        if setting.dtype == torch.float64:
            assert event["losses"] == pytest.approx(losses, rel=1e-12), where
        for key, value in event["gradients"].items():
            limit = 1e-12 if setting.dtype == torch.float64 else 1e-5
            assert float((value - gradients[key]).abs().max()) <= limit * largest, (where, key)
        for key, value in event["weights"].items():
            assert torch.equal(value, before[key]) == (key in frozen), (where, key)
            assert torch.equal(value, seen.setdefault(key, value)), (where, key)
    assert {key for event in events for key in event["gradients"]} == gradients.keys()
    assert seen.keys() == before.keys()


@pytest.mark.slow
def test_five_plans_train_adapters_as_peft_alone_does(tmp_path):
    cluster = read_cluster(cluster_file(tmp_path))
    for num_ranks in (1, 2, 3, 4):
        plans = {name: plan for name, plan in PLANS.items() if len(plan.device_names) == num_ranks}
        cases = []
        for setting in SETTINGS:
            dtype = str(setting.dtype).removeprefix("torch.")
            profile = made_up_profile_of(
                setting.chain(), "mine", dtype=dtype, sequence_length=user_tasks.LENGTH
            )
            cases += [(name, setting, lower(plan, profile, cluster), profile) for name, plan in plans.items()]
        events: list[dict[str, Any]] = []
        devices = tuple(f"here/{rank}" for rank in range(num_ranks))
        run_ranks(train_settings, (cases, cluster), RankGroup(devices, (1,) * num_ranks), events.append)
        assert len(events) == num_ranks * len(cases)
        for name, setting, *_ in cases:
            check(name, setting, [e for e in events if (e["name"], e["setting"]) == (name, setting)])
    # the masks of adapters are there, and the plan is not what draws them
    for plain, dropped in pairwise(by_peft_alone(setting)[0][0] for setting in SETTINGS):
        assert abs(plain - dropped) > 1e-5 * plain
