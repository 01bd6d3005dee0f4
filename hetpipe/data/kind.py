"""What a kind of data is: it reads files, writes them into a run folder, and gives samples from there."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from hetpipe.data.special_tokens import SpecialTokens
from hetpipe.models.huggingface_folder import ModelFolder
from hetpipe.models.tasks import Task

if TYPE_CHECKING:
    from hetpipe.data.long_texts import Document
    from hetpipe.models.task_inputs import InputShape

IntArray: TypeAlias = npt.NDArray[np.int64]
Inputs: TypeAlias = Mapping[str, npt.NDArray[Any]]


class Learner(Protocol):
    """A model as far as data are read for it: a line of the table, or a `ModelSpec`."""

    @property
    def name(self) -> str: ...
    @property
    def task(self) -> Task: ...
    @property
    def folder(self) -> ModelFolder | None: ...


@dataclass(frozen=True, slots=True)
class Reading:
    """What data in a run folder are written and read with.

    inputs: what the model takes. vocabulary: of the run, where it reads text. template, processor: the files
    that say how chats are written, and how images are normalised. seed: of the order of samples. overlap: the
    tokens that windows of a context have in common, None where it is cut. end: the token that ends a text,
    where the model's folder says so. cuts_left: whether it says that texts are cut at their beginning.
    """

    model: Learner
    inputs: "InputShape"
    vocabulary: Tokenizer
    template: Path
    processor: Path
    sequence_length: int
    seed: int
    overlap: int | None = None
    end: str | None = None
    cuts_left: bool = False

    @property
    def special(self) -> SpecialTokens:
        """Return the special tokens of the vocabulary."""
        return SpecialTokens.of(self.vocabulary, self.end)


@dataclass(frozen=True, slots=True)
class StepData:
    """Consecutive samples of the training order, ready for the model; integers are int64.

    inputs: by the names that the model takes them under, each [batch, ...]. labels: [batch, ...], -100 where
    there is no loss. sample_positions: [batch], the position p in the training order.
    """

    inputs: Inputs
    labels: IntArray
    sample_positions: IntArray
    num_loss_tokens: int

    @property
    def input_ids(self) -> npt.NDArray[Any]:
        """Return the tokens: [batch, seq]."""
        return self.inputs["input_ids"]


class Samples(Protocol):
    """The endless training order over the samples of a folder.

    A position in it, the number of samples consumed, is the state to save, and alone decides the sample
    there: each epoch has each sample once, in an order of its own.
    """

    @property
    def num_samples(self) -> int:
        """Return the samples of one epoch."""

    @property
    def num_terms(self) -> int:
        """Return how many terms the loss of an epoch sums."""

    @property
    def count_terms(self) -> Callable[[Any], int] | None:
        """Return what counts the terms in the labels of a step; None where `num_loss_tokens` knows them."""

    def num_loss_tokens(self, num_samples: int) -> int:
        """Return how many terms the loss of any so many samples has, where it is the same for all."""

    def batch(self, first_sample: int, num_samples: int) -> StepData:
        """Return the samples at positions [first_sample, first_sample + num_samples)."""

    def notes(self) -> list[str]:
        """Return what a user should know of them, a line each."""


class CountedTerms:
    """Samples whose terms of the loss `count_terms` counts in the labels of each step."""

    __slots__ = ()

    def num_loss_tokens(self, num_samples: int) -> int:
        """Refuse to say: it depends on which samples."""
        raise AssertionError(num_samples)


class Content(Protocol):
    """What files of one kind hold, checked."""

    @property
    def sha256(self) -> str:
        """Return a hash of what was read, wherever the files lie."""

    @property
    def words(self) -> "Iterable[Document]":
        """Return the texts on which a vocabulary is trained where the model brings none."""

    def write(self, place: Path, reading: Reading) -> list[str]:
        """Write the files of the kind into a folder; return what a user should know of it.

        Raises: InputError if the content cannot be written for this model.
        """


class DataKind(Protocol):
    """A kind of data; `hetpipe.data.kinds.KINDS` lists them.

    name: the plural in a sentence. form: what to give, in a sentence. files: those that `Content.write`
    writes. is_brought: whether what `read` of no files gives is worth training on; layers are
    measured with it in any case. packs: whether its samples can share a row. fills: whether they are filled
    up to a length. is_held: whether files are held whole, however long they are.
    """

    name: str
    form: str
    tasks: tuple[Task, ...]
    files: tuple[str, ...]
    is_brought: bool
    packs: bool
    fills: bool
    is_held: bool

    def holds(self, path: Path) -> bool:
        """Return whether a file seems to be of this kind; false of one that cannot be read."""

    def read(self, paths: Sequence[Path], model: Learner) -> Content:
        """Read files.

        Raises: InputError naming file and place of what cannot be used.
        """

    def load(self, place: Path, reading: Reading) -> Samples:
        """Return the samples that `Content.write` wrote into a folder.

        Raises: InputError if they are missing, torn, or written with another vocabulary; or there is none.
        """
