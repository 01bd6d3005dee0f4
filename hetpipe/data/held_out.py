"""Held-out texts: each of their samples once, the same whenever their loss is computed."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hetpipe.data.dataset import IGNORE_LABEL, Dataset

SEED = 0
"""Of what is masked: another seed of training has the same held-out samples."""


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The samples of held-out texts, in the order of a `Dataset` of this module's seed."""

    dataset: Dataset

    @property
    def num_samples(self) -> int:
        return self.dataset.num_sequences

    @property
    def num_loss_tokens(self) -> int:
        """Return how many tokens the loss counts."""
        return self.dataset.num_loss_tokens(self.num_samples)

    def batch(self, first_sample: int, num_samples: int) -> tuple[Mapping[str, Tensor], Tensor]:
        """Return inputs by name and labels, each [samples, ...]; past the end no label counts."""
        data = self.dataset.batch(first_sample, num_samples)
        labels = torch.from_numpy(data.labels)
        labels[max(0, self.num_samples - first_sample) :] = IGNORE_LABEL
        return {"input_ids": torch.from_numpy(data.input_ids)}, labels
