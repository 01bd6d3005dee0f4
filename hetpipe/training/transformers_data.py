"""Data written for the Trainer of transformers, as the function of position that the ranks read."""

import inspect
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from pydantic import JsonValue
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

from cost_model.errors import InputError
from hetpipe.data.dataset import IGNORE_LABEL
from hetpipe.data.user_data import LABELS
from hetpipe.models.block_structure import call_options, logits_of

Collator = Callable[[list[Any]], Mapping[str, Tensor]]
ALIKE_AFTER = 64
"""Of so many samples of one shape it is concluded that all have it."""
LOOKED_AT = 1024
"""Samples among which one has to have a label that counts."""


@dataclass(frozen=True, slots=True)
class CollatedData:
    """Samples in the order of transformers' Trainer, collated: called with a first sample and a number.

    An epoch has whole steps: what its last one lacks is filled up with samples none of whose labels counts.

    dataset: samples by index. columns: which of their entries the model takes, None for all. batch: samples
    of a step. seed: of the order of an epoch, None for that of the data. whole: what is left of an epoch
    after groups of so many samples is left out. draws: keys what the dataset and the collator draw at random,
    None where they draw nothing.
    """

    dataset: Any
    collator: Collator
    columns: tuple[str, ...] | None
    batch: int
    seed: int | None = None
    whole: int = 1
    draws: int | None = None

    @classmethod
    def of(cls, dataset: Any, collator: Collator, key: int, **others: Any) -> "CollatedData":
        """Return the data, after a look whether anything is drawn at random, which `key` then decides."""
        data = cls(dataset, collator, **others)
        before = _random_states()
        data.samples(0, 1)
        return data if before == _random_states() else replace(data, draws=key)

    def __len__(self) -> int:
        return self.steps * self.batch

    @property
    def steps(self) -> int:
        """Return the steps of an epoch."""
        return -(-self.count // self.batch)

    @property
    def count(self) -> int:
        """Return the samples of an epoch."""
        return len(self.dataset) // self.whole * self.whole

    def order(self) -> dict[str, JsonValue]:
        """Return what decides which sample is read where."""
        shuffled: dict[str, JsonValue] = {} if self.seed is None else {"data_seed": self.seed}
        return {"num_samples": self.count, "shuffle": self.seed is not None, **shuffled}

    def __call__(self, first_sample: int, num_samples: int) -> tuple[Mapping[str, Tensor], Tensor]:
        places = [self._index(position) for position in range(first_sample, first_sample + num_samples)]
        indices = [place for place in places if place is not None]
        collated = self._collated(indices or [0], first_sample)
        labels = collated[LABELS]
        inputs = {name: value for name, value in collated.items() if name != LABELS}
        if not indices:
            labels = torch.full_like(labels, IGNORE_LABEL)
        if lacking := num_samples - len(labels):
            inputs = {name: _filled(value, value[0], lacking) for name, value in inputs.items()}
            labels = _filled(labels, torch.full_like(labels[0], IGNORE_LABEL), lacking)
        return inputs, labels

    def longest(self) -> "CollatedData":
        """Return the data that begin with their longest sample, by which a model is measured."""
        lengths = [self.length(index) for index in range(min(ALIKE_AFTER, len(self.dataset)))]
        if len(set(lengths)) > 1:
            lengths += [self.length(index) for index in range(len(lengths), len(self.dataset))]
        first = lengths.index(max(lengths))
        return replace(self, dataset=[self.dataset[first]], batch=1, seed=None, whole=1)

    def samples(self, first: int, count: int) -> dict[str, Any]:
        """Return samples by their index, collated as they are."""
        return self.beside(range(first, min(first + count, len(self.dataset))))

    def beside(self, indices: Sequence[int]) -> dict[str, Any]:
        """Return these samples, collated as they are."""
        return self._collated(indices, indices[0])

    def _index(self, position: int) -> int | None:
        epoch, offset = divmod(position, len(self))
        if offset >= self.count:
            return None
        return offset if self.seed is None else epoch_indices(self.seed, epoch, len(self.dataset))[offset]

    def _collated(self, indices: Sequence[int], key: int) -> dict[str, Any]:
        if self.draws is not None:  # and it is seen by torch's generator that reading draws
            seed = int(np.random.SeedSequence((self.draws, key)).generate_state(1)[0])
            torch.manual_seed(seed)
            np.random.seed(seed)
            random.seed(seed)
        found = dict(self.collator([self._row(index) for index in indices]))
        if LABELS not in found:
            raise InputError(f"data_collator gives {sorted(found)}; it has to give {LABELS!r} too")
        return found

    def _row(self, index: int) -> Any:
        row = self.dataset[index]
        if self.columns is None or not isinstance(row, Mapping):
            return row
        return {name: value for name, value in row.items() if name in self.columns}

    def length(self, index: int) -> int:
        """Return how many numbers the longest entry of a sample has."""
        row = self._row(index)
        sizes = [
            len(value)
            for value in (row.values() if isinstance(row, Mapping) else ())
            if hasattr(value, "__len__")
            and not isinstance(value, str)
            and getattr(value, "ndim", 1) != 0  # a number of torch says it has one
        ]
        return max(sizes) if sizes else self._collated_length(index)

    def _collated_length(self, index: int) -> int:
        """Return how many numbers the largest tensor has that the collator makes of a sample."""
        tensors = [value for value in self.samples(index, 1).values() if isinstance(value, Tensor)]
        return max((value.numel() for value in tensors), default=1)


def _random_states() -> tuple[bytes, bytes, object]:
    numbers = np.random.get_state(legacy=False)
    return torch.random.get_rng_state().numpy().tobytes(), repr(numbers).encode(), random.getstate()


@lru_cache(maxsize=2)
def epoch_indices(seed: int, epoch: int, count: int) -> list[int]:
    """Return the order in which transformers' Trainer reads an epoch, by accelerate's sampler."""
    generator = torch.Generator()
    generator.manual_seed(seed + epoch)
    return torch.randperm(count, generator=generator).tolist()


def _filled(values: Tensor, filler: Tensor, count: int) -> Tensor:
    return torch.cat([values, filler.expand(count, *filler.shape)])


def taken_columns(model: nn.Module, label_names: Sequence[str]) -> tuple[str, ...]:
    """Return the entries of a sample that the model takes, as transformers' `remove_unused_columns`."""
    return (*_arguments(model), "label", "label_ids", *label_names)


def _arguments(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    """Return what the forward takes, of a model around which peft is that of the model, as transformers."""
    base = getattr(model, "get_base_model", None)
    return inspect.signature((base() if callable(base) else model).forward).parameters


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """The cross-entropy of labels that are not -100, summed; shifts: each is of the position before it.

    counts_first: whether transformers counts the first label of a sample too, which nothing is scored by: it
    does for models whose class it does not know to shift, such as GPT-2's.
    """

    shifts: bool
    counts_first: bool = False

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the sum for outputs [samples, ..., classes] and labels [samples, ...]."""
        if self.shifts:
            outputs, labels = outputs[:, :-1], labels[:, 1:]
        scores = outputs.reshape(-1, outputs.shape[-1])
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        return functional.cross_entropy(
            scores, labels.reshape(-1), ignore_index=IGNORE_LABEL, reduction="sum"
        )

    def terms(self, labels: Tensor) -> int:
        """Return by how many labels the sum is divided."""
        skipped = self.shifts and not self.counts_first
        return int(((labels[:, 1:] if skipped else labels) != IGNORE_LABEL).sum())


def loss_of(model: nn.Module, data: CollatedData) -> TokenLoss:
    """Return the loss that the model computes by itself, found by computing it for two samples.

    It is computed for labels of unlike classes, too: weights of classes do not show where all are of one; and
    for unlike numbers that a sample or a label has beside, as the model trains, and for samples that are
    filled up to the length of another one.

    Raises: InputError if it is none that ranks can add up, or the first samples have no label that counts.
    """
    device = next(model.parameters()).device
    inputs = _on(device, _labelled(data))
    own, logits = _computed(model, inputs)
    labels = inputs[LABELS]
    for loss in (TokenLoss(shifts=True), TokenLoss(shifts=False)):
        if not _fits(loss, logits, labels) or not _is_mean(loss, own, logits, labels):
            continue
        unlike = {name: _numbered(value, labels) for name, value in inputs.items()}
        unlike[LABELS] = _unlike(labels, logits.shape[-1])
        filled = _on(device, _of_unlike_lengths(data))
        if all(
            _is_mean(loss, *_computed(model, tried, trains=trains), tried[LABELS])
            for tried, trains in ((unlike, True), (filled, False))
            if loss.terms(tried[LABELS])
        ):
            return replace(loss, counts_first=loss.shifts and _counts_first(model))
    raise InputError(
        f"the loss of a {type(model).__name__} is not the cross-entropy of its logits and labels, which is "
        "what can be added up over devices; give hetpipe.Trainer a loss of your own"
    )


def _on(device: torch.device, found: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: value.to(device) for name, value in found.items() if isinstance(value, Tensor)}


@torch.no_grad()
def _computed(
    model: nn.Module, inputs: Mapping[str, Tensor], *, trains: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the loss that the model computes of samples with labels, and its logits; it stays as it is.

    Raises: InputError if it computes none, or has no class or row for what the samples have.
    """
    was, buffers = model.training, [(value, value.clone()) for value in model.buffers()]
    model.train(trains and not any(isinstance(each, _BatchNorm) for each in model.modules()))
    try:
        with torch.random.fork_rng([]):
            output = model(**inputs, **call_options(model))
    except IndexError as error:
        raise InputError(
            f"a {type(model).__name__} does not take the samples: {error}; give it labels and numbers below "
            "its counts of classes and rows"
        ) from None
    finally:
        model.train(was)
        for value, before in buffers:
            value.copy_(before)
    own = getattr(output, "loss", None)
    if not isinstance(own, Tensor):
        raise InputError(
            f"a {type(model).__name__} gives no output with a loss of its labels; give hetpipe.Trainer a "
            "loss of your own"
        )
    return own, logits_of(output)


def _is_mean(loss: TokenLoss, own: Tensor, logits: Tensor, labels: Tensor) -> bool:
    mean = loss(logits, labels) / loss.terms(labels)
    return bool(torch.isclose(mean, own.to(mean.dtype), rtol=1e-3 if own.dtype.itemsize < 4 else 1e-5))


def _unlike(labels: Tensor, num_classes: int) -> Tensor:
    """Return labels of which those that count are of the first classes, every other spread over all."""
    counts = labels != IGNORE_LABEL
    places = torch.arange(int(counts.sum()), device=labels.device)
    spread = places * (num_classes - 1) // max(1, len(places) - 1)
    found = labels.clone()
    found[counts] = torch.where(places % 2 == 1, spread, (places // 2) % num_classes).to(labels.dtype)
    return found


def _numbered(values: Tensor, labels: Tensor) -> Tensor:
    """Return unlike numbers in place of those that each sample or each label has one of, as weights."""
    of_each = values.shape in (labels.shape, labels.shape[:1], (labels.shape[0], 1))
    if not (of_each and values.is_floating_point()):
        return values
    return torch.linspace(0.5, 1.0, values.numel()).reshape(values.shape).to(values)


def _of_unlike_lengths(data: CollatedData) -> dict[str, Any]:
    """Return the shortest of the first samples and the last one, side by side."""
    shortest = min(range(min(ALIKE_AFTER, len(data.dataset))), key=data.length)
    return data.beside((shortest, len(data.dataset) - 1))


def _labelled(data: CollatedData) -> dict[str, Any]:
    """Return the first two samples, side by side, of which a label counts."""
    for first in range(0, min(LOOKED_AT, len(data.dataset)), 2):
        found = data.samples(first, 2)
        labels = found[LABELS]
        scored = labels[:, 1:] if labels.dim() > 1 and labels.shape[1] > 1 else labels
        if (scored != IGNORE_LABEL).any():
            return found
    raise InputError(
        f"the first {min(LOOKED_AT, len(data.dataset))} samples have no label that counts, all are "
        f"{IGNORE_LABEL}; give labels, or leave out the samples without"
    )


def accepts_count(model: nn.Module) -> bool:
    """Return whether transformers tells the model how many labels a step has, by its own rule."""
    accepts = getattr(model, "accepts_loss_kwargs", None)
    if accepts is not None:
        return bool(accepts)
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in _arguments(model).values())


def ignores_count(model: nn.Module, data: CollatedData) -> bool:
    """Return whether the model divides by its own labels though transformers tells it those of a step."""
    if not accepts_count(model):
        return False
    inputs = _on(next(model.parameters()).device, _labelled(data))
    counted = {**inputs, "num_items_in_batch": inputs[LABELS].new_tensor(2**20)}
    own, told = (_computed(model, given)[0] for given in (inputs, counted))
    return bool(torch.isclose(own, told))


def _counts_first(model: nn.Module) -> bool:
    known = LOSS_MAPPING.get(getattr(model, "loss_type", None)) is ForCausalLMLoss
    return accepts_count(model) and not known


def _fits(loss: TokenLoss, logits: Tensor, labels: Tensor) -> bool:
    if labels.is_floating_point() or logits.shape[:-1] != labels.shape or (loss.shifts and labels.dim() < 2):
        return False
    return loss.terms(labels) > 0 and int(labels.max()) < logits.shape[-1]
