"""Held-out samples, as of texts: each of them once, the same whenever their loss is computed."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from hetpipe.data.chats import ChatDataset
from hetpipe.data.dataset import IGNORE_LABEL, Dataset

SEED = 0
"""Of what is masked: another seed of training has the same held-out samples."""


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Held-out samples, each once.

    num_loss_tokens: how many terms the loss of all of them counts. batch: (first sample, number) -> inputs by
    name and labels, each [samples, ...]; past the end no label counts.
    """

    num_samples: int
    num_loss_tokens: int
    batch: Callable[[int, int], tuple[Mapping[str, Tensor], Tensor]]

    @classmethod
    def of_texts(cls, dataset: Dataset | ChatDataset) -> "HeldOut":
        """Return the samples of held-out texts or chats, in the order of this module's seed."""
        count = dataset.num_sequences
        return cls(count, dataset.epoch_loss_tokens, partial(_of_texts, dataset))


def _of_texts(
    dataset: Dataset | ChatDataset, first_sample: int, num_samples: int
) -> tuple[Mapping[str, Tensor], Tensor]:
    data = dataset.batch(first_sample, num_samples)
    labels = torch.from_numpy(data.labels)
    labels[max(0, dataset.num_sequences - first_sample) :] = IGNORE_LABEL
    return {"input_ids": torch.from_numpy(data.input_ids)}, labels
