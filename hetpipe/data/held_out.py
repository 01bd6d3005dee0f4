"""Held-out samples: each of them once, the same whenever their loss is computed."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from hetpipe.data.dataset import IGNORE_LABEL
from hetpipe.data.kind import Samples

SEED = 0
"""Of what is masked: another seed of training has the same held-out samples."""


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Held-out samples, each once.

    num_loss_tokens: how many terms the loss of all of them counts. batch: (first sample, number) -> inputs by
    name and labels, each [samples, ...]; past the end no label counts. sha256: of the data, "" where nobody
    knows.
    """

    num_samples: int
    num_loss_tokens: int
    batch: Callable[[int, int], tuple[Mapping[str, Tensor], Tensor]]
    sha256: str = ""

    @classmethod
    def of(cls, samples: Samples, sha256: str = "") -> "HeldOut":
        """Return samples of a kind of data, each once, in the order of their seed."""
        return cls(samples.num_samples, samples.num_terms, partial(_counted, samples), sha256)


def as_tensors(samples: Samples, first_sample: int, num_samples: int) -> tuple[Mapping[str, Tensor], Tensor]:
    """Return samples at these positions: inputs by name and labels."""
    data = samples.batch(first_sample, num_samples)
    inputs = {name: torch.from_numpy(value) for name, value in data.inputs.items()}
    return inputs, torch.from_numpy(data.labels)


def _counted(samples: Samples, first_sample: int, num_samples: int) -> tuple[Mapping[str, Tensor], Tensor]:
    inputs, labels = as_tensors(samples, first_sample, num_samples)
    labels[max(0, samples.num_samples - first_sample) :] = IGNORE_LABEL
    return inputs, labels
