"""A user's model, data and loss as a task that every rank can make: checked here, then sent to them."""

import hashlib
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import torch
from pydantic import JsonValue
from safetensors.torch import save_file
from torch import Tensor, nn

from cost_model.errors import InputError
from hetpipe.data.held_out import HeldOut
from hetpipe.data.main_module import are_importable, globals_for_ranks, pickled, set_globals
from hetpipe.data.own_code import own_code_sha256
from hetpipe.data.task import OptimizerFactory, TrainingTask, own_settings, weight_of
from hetpipe.data.user_data import batch_in, batch_of, has_length, order_of, repeated
from hetpipe.models.block_structure import refused_on_error
from hetpipe.models.chain import ChainModel
from hetpipe.models.families import reason_of
from hetpipe.models.loss import Loss
from hetpipe.models.mixed_precision import weight_dtype
from hetpipe.models.quantized_weights import parts_of
from hetpipe.models.splittable import check_norms
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.settings import TaskSettings

WEIGHTS_FILE = "initial.safetensors"
LOOKED_AT = 32
"""Samples that show what they reach of a model, where the first one does not reach all of it."""
SUM_TOLERANCE = 0.05
"""A mean over two samples is half of their sum; a sum in bfloat16 is off by less."""

Model = nn.Module | Callable[[], nn.Module]
"""A module, trained from the weights that it has; or what builds one, weights drawn from the seed."""


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a user's task besides model, data and loss.

    count_terms: labels of a whole step -> how many terms the loss sums; None: one a sample.
    shuffle: each epoch of a data set in an order of its own, drawn from the seed.
    shrunk: builds a small model of the same class, off which the structure is read; None: off the model.
    make_optimizer, rate_schedule: as in `TrainingTask`. eval_data: as data, with a length, whose loss is
    computed beside training in batches of eval_batch; None: there is none.
    example: the first of these data is what the model is split and measured by, instead of that of the data:
    give the longest where they differ.
    """

    count_terms: Callable[[Tensor], int] | None = None
    shuffle: bool = True
    shrunk: Callable[[], nn.Module] | None = None
    make_optimizer: OptimizerFactory | None = None
    rate_schedule: Callable[[int], float] | None = None
    eval_data: object = None
    eval_batch: int = 1
    example: object = None


class UserTask:
    """A factory of the `TrainingTask` on every rank; owns the bytes sent there, and the initial weights.

    sequence_length: of the model's integer inputs [samples, seq], 1 where it has none. num_samples: of the
    data, None where it is a function. code_sha256: of what its times depend on. num_held_out: how many
    samples of eval_data are whole batches, and the terms that the loss counts in them. held_out_sha256: of
    these numbers, the first batch and the last: to read all of them would take as long as an evaluation.
    """

    def __init__(
        self,
        parts: Mapping[str, object],
        sequence_length: int,
        *,
        num_samples: int | None,
        code_sha256: str,
        num_held_out: tuple[int, int],
        held_out_sha256: str,
    ) -> None:
        self.sequence_length = sequence_length
        self.num_samples, self.code_sha256 = num_samples, code_sha256
        self.num_held_out, self.held_out_sha256 = num_held_out, held_out_sha256
        chain = parts["chain"]
        assert isinstance(chain, ChainModel)
        self.num_layers = chain.num_layers
        self.has_adapters = bool(chain.base)
        options = parts["options"]
        assert isinstance(options, Options)
        self._order, self._rates = order_of(parts["data"], options.shuffle), options.rate_schedule
        self._weights = chain.given
        self._has_weights = chain.given is not None
        sent = {**parts, "chain": replace(chain, given=None)}
        packed = {what: pickled(part, sys.maxsize) for what, part in sent.items()}
        of_main = [each for _, found in packed.values() for each in found]
        can_import = are_importable(of_main)
        self._parts = {
            what: data if can_import and data is not None else _by_value(what, sent[what])
            for what, (data, _) in packed.items()
        }
        self._globals = globals_for_ranks(of_main if can_import else ())
        self._is_sent = False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_weights": None, "_rates": None, "_is_sent": True}

    def own_settings(self, step: int) -> dict[str, JsonValue]:
        """Return what `TrainingTask.own_settings` does, in the process that made this."""
        return own_settings(self._order, self._rates, step)

    def write_weights(self, folder: RunFolder) -> None:
        """Write the initial weights, if they are given ones, to where the ranks read theirs."""
        if self._weights is not None:
            assert isinstance(self._weights, Mapping)
            weights = dict(
                part for key, value in self._weights.items() for part in parts_of(key, value).items()
            )
            folder.path.mkdir(parents=True, exist_ok=True)
            save_file(weights, folder.path / WEIGHTS_FILE)

    def remove_weights(self, folder: RunFolder) -> None:
        """Remove the file after training."""
        (folder.path / WEIGHTS_FILE).unlink(missing_ok=True)

    def __call__(self, folder: RunFolder, settings: TaskSettings) -> TrainingTask:
        if self._is_sent:
            set_globals(self._globals)
        parts = {what: pickle.loads(data) for what, data in self._parts.items()}
        chain, options = parts["chain"], parts["options"]
        if self._has_weights:
            chain = replace(chain, given=folder.path / WEIGHTS_FILE)
        in_dtype = partial(batch_in, weight_dtype(settings.dtype))
        measured = parts["example"]
        held_out = None
        if options.eval_data is not None:
            read = partial(in_dtype, batch_of(options.eval_data, 0, False))
            held_out = HeldOut(*self.num_held_out, read, self.held_out_sha256)
        return TrainingTask(
            chain=chain,
            loss=SummedLoss(parts["loss"]),
            batch=partial(in_dtype, batch_of(parts["data"], settings.seed, options.shuffle)),
            held_out=held_out,
            num_loss_tokens=_one_each,
            count_terms=options.count_terms,
            make_optimizer=options.make_optimizer,
            rate_schedule=options.rate_schedule,
            measured=None if measured is None else partial(in_dtype, partial(repeated, *measured)),
            order=self._order,
        )


def own_task(model: Model, data: object, loss: Loss, **options: Any) -> UserTask:
    """Return the task of a user's own model, for `profile_model` and `Trainer`.

    model: an nn.Sequential, or a module around a list of blocks (all of transformers); or what builds one.
    data: a data set with a length, of samples by index: (inputs, label), inputs being a tensor or, by name, a
    mapping; or a mapping that holds the label as "labels". Or a function (first sample, count) -> (inputs by
    name, labels), each [count, ...], which may have a length. The same on every read: every rank reads the
    samples that it needs.
    loss: (outputs, labels of a microbatch) -> their losses' sum, not mean. options: see `Options`.

    Raises: InputError naming what cannot be used and why.
    """
    try:
        chosen = Options(**options)
    except TypeError as error:
        raise InputError(f"{error}; known options are {', '.join(Options.__dataclass_fields__)}") from None
    _check_loss(loss)
    inputs, labels = _first_sample(data, chosen.shuffle)
    if chosen.example is not None:
        inputs, labels = batch_of(chosen.example, 0, False)(0, 1)
    if not isinstance(model, nn.Module) and not callable(model):
        raise InputError(f"the model is a {type(model).__name__}; give an nn.Module or what builds one")
    with refused_on_error("the model cannot be built"), torch.device("meta"):
        built = model if isinstance(model, nn.Module) else model()
    if isinstance(built, nn.Module):
        check_norms(built, "use nn.GroupNorm or nn.LayerNorm")
    with refused_on_error("the model fails on the first sample of the data"):
        more = partial(_several, data, chosen.shuffle, inputs)
        chain = ChainModel.from_module(model, inputs, shrunk=chosen.shrunk, more=more)
    example = None if chosen.example is None else (inputs, labels)
    options_there = replace(chosen, example=None)
    parts = {"chain": chain, "data": data, "loss": loss, "options": options_there, "example": example}
    num_held_out = (0, 0) if chosen.eval_data is None else _held_out(chosen)
    return UserTask(
        parts,
        _sequence_length(inputs),
        num_samples=len(data) if has_length(data) else None,
        code_sha256=own_code_sha256(built, loss, chosen.make_optimizer, _shapes(inputs, labels)),
        num_held_out=num_held_out,
        held_out_sha256=_held_out_sha256(chosen, num_held_out),
    )


def _several(data: object, shuffle: bool, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the inputs of the first samples of the data; the given ones where they do not go together."""
    count = min(LOOKED_AT, len(data)) if has_length(data) else LOOKED_AT
    try:
        return batch_of(data, 0, shuffle)(0, count)[0]
    except Exception:  # what data of somebody else raise is of many kinds
        return inputs


def _shapes(inputs: Mapping[str, Tensor], labels: Tensor) -> list[list[str]]:
    return [[name, str(value.shape), str(value.dtype)] for name, value in {**inputs, "": labels}.items()]


def _held_out(options: Options) -> tuple[int, int]:
    """Return how many samples of the held-out data make whole batches, and the terms of their loss.

    Raises: InputError if they have no length, or there is not one batch.
    """
    data, batch = options.eval_data, options.eval_batch
    if not has_length(data):
        raise InputError(f"eval_data are a {type(data).__name__}; give a data set with a length, as data")
    count = len(data) - len(data) % batch
    if count == 0:
        raise InputError(f"eval_data have {len(data)} samples; give at least a batch ({batch})")
    if options.count_terms is None:
        return count, count
    read = batch_of(data, 0, False)
    with refused_on_error("eval_data cannot be read"):
        terms = sum(options.count_terms(read(first, batch)[1]) for first in range(0, count, batch))
    weight_of(terms, "eval_data")  # refused now, not when it is first computed
    return count, terms


def _held_out_sha256(options: Options, numbers: tuple[int, int]) -> str:
    if options.eval_data is None:
        return ""
    found, read = hashlib.sha256(str(numbers).encode()), batch_of(options.eval_data, 0, False)
    for first in (0, numbers[0] - options.eval_batch):
        with refused_on_error("eval_data cannot be read"):
            inputs, labels = read(first, options.eval_batch)
        for name, value in sorted({**inputs, "": labels}.items()):
            found.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            found.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _by_value(what: str, part: object) -> bytes:
    """Return the bytes from which another process makes a part with what it cannot import, as a lambda."""
    names = {"chain": "the model", "options": "an option"}
    name = names.get(what, f"the {what}")
    try:
        return bytes(cloudpickle.dumps(part))
    except Exception as error:
        raise InputError(
            f"{name} cannot be sent to the ranks ({reason_of(error)}); let it hold nothing of this process, "
            "as open files, locks and connections, or give a function that builds it"
        ) from None


def _check_loss(loss: object) -> None:
    if not callable(loss):
        raise InputError(
            f"the loss is a {type(loss).__name__}; give a function (outputs, labels) -> their sum"
        )
    reduction = getattr(loss, "reduction", "sum")
    if reduction != "sum":
        raise InputError(
            f"the loss has reduction {reduction!r}; give reduction='sum', which is weighed by the whole step"
        )
    if isinstance(loss, nn.Module) and any(True for _ in loss.parameters()):
        raise InputError("the loss has parameters, which would not be trained; put them into the model")


def _first_sample(data: object, shuffle: bool) -> tuple[Mapping[str, Tensor], Tensor]:
    """Return the sample at position 0 of the data, after a check that two reads of it are equal."""
    batch = batch_of(data, 0, shuffle)
    with refused_on_error("the data cannot be read"):
        inputs, labels = batch(0, 1)
        again, labels_again = batch(0, 1)
    same = inputs.keys() == again.keys() and torch.equal(labels, labels_again)
    if not same or not all(torch.equal(inputs[name], again[name]) for name in inputs):
        raise InputError(
            "the data give another sample when they are read again; every rank reads them, so draw random "
            "numbers from a seed of the sample's index"
        )
    return inputs, labels


def _sequence_length(inputs: Mapping[str, Tensor]) -> int:
    lengths = {
        name: value.shape[1]
        for name, value in inputs.items()
        if value.dim() == 2 and not value.is_floating_point()
    }
    if len(set(lengths.values())) > 1:
        raise InputError(
            f"integer inputs [samples, seq] of different lengths ({lengths}) cannot be used; pad them to one"
        )
    return next(iter(lengths.values()), 1)


def _one_each(num_samples: int) -> int:
    return num_samples


class SummedLoss:
    """A user's loss that is checked, at the first microbatch of several samples, to be a sum.

    Weighted by the terms of the whole step, a sum is the same under every plan; a mean is not.
    """

    def __init__(self, loss: Loss) -> None:
        self._loss = loss
        self._checked = False

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        if self._checked or len(labels) < 2:
            value = self._loss(outputs, labels)
            if not self._checked:
                _check_number(value)
            return value
        with torch.no_grad():  # before the graph of the loss, beside which it would need room of its own
            apart = [self._loss(outputs[rows], labels[rows]) for rows in (slice(0, 1), slice(1, None))]
        self._check_constant(outputs[:1].detach(), labels[:1])
        value = self._loss(outputs, labels)
        _check_number(value)
        self._check_sum(value.detach(), apart, len(labels))
        return value

    def _check_constant(self, outputs: Tensor, labels: Tensor) -> None:
        """Refuse a loss that depends on more than the outputs, as on weights of a model that it holds."""
        with torch.enable_grad():
            value = self._loss(outputs, labels)
        if isinstance(value, Tensor) and value.requires_grad:
            raise InputError(
                "the loss depends on parameters of its own, which get no gradient there; compute what "
                "they add in the model, or by the optimizer's weight decay"
            )

    def _check_sum(self, value: Tensor, parts: Sequence[Tensor], count: int) -> None:
        apart = parts[0] + parts[1]
        if not (value.isfinite() and apart.isfinite()):
            return
        if not torch.isclose(value, apart, rtol=SUM_TOLERANCE, atol=1e-6):
            raise InputError(
                f"the loss of {count} samples is {float(value):.4g}, that of the same samples apart "
                f"adds up to {float(apart):.4g}; give a sum over the samples (reduction='sum'), not a mean"
            )
        self._checked = all(bool(part != 0) for part in parts)  # else a mean may be the same


def _check_number(value: object) -> None:
    if not isinstance(value, Tensor) or value.dim():
        found = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise InputError(f"the loss of a microbatch is {found}; give one number, the sum over its samples")
