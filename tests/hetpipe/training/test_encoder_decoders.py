"""Encoder-decoders trained in stages: the losses of a plain loop, and of transformers itself."""

import copy

import pytest
import torch
import transformers
from torch import nn

from hetpipe.models.chain import ChainModel
from hetpipe.runs.run_folder import RunFolder
from hetpipe.training.trainer import AdamW, Trainer
from runs import chain_plan, cluster_file, made_up_profile_of, replica_plan

STEPS = 3


def data():
    """Sources that end in padding, targets whose last labels do not count."""
    generator = torch.Generator().manual_seed(1)
    samples = []
    for _ in range(16):
        source, target = torch.randint(5, 60, (2, 9), generator=generator)
        mask, labels = torch.ones(9, dtype=torch.long), target.clone()
        mask[7:], labels[6:] = 0, -100
        begun = torch.cat([torch.tensor([0]), target[:-1]])
        samples.append(({"input_ids": source, "attention_mask": mask, "decoder_input_ids": begun}, labels))
    return samples


def loss(logits, labels):
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def count_terms(labels):
    return int((labels != -100).sum())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "frozen"),
    [
        pytest.param(chain_plan("mine", [0, 2, 8], 4), (), marks=pytest.mark.exhaustive),  # as the next
        (chain_plan("mine", [0, 1, 6, 8], 4), ()),
        pytest.param(  # below, with an encoder that is frozen
            replica_plan("mine", 8, (4, 10), (3, 6), zero=2), (), marks=pytest.mark.exhaustive
        ),
        (replica_plan("mine", 8, (4, 10), (3, 6), zero=3), ()),
        (chain_plan("mine", [0, 2, 6, 8], 4), ("encoder.block",)),
        (chain_plan("mine", [0, 2, 6, 8], 4), ("encoder.", "shared")),
        (replica_plan("mine", 8, (4, 10), (3, 6), zero=2), ("encoder.", "shared")),
        (chain_plan("mine", [0, 6, 8], 4), ("decoder.",)),
    ],
)
def test_losses_are_those_of_transformers_and_a_plain_loop(tmp_path, plan, frozen):
    """frozen: how the names begin of what is not trained: the encoder, with embeddings, or the decoder."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 3, "num_decoder_layers": 2}
    config = transformers.T5Config(**sizes, num_heads=2, dropout_rate=0.0)
    model = transformers.T5ForConditionalGeneration(config).double()
    for name, value in model.named_parameters():
        value.requires_grad_(not name.startswith(frozen) if frozen else True)
    samples = data()
    batch = {name: torch.stack([inputs[name] for inputs, _ in samples]) for name in samples[0][0]}
    labels = torch.stack([label for _, label in samples])
    plain, expected = copy.deepcopy(model).train(), []
    trained = [value for value in plain.parameters() if value.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.0)
    for _ in range(STEPS):
        value = plain(**batch, labels=labels, use_cache=False).loss
        optimizer.zero_grad()
        value.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        expected.append(value.item())
    chain = ChainModel.from_module(model, {name: value[:1] for name, value in batch.items()})
    Trainer(
        model,
        samples,
        AdamW(1e-2, weight_decay=0.0),
        loss,
        cluster=cluster_file(tmp_path),
        profile=made_up_profile_of(chain, "mine", dtype="float64", sequence_length=9),
        plan=plan,
        folder=tmp_path / "run",
        save=False,
        progress=False,
        count_terms=count_terms,
        shuffle=False,
        rate_schedule=lambda step: 1.0,
    ).fit(STEPS)
    got = [entry["loss"] for entry in RunFolder(tmp_path / "run").read_metrics()]
    assert got == pytest.approx(expected, rel=1e-12)
