"""The model of the benchmark: an encoder as BERT's as an nn.Sequential, which every contender can cut."""

import re
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hetpipe.data.task import TrainingTask
from hetpipe.models.chain import ChainModel
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.settings import TaskSettings

VOCABULARY = 2048


class Embeddings(nn.Module):
    """Token ids [samples, length] -> [samples, length, width]."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Parameter(torch.randn(length, width) / width)
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: Tensor) -> Tensor:
        normed: Tensor = self.norm(self.tokens(ids) + self.positions)
        return normed


def build(name: str, length: int) -> nn.Sequential:
    """encoder-12x256: twelve blocks of width 256."""
    match = re.fullmatch(r"encoder-(\d+)x(\d+)", name)
    if match is None:
        raise SystemExit(f"{name!r} is no model of this benchmark; they look like encoder-12x256")
    blocks, width = map(int, match.groups())
    block = partial(
        nn.TransformerEncoderLayer, width, max(1, width // 64), 4 * width,
        dropout=0.0, activation="gelu", batch_first=True, norm_first=True,
    )  # fmt: skip
    return nn.Sequential(
        Embeddings(length, width), *(block() for _ in range(blocks)), nn.Linear(width, VOCABULARY)
    )


def loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Summed over the tokens."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def make_task(folder: RunFolder, settings: TaskSettings) -> TrainingTask:
    """Tokens are random: nothing here depends on what is learned."""
    length = settings.sequence_length

    def batch(first_sample: int, num_samples: int) -> tuple[dict[str, Tensor], Tensor]:
        generator = torch.Generator().manual_seed(settings.seed + first_sample)
        ids = torch.randint(VOCABULARY, (2, num_samples, length), generator=generator)
        return {"input_ids": ids[0]}, ids[1]

    factory = partial(build, settings.model, length)
    example = {"input_ids": torch.zeros(1, length, dtype=torch.long)}
    chain = ChainModel.from_module(factory, example, name=settings.model)
    return TrainingTask(chain, loss, batch, num_loss_tokens=lambda num_samples: num_samples * length)
