"""The model of both comparisons: an embedding, transformer blocks and a head, as an nn.Sequential."""

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hetpipe.models.chain import ChainModel

SEED = 0


@dataclass(frozen=True, slots=True)
class Encoder:
    """A model and its data; without blocks, Linears of 8 x 8, whose computation is next to nothing."""

    blocks: int | None = 8
    width: int = 256
    length: int = 128
    vocabulary: int = 1000
    linears: int = 1  # where there are no blocks

    def build(self) -> nn.Sequential:
        if self.blocks is None:
            return nn.Sequential(*(nn.Linear(8, 8) for _ in range(self.linears)))
        block = partial(
            nn.TransformerEncoderLayer, self.width, 4, 4 * self.width,
            dropout=0.0, activation="gelu", batch_first=True, norm_first=True,
        )  # fmt: skip
        head = nn.Linear(self.width, self.vocabulary)
        return nn.Sequential(
            nn.Embedding(self.vocabulary, self.width), *(block() for _ in range(self.blocks)), head
        )

    def chain(self) -> ChainModel:
        return ChainModel.from_module(self.build, self.batch(1)[0], name="encoder")

    def batch(self, num_samples: int) -> tuple[Tensor, Tensor]:
        """Return inputs and labels: token ids [samples, length], or numbers [samples, 8]."""
        generator = torch.Generator().manual_seed(SEED)
        if self.blocks is None:
            return torch.randn(num_samples, 8, generator=generator), torch.zeros(num_samples, 8)
        shape = (num_samples, self.length)
        ids = torch.randint(self.vocabulary, shape, generator=generator)
        return ids, torch.randint(self.vocabulary, shape, generator=generator)

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        if self.blocks is None:
            return F.mse_loss(outputs, labels, reduction="sum")
        return F.cross_entropy(outputs.flatten(0, 1), labels.flatten(), reduction="sum")

    @property
    def terms_of_sample(self) -> int:
        """How many losses of a sample are summed: one a token, or one a number."""
        return 8 if self.blocks is None else self.length
