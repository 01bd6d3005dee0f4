"""User-supplied samples as the function of position that the ranks read."""

import contextlib
from collections.abc import Mapping, Sequence, Sized
from functools import partial
from typing import Any, Protocol, TypeGuard, runtime_checkable

import numpy as np
import torch
from pydantic import JsonValue
from torch import Tensor

from cost_model.errors import InputError
from hetpipe.data.keyed_order import permuted
from hetpipe.data.task import Batch

LABELS = "labels"


def batch_of(data: object, seed: int, shuffle: bool) -> Batch:
    """Return data of any of the kinds that `own_task` takes as a function of position.

    Raises: InputError for another kind.
    """
    if is_data_set(data):
        if len(data) == 0:
            raise InputError("the data set is empty; give at least one sample")
        return partial(_read, data, seed if shuffle else None)
    if callable(data):
        return partial(_called, data)
    kind = type(data).__name__
    remedy = "its data set" if hasattr(data, "dataset") else "a data set with a length"
    raise InputError(
        f"the data are a {kind}, which has no samples by index; give {remedy}, or a function (first sample, "
        "count) -> (inputs, labels)"
    )


def is_data_set(data: object) -> TypeGuard[Sized]:
    """Return whether data have samples by index, and a number of them."""
    return hasattr(data, "__getitem__") and hasattr(data, "__len__")


def has_length(data: object) -> TypeGuard[Sized]:
    """Return whether data have an end: a data set, or a function that says how many samples it has."""
    return is_data_set(data) or (callable(data) and hasattr(data, "__len__"))


@runtime_checkable
class Ordered(Protocol):
    """Data, given as a function, that say what decides which sample is read where."""

    def order(self) -> Mapping[str, JsonValue]:
        """Return it by name, as checkpoints hold it."""


def order_of(data: object, shuffle: bool) -> dict[str, JsonValue]:
    """Return what decides which sample is read where, beside the seed, as far as it is known."""
    if isinstance(data, Ordered):
        return dict(data.order())
    found: dict[str, JsonValue] = {"num_samples": len(data)} if has_length(data) else {}
    return {**found, "shuffle": shuffle} if is_data_set(data) else found


def _called(function: Batch, first_sample: int, num_samples: int) -> tuple[Mapping[str, Tensor], Tensor]:
    inputs, labels = function(first_sample, num_samples)
    inputs = inputs if isinstance(inputs, Mapping) else {"input": inputs}
    for name, value in {**inputs, LABELS: labels}.items():
        if not isinstance(value, Tensor) or value.dim() == 0 or len(value) != num_samples:
            found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise InputError(
                f"{name!r} of {num_samples} samples is {found}; give a tensor [{num_samples}, ...]"
            )
    return inputs, labels


def _read(
    data: Any, seed: int | None, first_sample: int, num_samples: int
) -> tuple[Mapping[str, Tensor], Tensor]:
    if seed is None:
        places = [position % len(data) for position in range(first_sample, first_sample + num_samples)]
    else:
        places = permuted(seed, len(data), first_sample, num_samples).tolist()
    rows = [_parts_of(data[index], index) for index in places]
    _check_alike(rows, places)
    try:
        inputs = {name: torch.stack([row[0][name] for row in rows]) for name in rows[0][0]}
        return inputs, torch.stack([row[1] for row in rows])
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise InputError(
            f"samples of the data do not fit together ({reason}); pad them to one shape"
        ) from None


def _check_alike(rows: Sequence[tuple[Mapping[str, Tensor], Tensor]], places: Sequence[int]) -> None:
    """Check that all samples of a batch have the same inputs; places: their indices.

    Raises: InputError naming one that some of them have.
    """
    having = {name: index for (inputs, _), index in zip(rows, places, strict=True) for name in inputs}
    for (inputs, _), index in zip(rows, places, strict=True):
        if lacking := next((name for name in having if name not in inputs), None):
            raise InputError(
                f"data[{having[lacking]}] has {lacking!r}, data[{index}] has not; give it in every sample "
                "(an attention_mask: of ones), or in none"
            )


def _parts_of(sample: Any, index: int) -> tuple[dict[str, Tensor], Tensor]:
    """Return the inputs by name and the label of one sample, as tensors."""
    if isinstance(sample, Mapping):
        if LABELS not in sample or len(sample) < 2:
            raise InputError(f"data[{index}] has {sorted(sample)}; it needs inputs and {LABELS!r}")
        label = sample[LABELS]
        inputs = {name: value for name, value in sample.items() if name != LABELS}
    elif isinstance(sample, tuple | list) and len(sample) == 2:
        inputs, label = sample
        if isinstance(inputs, tuple | list) and all(isinstance(value, Tensor) for value in inputs):
            inputs = {f"input{place}": value for place, value in enumerate(inputs)}
        elif not isinstance(inputs, Mapping):
            inputs = {"input": inputs}
    else:
        raise InputError(f"data[{index}] is a {type(sample).__name__}; give (inputs, label) or a mapping")
    named = {name: _tensor(value, f"{name!r} of data[{index}]") for name, value in inputs.items()}
    return named, _tensor(label, f"the label of data[{index}]")


def _tensor(value: Any, name: str) -> Tensor:
    if isinstance(value, Tensor):
        return value
    with contextlib.suppress(TypeError, ValueError, RuntimeError):
        found = torch.as_tensor(value)
        # numbers without a type of their own are as exact as torch's default
        plain = found.dtype == torch.float64 and not isinstance(value, np.ndarray | np.generic)
        return found.to(torch.get_default_dtype()) if plain else found
    raise InputError(f"{name} is a {type(value).__name__}; give tensors, arrays or numbers")


def repeated(
    inputs: Mapping[str, Tensor], labels: Tensor, first_sample: int, num_samples: int
) -> tuple[Mapping[str, Tensor], Tensor]:
    """Return one sample, inputs and labels each [1, ...], so many times, wherever the batch begins."""
    many = {name: torch.cat([value] * num_samples) for name, value in inputs.items()}
    return many, torch.cat([labels] * num_samples)


def batch_in(
    dtype: torch.dtype, batch: Batch, first_sample: int, num_samples: int
) -> tuple[Mapping[str, Tensor], Tensor]:
    """Return a batch with floating inputs in the model's dtype, and labels at least as exact."""
    inputs, labels = batch(first_sample, num_samples)
    cast = {name: value.to(dtype) if value.is_floating_point() else value for name, value in inputs.items()}
    if labels.is_floating_point():
        labels = labels.to(torch.promote_types(labels.dtype, dtype))
    return cast, labels
