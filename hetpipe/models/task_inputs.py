"""What a model of a task takes: the names and shapes of its inputs, and samples without content."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cost_model.errors import InputError
from hetpipe.models.tasks import Task

IMAGES, TOKENS, MASK, TYPES = "pixel_values", "input_ids", "attention_mask", "token_type_ids"
POSITIONS = "position_ids"


@dataclass(frozen=True, slots=True)
class InputShape:
    """The inputs of a model, of one sample.

    image: channels, height and width, of a model that reads images. padding: the token that fills up texts of
    a classifier; token_types: whether it tells the second of two texts from the first. packed: whether a row
    holds several samples, whose positions begin anew (`hetpipe.models.packed_inputs`).
    """

    task: Task
    image: tuple[int, int, int] = (0, 0, 0)
    padding: int = 0
    token_types: bool = False
    packed: bool = False

    @classmethod
    def of(cls, task: Task, config: Any, where: object) -> "InputShape":
        """Return what a configuration of transformers says; where: its file, for errors.

        Raises: InputError if it lacks the size of images, or the token that fills up texts.
        """
        if not task.reads_text:
            return cls(task, _image_shape(config, where))
        if not task.pads:
            return cls(task)
        padding = getattr(config, "pad_token_id", None)
        if not isinstance(padding, int):
            raise InputError(
                f"{where}: names no pad_token_id, the token that shorter texts are filled up with; add it"
            )
        types = getattr(config, "type_vocab_size", 0)
        return cls(task, padding=padding, token_types=isinstance(types, int) and types > 1)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the inputs."""
        if not self.task.reads_text:
            return (IMAGES,)
        beside = ((MASK, self.task.pads), (TYPES, self.token_types), (POSITIONS, self.packed))
        return (TOKENS, *(name for name, is_taken in beside if is_taken))

    @property
    def labels_tokens(self) -> bool:
        """Return whether a sample has a label for each token."""
        return self.task is not Task.SEQUENCE_CLASSIFICATION and self.task.reads_text

    def inputs(self, ids: Tensor) -> dict[str, Tensor]:
        """Return inputs of samples with these tokens [samples, seq]; of images as many, drawn at random."""
        if not self.task.reads_text:
            return {IMAGES: torch.randn(len(ids), *self.image)}
        made: Mapping[str, Tensor] = {
            TOKENS: ids,
            MASK: torch.ones_like(ids),
            TYPES: torch.zeros_like(ids),
            POSITIONS: positions_of(ids, [ids.shape[1] * 2 // 3, ids.shape[1] - ids.shape[1] * 2 // 3]),
        }
        return {name: made[name] for name in self.names}

    def labels(self, ids: Tensor, num_labels: int) -> Tensor:
        """Return labels of samples with these tokens: themselves, or other numbers for a classifier."""
        if not self.task.classifies:
            return ids.clone()
        each = ids if self.labels_tokens else ids[:, 0]
        return each % num_labels


def positions_of(ids: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return the positions of tokens [rows, seq] that are samples of these lengths, one after the other.

    >>> positions_of(torch.zeros(1, 5, dtype=torch.long), [3, 2])
    tensor([[0, 1, 2, 0, 1]])
    """
    positions = torch.cat([torch.arange(length, device=ids.device) for length in lengths])
    return positions.expand(ids.shape).contiguous()


def _image_shape(config: Any, where: object) -> tuple[int, int, int]:
    size, channels = getattr(config, "image_size", None), getattr(config, "num_channels", None)
    sides = (size, size) if isinstance(size, int) else size
    if not (
        isinstance(sides, tuple | list) and len(sides) == 2 and all(isinstance(side, int) for side in sides)
    ):
        raise InputError(f"{where}: image_size is {size!r}; give the height and width of images")
    if not isinstance(channels, int):
        raise InputError(f"{where}: num_channels is {channels!r}; give 1 for grey images, 3 for colours")
    return channels, sides[0], sides[1]
