"""The loss of a microbatch, as a sum, so that the plan cannot change its weight."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from hetpipe.models.names import Task

IGNORED_LABEL = -100

Loss = Callable[[Tensor, Tensor], Tensor]
"""Sum of the losses of a microbatch's tokens, from outputs and labels."""


def loss_sum(task: Task, logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy summed over tokens whose label is not -100, in float32 or better.

    logits: [microbatch, seq, vocabulary]; labels: [microbatch, seq], for a causal model the input itself
    (position t is scored against label t + 1).

    >>> logits = torch.zeros(1, 3, 4)
    >>> loss_sum(Task.CAUSAL_LM, logits, torch.tensor([[0, 1, -100]]))  # one token, log(4)
    tensor(1.3863)
    """
    if task is Task.CAUSAL_LM:
        logits, labels = logits[:, :-1], labels[:, 1:]
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]).to(dtype),
        labels.reshape(-1),
        ignore_index=IGNORED_LABEL,
        reduction="sum",
    )
