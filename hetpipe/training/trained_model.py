"""A trained model in this process: what it gives for samples, and their loss."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from cost_model.errors import InputError
from hetpipe.data.task import Batch
from hetpipe.data.user_data import batch_in, batch_of, has_length
from hetpipe.models.block_structure import Inputs, whole_logits
from hetpipe.models.loss import Loss
from hetpipe.models.mixed_precision import lowered_dtype


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """A module with its trained weights, which computes where these are; precision: what it was trained in.

    It is in evaluation mode while it computes, so nothing is dropped.
    """

    module: nn.Module
    precision: str

    def outputs(self, data: object, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Give the outputs and the labels of all samples, each once in their order, batch by batch.

        Raises: InputError for data without a length.
        """
        if not has_length(data):
            raise InputError(f"the data are a {type(data).__name__}; give a data set with a length")
        weights = list(self.module.parameters())
        weight = next((value for value in weights if value.requires_grad), weights[0])
        dtype = weight.dtype if weight.is_floating_point() else torch.get_default_dtype()
        read: Batch = partial(batch_in, dtype, batch_of(data, 0, False))
        with _evaluating(self.module), _widened(self.module, self.precision):
            for first in range(0, len(data), batch_size):
                inputs, labels = read(first, min(batch_size, len(data) - first))
                placed = {name: value.to(weight.device) for name, value in inputs.items()}
                yield self._output(placed, weight.device.type), labels.to(weight.device)

    def mean_loss(
        self, data: object, batch_size: int, loss: Loss, count_terms: Callable[[Tensor], int] | None
    ) -> float:
        """Return the loss of all samples over its terms, one a sample where nothing counts them.

        Raises: InputError for data without a length, or of which nothing counts.
        """
        total, terms = 0.0, 0
        for outputs, labels in self.outputs(data, batch_size):
            total += float(loss(outputs, labels))
            terms += len(labels) if count_terms is None else count_terms(labels)
        if terms == 0:
            raise InputError("the data have no label that counts; there is no loss of them")
        return total / terms

    @torch.no_grad()
    def _output(self, inputs: Inputs, device_type: str) -> Tensor:
        lowered = lowered_dtype(self.precision)
        if lowered is None:
            return whole_logits(self.module, inputs)
        with torch.autocast(device_type, lowered):
            return whole_logits(self.module, inputs).float()


@contextmanager
def _widened(module: nn.Module, precision: str) -> Iterator[None]:
    """Let frozen weights in 16 bits be in float32 where those that are trained are, as they multiply then."""
    values = [value for value in module.parameters() if value.is_floating_point()]
    trained = {value.dtype for value in values if value.requires_grad}
    narrow = [value for value in values if not value.requires_grad and value.dtype.itemsize == 2]
    if lowered_dtype(precision) is not None or trained != {torch.float32}:
        narrow = []
    kept = [value.data for value in narrow]
    try:
        for value in narrow:
            value.data = value.data.float()
        yield
    finally:
        for value, data in zip(narrow, kept, strict=True):
            value.data = data


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    was = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(was)
