"""The loss in chunks of tokens, so that of all logits only those of one chunk are there at a time.

With a large vocabulary the logits of a microbatch, in float32 and several times over, are most of what the
last stage needs. Here the projection to the vocabulary is left to the loss: its forward adds up the losses
of chunk after chunk, its backward projects each chunk again, as recompute does. That logits need never all
be there is the idea of Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models", ICLR 2025, who
fuse it into one kernel; by chunks it is in Luo et al., "Mini-Sequence Transformer", NeurIPS 2024.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from cost_model.errors import InputError
from hetpipe.models.block_structure import logits_of
from hetpipe.models.loss import scored, token_loss_sum
from hetpipe.models.partial_model import LayerModel
from hetpipe.models.tasks import Task


class ChunkedLoss:
    """The loss of a model whose last projection is left to it; a `Loss` of what enters that projection.

    Owns the forward of the projection, which inside the model passes on what it is given.
    """

    def __init__(self, task: Task, model: LayerModel, num_chunks: int) -> None:
        """Take over the projection of a model that owns its last layer; no one may have done so before.

        Raises: InputError if the model has none that can be cut into tokens.
        """
        self._task = task
        self._num_chunks = num_chunks
        self._place, self._lowered = model.device_type, model.lowered
        projection = _projection(model.model)
        self._project = projection.forward
        self._weights = [value for value in projection.parameters() if value.requires_grad]
        self._passed: Tensor | None = None
        projection.__dict__["forward"] = self._pass_on
        model.model.register_forward_hook(self._check)

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the sum of the losses of a microbatch.

        outputs: [microbatch, seq, width], what enters the projection; labels: as for `loss_sum`.
        """
        hidden, labels = scored(self._task, outputs, labels)
        loss: Tensor = _Summed.apply(self, labels, hidden, *self._weights)  # type: ignore[no-untyped-call]
        return loss

    def pieces(self, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Yield the chunks of tensors of equal length."""
        yield from zip(*(tensor.chunk(self._num_chunks) for tensor in tensors), strict=True)

    def of_piece(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of a chunk, as the model and `loss_sum` compute it."""
        return token_loss_sum(self.logits(hidden), labels)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [..., vocabulary] of what enters the projection [..., width]."""
        lower = self._lowered is not None
        with torch.autocast(self._place, self._lowered) if lower else nullcontext():
            logits: Tensor = self._project(hidden)
        return logits

    def _pass_on(self, hidden: Tensor) -> Tensor:
        self._passed = hidden
        return hidden

    def _check(self, model: nn.Module, _: Any, output: Any) -> None:
        """Check that the model does nothing with its logits but return them."""
        passed, self._passed = self._passed, None
        if logits_of(output) is not passed:
            raise InputError(
                f"{type(model).__name__} does more with its logits than to return them, so its loss cannot "
                "be computed in chunks; leave out --loss-chunks"
            )


class _Summed(torch.autograd.Function):
    """The sum of the losses of all chunks."""

    @staticmethod
    def forward(ctx: Any, loss: ChunkedLoss, labels: Tensor, hidden: Tensor, *weights: Tensor) -> Tensor:
        ctx.loss, ctx.weights = loss, weights
        ctx.save_for_backward(labels, hidden)
        losses = [loss.of_piece(piece, scores) for piece, scores in loss.pieces(hidden, labels)]
        return torch.stack(losses).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        labels, hidden = ctx.saved_tensors
        for_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[2] else None
        for_weights: list[Tensor] = []
        rows = 0
        for piece, scores in ctx.loss.pieces(hidden, labels):
            piece = piece.detach().requires_grad_(for_hidden is not None)
            with torch.enable_grad():
                value = ctx.loss.of_piece(piece, scores)
            wanted = [*ctx.weights, piece] if for_hidden is not None else list(ctx.weights)
            found = list(torch.autograd.grad(value, wanted, gradient))
            del value
            if for_hidden is not None:
                for_hidden[rows : rows + len(piece)] = found.pop()
            rows += len(piece)
            if for_weights:
                torch._foreach_add_(for_weights, found)
            else:
                for_weights = found
        return (None, None, for_hidden, *for_weights)


def _projection(model: nn.Module) -> nn.Module:
    """Return the module that projects to the vocabulary.

    Raises: InputError if there is none, or it drops entries, whose masks are of whole samples.
    """
    name = type(model).__name__
    find = getattr(model, "get_output_embeddings", None)
    projection = find() if callable(find) else None
    if not isinstance(projection, nn.Module):
        raise InputError(
            f"{name} names no projection to its vocabulary (get_output_embeddings), so its loss cannot be "
            "computed in chunks; leave out --loss-chunks"
        )
    if any(isinstance(part, nn.Dropout) and part.p > 0.0 for part in projection.modules()):
        raise InputError(
            f"{name} has dropout inside its projection to the vocabulary, so its loss cannot be computed in "
            "chunks; leave out --loss-chunks, or set that dropout to 0"
        )
    return projection
