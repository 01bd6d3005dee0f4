"""A model that peft made, given to a Trainer as it is: gradients, checkpoints and what they refuse."""

import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import peft_models
import user_tasks
from cost_model.errors import InputError
from cost_model.memory import checkpoint_bytes
from folders import tiny_model
from hetpipe.data.keyed_order import epoch_order
from hetpipe.models.chain import ChainModel
from hetpipe.runs.lora import LoraSettings
from hetpipe.training import checkpoint, checkpoint_weights
from hetpipe.training.checkpoint_room import room_of
from hetpipe.training.trainer import Trainer
from partition.plan import Pipeline, Plan, Stage
from runs import chain_plan, cluster_file, made_up_profile_of, replica_plan

BATCH, SEED = 8, 5
LLAMA, GPT2, BERT = peft_models.TARGETS


def model_of(architecture: str, dropout: float = 0.0, blocks: Any = None) -> Any:
    lora = LoraSettings(4, 8.0, peft_models.TARGETS[architecture], dropout)
    return peft_models.peft_model(tiny_model(architecture), lora, blocks=blocks).double()


def trainer(place: Path, plan: Plan, model: Any) -> Trainer:
    """Steps of plain SGD at rate 1, so that a step is a gradient."""
    place.mkdir(exist_ok=True)
    example = {"input_ids": user_tasks.sequences(1)[0]["input_ids"][None]}
    profile = made_up_profile_of(
        ChainModel.from_module(model, example), "mine", dtype="float64", sequence_length=user_tasks.LENGTH
    )
    return Trainer(
        model, user_tasks.sequences(24), partial(torch.optim.SGD, lr=1.0), user_tasks.next_token_loss,
        plan=plan, cluster=cluster_file(place), folder=place / "run", profile=profile,
        seed=SEED, clip_norm=1e30, rate_schedule=user_tasks.constant,
    )  # fmt: skip


def one_gradient(model: Any) -> dict[str, torch.Tensor]:
    """The gradient of the first step, by torch and peft alone."""
    data = user_tasks.sequences(24)
    order = epoch_order(SEED, 0, len(data))
    ids = torch.stack([data[order[position]]["input_ids"] for position in range(BATCH)])
    model.zero_grad()
    (user_tasks.next_token_loss(model(input_ids=ids).logits, ids) / BATCH).backward()
    return {name: value.grad for name, value in model.named_parameters() if value.grad is not None}


def two_pipelines() -> Plan:
    one = Pipeline(2, 5, (Stage(("here/0",), (0, 5), 3),))
    two = Pipeline(1, 3, (Stage(("here/1",), (0, 2), 2), Stage(("here/2",), (2, 5), 1)))
    return Plan("manual", "mine", BATCH, (one, two), zero=1)


def replicas(zero: int) -> Plan:
    return replica_plan("mine", 5, (2, 5), (1, 2), (1, 1), zero=zero)


PLANS = {
    LLAMA: two_pipelines(),
    GPT2: chain_plan("mine", [0, 1, 4, 5], 2, BATCH, recompute=True),
    BERT: chain_plan("mine", [0, 3, 5], 4, BATCH),
}
CASES = [
    *((architecture, None, plan) for architecture, plan in PLANS.items()),
    (LLAMA, None, replicas(2)),
    (GPT2, None, replicas(3)),
    *(
        pytest.param(architecture, None, replicas(zero), marks=pytest.mark.exhaustive)
        for zero, architecture in ((2, GPT2), (2, BERT), (3, LLAMA), (3, BERT))
    ),
    (LLAMA, None, replace(two_pipelines(), zero=2)),
    (BERT, [2], replicas(3)),
    # adapters of the last block alone: two stages only forward
    (LLAMA, [2], chain_plan("mine", [0, 2, 3, 5], 2, BATCH)),
    (BERT, [2], chain_plan("mine", [0, 1, 2, 5], 1, BATCH, recompute=True, segment_layers=1)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "blocks", "plan"), CASES)
def test_gradients_of_adapters_are_those_of_peft_alone(tmp_path, architecture, blocks, plan):
    model = model_of(architecture, blocks=blocks)
    before = copy.deepcopy(model)
    expected = one_gradient(copy.deepcopy(model).train())
    made = trainer(tmp_path, plan, model)
    made.fit(1)
    assert made.checkpoint is not None
    stored = checkpoint_weights.read_weights(made.checkpoint)
    assert stored.keys() == expected.keys() == {n for n, v in model.named_parameters() if v.requires_grad}
    checkpoint_weights.load_weights(made.checkpoint, model)
    largest = max(value.abs().max() for value in expected.values())
    first = dict(before.named_parameters())
    for name, value in model.named_parameters():
        if name in expected:
            assert (first[name] - value - expected[name]).abs().max() <= 1e-12 * largest, name
        else:
            assert torch.equal(value, first[name]), name


@pytest.mark.slow
def test_checkpoints_of_a_peft_model_hold_its_adapters_and_know_its_base(tmp_path):
    model = model_of(LLAMA, dropout=0.2)
    made = trainer(tmp_path, chain_plan("mine", [0, 3, 5], 2, BATCH), model)
    made.fit(1)
    first = made.checkpoint
    assert first is not None
    manifest = checkpoint.read_manifest(first)
    frozen = {name for name, value in model.named_parameters() if not value.requires_grad}
    assert manifest.base.keys() == frozen and manifest.lora is None
    sizes = sum(value.nbytes for value in checkpoint_weights.read_weights(first).values())
    assert sizes == sum(value.nbytes for value in model.parameters() if value.requires_grad)

    # what is left after a step of the other plan is what one run of both leaves
    whole = trainer(tmp_path / "whole", chain_plan("mine", [0, 5], 4, BATCH), model)
    whole.fit(2)
    made.fit(2, resume_from=first)
    assert made.checkpoint is not None and whole.checkpoint is not None
    expected = checkpoint_weights.read_weights(whole.checkpoint)
    for name, value in checkpoint_weights.read_weights(made.checkpoint).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-10, atol=1e-12, msg=name)

    other = copy.deepcopy(model)
    changed = "base_model.model.model.layers.1.mlp.up_proj.weight"
    with torch.no_grad():
        dict(other.named_parameters())[changed][0, 0] += 1e-3
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(InputError, match=rf"{changed}' here is not that of their base"):
        checkpoint_weights.load_weights(first, other)
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())
    with pytest.raises(InputError, match=rf"beside another base, '{changed}'"):
        trainer(tmp_path / "other", chain_plan("mine", [0, 5], 4, BATCH), other).fit(2, resume_from=first)
    with pytest.raises(InputError, match="is not that of their base"):
        checkpoint_weights.load_weights(first, model.to("meta"))


@pytest.mark.slow
def test_room_is_made_for_adapters_alone(tmp_path):
    model = model_of(LLAMA)
    made = trainer(tmp_path, chain_plan("mine", [0, 5], 4, BATCH), model)
    assert made.profile is not None and made._task.has_adapters
    settings, folder = made._settings_for(1), made.folder
    assert folder is not None
    trained = sum(8.0 * value.numel() for value in model.parameters() if value.requires_grad)  # float64
    alone = room_of(folder, settings, made.profile, adapters_alone=True).checkpoint_bytes
    assert alone == 3 * trained
    assert (
        room_of(folder, settings, made.profile).checkpoint_bytes == checkpoint_bytes(made.profile) > 5 * alone
    )


def test_what_a_factory_of_a_peft_model_draws_is_peft_s():
    """By the model's rule for its modules B would not be zero."""
    example = {"input_ids": user_tasks.sequences(1)[0]["input_ids"][None]}

    def build() -> Any:
        import peft

        config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj"])
        return peft.get_peft_model(tiny_model(LLAMA), config)

    chain = ChainModel.from_module(build, example)
    values = chain.materialise(range(chain.num_layers), seed=1).owned_parameters()
    assert not chain.has_rule
    drawn = {name: value for name, value in values.items() if name not in chain.base}
    assert len(drawn) == 6
    for name, value in drawn.items():
        assert value.detach().any() == ("lora_A" in name), name
