"""What a model of a task takes: the names and shapes of its inputs, and samples without content."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cost_model.errors import InputError
from hetpipe.models.tasks import Task

IMAGES, TOKENS, MASK, TYPES = "pixel_values", "input_ids", "attention_mask", "token_type_ids"
POSITIONS, DECODER = "position_ids", "decoder_input_ids"

_BEGIN_WITH_LAST = ("mbart", "plbart")
"""Model types whose decoder begins with the last token of its target (their `shift_tokens_right`)."""


@dataclass(frozen=True, slots=True)
class InputShape:
    """The inputs of a model, of one sample.

    image: channels, height and width, of a model that reads images. padding: the token that fills up texts,
    where they are; token_types: whether it tells the second of two texts from the first. packed: whether a
    row holds several samples, whose positions begin anew (`hetpipe.models.packed_inputs`).
    start, end: of a translation, the token with which the decoder begins, None: the last of its target; and
    the one that ends a text.
    """

    task: Task
    image: tuple[int, int, int] = (0, 0, 0)
    padding: int = 0
    token_types: bool = False
    packed: bool = False
    start: int | None = None
    end: int = 0

    @classmethod
    def of(cls, task: Task, config: Any, where: object) -> "InputShape":
        """Return what a configuration of transformers says; where: its file, for errors.

        Raises: InputError if it lacks the size of images, or the tokens that fill up texts, begin or end
        them, or is of an encoder-decoder that is not trained here.
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
        if task.translates:
            _check_translator(config, where)
            starts = None if config.model_type in _BEGIN_WITH_LAST else "decoder_start_token_id"
            return cls(
                task,
                padding=padding,
                start=None if starts is None else _token(config, starts, where),
                end=_token(config, "eos_token_id", where),
            )
        types = getattr(config, "type_vocab_size", 0)
        return cls(task, padding=padding, token_types=isinstance(types, int) and types > 1)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the inputs."""
        if not self.task.reads_text:
            return (IMAGES,)
        beside = (
            (MASK, self.task.pads),
            (TYPES, self.token_types),
            (POSITIONS, self.packed),
            (DECODER, self.task.translates),
        )
        return (TOKENS, *(name for name, is_taken in beside if is_taken))

    @property
    def labels_tokens(self) -> bool:
        """Return whether a sample has a label for each token."""
        return self.task.reads_text and not (self.task.answers or self.task is Task.SEQUENCE_CLASSIFICATION)

    def inputs(self, ids: Tensor) -> dict[str, Tensor]:
        """Return inputs of samples with these tokens [samples, seq]; of images as many, drawn at random."""
        if not self.task.reads_text:
            return {IMAGES: torch.randn(len(ids), *self.image)}
        before = ids.roll(1, 1)  # of a target that is the source
        if self.start is not None:
            before[:, 0] = self.start
        made: Mapping[str, Tensor] = {
            TOKENS: ids,
            MASK: torch.ones_like(ids),
            TYPES: torch.zeros_like(ids),
            POSITIONS: positions_of(ids, [ids.shape[1] * 2 // 3, ids.shape[1] - ids.shape[1] * 2 // 3]),
            DECODER: before,
        }
        return {name: made[name] for name in self.names}

    def labels(self, ids: Tensor, num_labels: int) -> Tensor:
        """Return labels of samples with these tokens: themselves, or other numbers for a classifier.

        Of answers two places [samples, 2] in the first half.
        """
        if self.task.answers:
            return ids[:, :2] % (ids.shape[1] // 2)
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


def _token(config: Any, key: str, where: object) -> int:
    """Return a token of a configuration, the first of several.

    Raises: InputError if there is none in the vocabulary.
    """
    value = getattr(config, key, None)
    token = value[0] if isinstance(value, list) and value else value
    size = config.vocab_size
    if not isinstance(token, int) or not 0 <= token < size:
        raise InputError(f"{where}: {key} is {value!r}; give the number of a token, from 0 to {size - 1}")
    return token


def _check_translator(config: Any, where: object) -> None:
    """Refuse what has a vocabulary for each side, or leaves out layers at random.

    Raises: InputError naming the key.
    """
    _token(config, "pad_token_id", where)
    for key in ("decoder_vocab_size", "src_vocab_size"):
        if getattr(config, key, None) not in (None, config.vocab_size):
            raise InputError(
                f"{where}: {key} is {getattr(config, key)}, the other vocabulary has {config.vocab_size}; "
                "one for both sides is taken here; train it from Python: hetpipe.Trainer"
            )
    for key in ("encoder_layerdrop", "decoder_layerdrop"):
        if getattr(config, key, 0):
            raise InputError(
                f"{where}: {key} is {getattr(config, key)}, and layers that are left out at random cannot be "
                "split; set it to 0"
            )


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
