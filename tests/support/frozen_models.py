"""Models of which some parameters are frozen, and the ranks that train them. Shared by tests."""

import random
import re
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

import user_tasks
from cost_model.cluster import Cluster
from cost_model.profile import ModelProfile
from hetpipe.models.chain import ChainModel
from hetpipe.models.loss import Loss
from hetpipe.program.instructions import Program
from hetpipe.runtime.processes import Emit
from hetpipe.training.user_loop import RankStages, execute

SEED, BATCH, STEPS = 5, 8, 2
EXAMPLE = user_tasks.sequences(1)[0]["input_ids"][None]


def build_llama() -> nn.Module:
    """Embeddings, four blocks and a head of its own."""
    from transformers.models.llama.configuration_llama import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=user_tasks.VOCABULARY, hidden_size=8, intermediate_size=12, num_hidden_layers=4,
        num_attention_heads=2, max_position_embeddings=user_tasks.LENGTH,
    )  # fmt: skip
    return LlamaForCausalLM(config)


BUILDERS = {"llama": build_llama, "gpt2": user_tasks.build_gpt2, "sequential": user_tasks.build_usual}


def build_frozen(kind: str, pattern: str) -> nn.Module:
    """A model whose parameters are frozen where the pattern is found in their names."""
    model = BUILDERS[kind]()
    for name, value in model.named_parameters():
        value.requires_grad_(re.search(pattern, name) is None)
    return model


def build_random(kind: str, seed: int) -> nn.Module:
    """A model frozen at random: any tensors, or whole layers and some tensors; never all of them."""
    rng = random.Random(f"{kind} {seed}")
    model = BUILDERS[kind]()
    named = list(model.named_parameters())
    share, whole = rng.choice([0.2, 0.5, 0.9]), rng.random() < 0.5
    parts = {name: re.sub(r"(\d+)\..*", r"\1", name) for name, _ in named}
    drawn = {part: rng.random() < share for part in sorted(set(parts.values()))}
    kept = rng.choice(named)[0]
    for name, value in named:
        frozen = drawn[parts[name]] or rng.random() < 0.1 if whole else rng.random() < share
        value.requires_grad_(name == kept or not frozen)
    return model


def chain_of(kind: str, seed: int) -> ChainModel:
    example = torch.zeros(1, user_tasks.NUM_FEATURES) if kind == "sequential" else {"input_ids": EXAMPLE}
    return ChainModel.from_module(partial(build_random, kind, seed), example, name="mine")


def batch(kind: str, step: int) -> tuple[dict[str, Tensor], Tensor]:
    positions = range(step * BATCH, (step + 1) * BATCH)
    if kind == "sequential":
        rows = user_tasks.samples(len(positions) * STEPS)
        x, y = (torch.stack(part) for part in zip(*(rows[position] for position in positions), strict=True))
        return {"input0": x}, y
    ids = torch.stack([user_tasks.sequences(position + 1)[position]["input_ids"] for position in positions])
    return {"input_ids": ids}, ids


def loss_of(kind: str) -> Loss:
    return user_tasks.squared_error if kind == "sequential" else user_tasks.next_token_loss


def decaying(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """Moves what it is given even without a gradient that is not zero."""
    return torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.3)


def train_cases(
    cases: Sequence[tuple[str, int, Program, ModelProfile]], cluster: Cluster, *, rank: int, emit: Emit
) -> None:
    """Some steps of each case; every rank emits losses, norms, and all that it holds."""
    for kind, seed, program, profile in cases:
        try:
            chain = chain_of(kind, seed)
            stages = RankStages(
                program, chain, loss_of(kind), profile=profile, cluster=cluster, seed=SEED,
                dtype=torch.float64,
            )  # fmt: skip
            optimizer = decaying(stages.parameters()) if stages.parameters() else None
            found = [
                execute(program, stages, *batch(kind, step), optimizer=optimizer, step=step, clip_norm=0.5)
                for step in range(STEPS)
            ]
        except Exception as error:
            raise AssertionError(f"{kind} {seed}: {type(error).__name__}: {error}") from error
        event = {
            "case": (kind, seed),
            "losses": [outcome.loss for outcome in found],
            "norms": [outcome.gradient_norm for outcome in found],
            "trained": sorted(stages.named_parameters()),
            "ran": [str(event.instruction) for event in found[-1].events],
            "weights": {
                name: value.detach().tolist() for name, value in stages.model.held_parameters().items()
            },
        }
        for name in stages.model.absent:  # who would compute with them by mistake gets no number
            assert stages.model.owned_parameters()[name].isnan().all(), name
        emit({"event": "case", "rank": rank, **event})
        stages.close()
