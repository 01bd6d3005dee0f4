"""The loss of a microbatch, as a sum, so that the plan cannot change its weight."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from hetpipe.models.tasks import Task

IGNORED_LABEL = -100

Loss = Callable[[Tensor, Tensor], Tensor]
"""Sum of the losses of a microbatch's tokens, from outputs and labels."""


def scored(task: Task, outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return what is scored of outputs [microbatch, seq, width], and against which labels [microbatch, seq].

    Both token by token: [tokens, width] and [tokens]. Where a text answers, outputs are [microbatch, seq, 2],
    for begin and end, and labels [microbatch, 2 or more] the tokens that are these: each of the two is one
    choice among all tokens, [2 x microbatch, seq] and [2 x microbatch].
    """
    if task.answers:
        return outputs.transpose(1, 2).flatten(0, 1), labels[:, :2].reshape(-1)
    if task is Task.CAUSAL_LM:
        outputs, labels = outputs[:, :-1], labels[:, 1:]
    return outputs.reshape(-1, outputs.shape[-1]), labels.reshape(-1)


def token_loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy of tokens whose label is not -100, summed in float32 or better.

    logits: [tokens, vocabulary]; labels: [tokens].
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return functional.cross_entropy(logits.to(dtype), labels, ignore_index=IGNORED_LABEL, reduction="sum")


def loss_sum(task: Task, logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy summed over tokens whose label is not -100, in float32 or better.

    logits: [microbatch, seq, vocabulary]; labels: [microbatch, seq], for a causal model the input itself
    (position t is scored against label t + 1). Of answers see `scored`.

    >>> logits = torch.zeros(1, 3, 4)
    >>> loss_sum(Task.CAUSAL_LM, logits, torch.tensor([[0, 1, -100]]))  # one token, log(4)
    tensor(1.3863)
    """
    return token_loss_sum(*scored(task, logits, labels))
