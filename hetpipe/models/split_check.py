"""The check that split equals whole: one step in stages and unsplit, compared by loss and gradients."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from hetpipe.models.block_structure import Inputs, one_sample, refused_on_error, whole_logits
from hetpipe.models.chain import ChainModel, LayerModel
from hetpipe.models.families import SMALL_VOCABULARY
from hetpipe.models.huggingface import ModelSpec
from hetpipe.models.initialization import private_random_stream
from hetpipe.models.keyed_dropout import KeyedDropout
from hetpipe.models.loss import IGNORED_LABEL, loss_sum
from hetpipe.models.packed_inputs import seen_by_others
from hetpipe.models.quantized_weights import dense
from hetpipe.models.task_inputs import DECODER, MASK, TOKENS
from hetpipe.models.tasks import Task

SPLIT_TOLERANCE = 1e-12
"""Largest difference of the loss, relative to it, and of gradients, relative to the largest one."""

MICROBATCH_TOLERANCE = 1e-6
"""The same between microbatch sizes, where norms that some models compute in float32 round otherwise."""

_Cut = tuple[int, int, int]  # rank, start, stop


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The outcome of comparing a split model with the whole one.

    cuts: the first layers of the stages, for each split that was tried.
    loss_difference: largest, relative to the loss.
    gradient_difference: largest, relative to the largest gradient of the model, at worst_parameter.
    reason: one line; empty where the check passed.
    """

    model: str
    cuts: tuple[tuple[int, ...], ...]
    loss_difference: float
    gradient_difference: float
    worst_parameter: str
    passed: bool
    reason: str


@dataclass(frozen=True, slots=True)
class _Case:
    """A microbatch: its inputs and labels, the identities of its samples, and the loss of its logits."""

    inputs: Inputs
    labels: Tensor
    samples: tuple[int, ...]
    loss: Callable[[Tensor, Tensor], Tensor]

    def singles(self) -> "list[_Case]":
        """Return the same samples as microbatches of one."""
        return [
            _Case(
                {key: tensor[index : index + 1] for key, tensor in self.inputs.items()},
                self.labels[index : index + 1],
                (sample,),
                self.loss,
            )
            for index, sample in enumerate(self.samples)
        ]


@dataclass(frozen=True, slots=True)
class _Outcome:
    """The loss and the gradients, by name, of one step."""

    loss: float
    gradients: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class _Difference:
    """The distance of two outcomes: see CheckReport."""

    loss: float
    gradient: float
    parameter: str

    def reason(self, subject: str, tolerance: float) -> str:
        """Return what differs, in one line; empty within the tolerance. Not a number is out of it."""
        if not self.loss <= tolerance:
            return f"{subject}: the loss is off by {self.loss:.1e} of itself"
        if not self.gradient <= tolerance:
            return f"{subject}: the gradient of {self.parameter} is off by {self.gradient:.1e} of the largest"
        return ""


def check_split(
    source: ModelSpec | Callable[[], nn.Module],
    example: Inputs | Tensor | tuple[Tensor, ...] | None = None,
    *,
    full: bool = False,
    seed: int = 0,
) -> CheckReport:
    """Compare the unsplit model with stages run apart, in float64 with dropout on.

    A registered model is checked on its shrunken copy unless `full`; a factory needs an example of one sample
    and is checked as it is. Microbatches differ in size, length and padding; one split gives a rank both ends
    of the chain. Also compares each microbatch with its samples one by one, since a plan chooses the
    microbatch size.

    Raises:
        InputError: the model cannot be split, or the example has several samples; says why.
        ValueError: a factory without example.
    """
    if isinstance(source, ModelSpec):
        spec = source if full else source.shrunk()
        spec = replace(spec, build=partial(_in_plain_torch, spec.build))
        chain, cases = ChainModel.from_spec(spec), _spec_cases(spec, seed)
    elif example is None:
        raise ValueError("a factory needs an example: the inputs of one sample")
    else:
        chain = ChainModel.from_module(source, example)
        cases = _example_cases(chain, seed)
    splits = _splits(chain.num_layers)
    model = _whole_model(chain, seed)
    with refused_on_error(f"{chain.name} cannot be checked: in float64 the unsplit model fails"):
        whole = [_run_whole(chain, model, case, seed) for case in cases]
        single = [[_run_whole(chain, model, part, seed) for part in case.singles()] for case in cases]
    by_split = [
        _compare(got, expected)
        for split in splits
        for got, expected in zip(_run_splits(chain, split, cases, seed), whole, strict=True)
    ]
    by_sample = [_compare(_sum(parts), expected) for parts, expected in zip(single, whole, strict=True)]
    reasons = [difference.reason("split differs from whole", SPLIT_TOLERANCE) for difference in by_split]
    reasons += [
        difference.reason("the microbatch size changes the result", MICROBATCH_TOLERANCE)
        for difference in by_sample
    ]
    worst = max(by_split, key=lambda difference: difference.gradient)
    if isinstance(source, ModelSpec) and source.task == Task.CAUSAL_LM:
        reasons.append(_looks_ahead(model, {TOKENS: cases[0].inputs[TOKENS]}, TOKENS))
    if isinstance(source, ModelSpec) and source.task.translates:
        reasons.append(_looks_ahead(model, cases[0].inputs, DECODER))
    if isinstance(source, ModelSpec) and source.inputs.packed:
        reasons.append(seen_by_others(model, cases[0].inputs[TOKENS]))
    if isinstance(source, ModelSpec) and source.task.pads:
        reasons.append(_sees_padding(model, cases[1], source.task.answers))
    reason = next(filter(None, reasons), "")
    return CheckReport(
        model=chain.name,
        cuts=tuple(tuple(start for _, start, _ in split) for split in splits),
        loss_difference=max(difference.loss for difference in by_split),
        gradient_difference=worst.gradient,
        worst_parameter=worst.parameter,
        passed=not reason,
        reason=reason,
    )


def _in_plain_torch(build: Callable[[], nn.Module]) -> nn.Module:
    """Return the model with its experts, if any, computed by kernels that exist in float64."""
    model = build()
    config = getattr(model, "config", None)
    if hasattr(config, "_experts_implementation"):
        cast(Any, config)._experts_implementation = "eager"
    return model


def _splits(num_layers: int) -> tuple[tuple[_Cut, ...], ...]:
    """Return three splits: a layer a stage, two halves, two ranks in turn of which one holds both ends."""
    half = (num_layers + 1) // 2
    ends = sorted({0, 1, half, num_layers - 1})
    interleaved = tuple(
        (index % 2, start, stop)
        for index, (start, stop) in enumerate(zip(ends, [*ends[1:], num_layers], strict=True))
    )
    if len(interleaved) > 1 and interleaved[-1][0]:
        interleaved = (*interleaved[:-1], (0, *interleaved[-1][1:]))
    single = tuple((layer, layer, layer + 1) for layer in range(num_layers))
    halves = ((0, 0, half), (1, half, num_layers)) if num_layers > 1 else single
    return tuple(dict.fromkeys((single, halves, interleaved)))


def _spec_cases(spec: ModelSpec, seed: int) -> list[_Case]:
    """Return two samples of 12 tokens, and three of 9 with padding; or as many images, of one size."""
    cases, shape = [], spec.inputs
    with private_random_stream(seed):
        for size, padded in (((2, 12), False), ((3, 9), True)):
            ids = torch.randint(0, max(1, spec.vocabulary_size), size)
            labels = shape.labels(ids, len(spec.labels))
            if spec.task.reads_text and labels.shape == ids.shape:
                labels = labels.masked_fill(torch.rand(size) < 0.3, IGNORED_LABEL)
            if spec.task.pads:
                ids = ids.masked_fill(ids == shape.padding, (shape.padding + 1) % spec.vocabulary_size)
            inputs = shape.inputs(ids)
            if padded and spec.task.reads_text and not shape.packed:
                mask = torch.ones(size, dtype=torch.long)
                mask[0, -3:] = mask[1, -1:] = 0
                inputs[MASK] = mask
                if spec.task.pads:
                    inputs[TOKENS] = ids.masked_fill(mask == 0, shape.padding)
                if labels.shape == ids.shape:
                    labels = labels.masked_fill(mask == 0, IGNORED_LABEL)
            inputs = {
                key: value.double() if value.is_floating_point() else value for key, value in inputs.items()
            }
            cases.append(_Case(inputs, labels, tuple(range(len(ids))), partial(loss_sum, spec.task)))
    return cases


def _example_cases(chain: ChainModel, seed: int) -> list[_Case]:
    """Return one sample, and three rolled ones, scored by their distance from a random output."""

    def loss(logits: Tensor, _: Tensor) -> Tensor:
        with private_random_stream(seed):
            weights = torch.randn(logits.shape[1:], dtype=torch.float64)
        return (logits - weights).square().sum()

    cases = []
    for num_samples in (1, 3):
        inputs = {
            key: torch.cat([tensor.roll(index, -1) for index in range(num_samples)])
            for key, tensor in one_sample(chain.example).items()
        }
        inputs = {
            key: tensor.double() if tensor.is_floating_point() else tensor for key, tensor in inputs.items()
        }
        cases.append(_Case(inputs, torch.zeros(num_samples), tuple(range(num_samples)), loss))
    return cases


def _whole_model(chain: ChainModel, seed: int) -> nn.Module:
    """Return the unsplit model in float64, with the weights that the chain draws."""
    with private_random_stream(seed), torch.device("cpu"):
        model = chain.build().double().train()
    weights = chain.materialise(range(chain.num_layers), seed).owned_parameters()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(dense(weights[name], torch.float64))
    return model


def _looks_ahead(model: nn.Module, inputs: Inputs, key: str) -> str:
    """Return that a causal model's logits depend on tokens after them, in one line; empty if they do not.

    key: of the tokens among the inputs. An encoder that is taken for a decoder, for want of is_decoder in its
    configuration, would learn to copy.
    """
    changed = inputs[key].clone()
    changed[:, -1] = (changed[:, -1] + 1) % SMALL_VOCABULARY
    model.eval()
    with torch.no_grad():
        before, after = (
            whole_logits(model, {**inputs, key: tokens})[:, :-1] for tokens in (inputs[key], changed)
        )
    if torch.equal(before, after):
        return ""
    return "it sees the tokens that it is to predict; is is_decoder missing in its config.json?"


def _sees_padding(model: nn.Module, case: _Case, answers: bool) -> str:
    """Return that a text that is filled up has another loss than alone, in one line; empty if it has not.

    answers: whether its tokens are choices of the loss, those that fill up too, which are left out here.
    """
    model.eval()
    for single in case.singles():
        length = int(single.inputs[MASK].sum())
        alone = {key: value[:, :length] for key, value in single.inputs.items() if key != MASK}
        labels = single.labels if single.labels.dim() == 1 else single.labels[:, :length]
        with torch.no_grad():
            found, expected = (
                float(case.loss(logits[:, :length] if answers else logits, given))
                for inputs, given in ((single.inputs, single.labels), (alone, labels))
                for logits in (whole_logits(model, inputs),)
            )
        if not _relative(found - expected, expected) <= MICROBATCH_TOLERANCE:
            return (
                "a text that is filled up has another loss than alone: the mask does not hide what fills it"
            )
    return ""


def _run_whole(chain: ChainModel, model: nn.Module, case: _Case, seed: int) -> _Outcome:
    """Run one step of the model as its author wrote it, with hooks only to name layers for dropout."""
    model.zero_grad()
    with KeyedDropout(seed) as dropout, _announced_layers(model, chain, dropout):
        dropout.at(step=0, samples=case.samples)
        dropout.enter_layer(0)
        loss = case.loss(whole_logits(model, case.inputs), case.labels)
    loss.backward()  # type: ignore[no-untyped-call]
    return _Outcome(loss.item(), _gradients(dict(model.named_parameters())))


@contextmanager
def _announced_layers(model: nn.Module, chain: ChainModel, dropout: KeyedDropout) -> Iterator[None]:
    """Name the layers as the model's own forward comes to them."""
    if chain.structure is None:
        blocks, layers, around = set(model.children()), iter(range(chain.num_layers)), frozenset[int]()
    else:
        blocks = {
            block for part in chain.structure.lists for block in model.get_submodule(part.path).children()
        }
        layers, around = iter(chain.structure.calls), frozenset(chain.structure.around)
    now = 0

    def before(*_: Any) -> None:
        nonlocal now
        now = next(layers)
        dropout.enter_layer(now)

    def after(*_: Any) -> None:
        if now + 1 in around:
            dropout.enter_layer(now + 1)

    handles = [block.register_forward_pre_hook(before) for block in blocks]
    handles += [block.register_forward_hook(after) for block in blocks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _run_splits(chain: ChainModel, split: Sequence[_Cut], cases: list[_Case], seed: int) -> list[_Outcome]:
    ranks = {
        rank: chain.materialise(
            {layer for owner, start, stop in split if owner == rank for layer in range(start, stop)},
            seed,
            torch.float64,
        ).train()
        for rank in {rank for rank, _, _ in split}
    }
    with refused_on_error(f"{chain.name} cannot be split: a stage fails"):
        return [_run_split(ranks, split, case, seed) for case in cases]


def _run_split(ranks: dict[int, LayerModel], split: Sequence[_Cut], case: _Case, seed: int) -> _Outcome:
    """Run forward and backward stage by stage, with only detached boundary tensors between them."""
    received: list[tuple[Tensor, ...]] = []
    sent: list[tuple[Tensor, ...]] = []
    carried: tuple[Tensor, ...] = ()
    for layers in ranks.values():
        layers.zero_grad()
    with KeyedDropout(seed) as dropout:
        dropout.at(step=0, samples=case.samples)
        for rank, start, stop in split:
            layers = ranks[rank]
            layers.on_layer = dropout.enter_layer
            received.append(carried)
            sent.append(layers.run(start, stop, case.inputs, carried))
            carried = tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in sent[-1])
        loss = case.loss(sent[-1][0], case.labels)
    loss.backward()  # type: ignore[no-untyped-call]
    for outputs, inputs in reversed(list(zip(sent[:-1], received[1:], strict=True))):
        pairs = [(out, into.grad) for out, into in zip(outputs, inputs, strict=True) if into.grad is not None]
        torch.autograd.backward([out for out, _ in pairs], [grad for _, grad in pairs])
    outcomes = [_Outcome(0.0, _gradients(layers.owned_parameters())) for layers in ranks.values()]
    return _sum([_Outcome(loss.item(), {}), *outcomes])


def _gradients(parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: value.grad.clone() for name, value in parameters.items() if value.grad is not None}


def _sum(outcomes: list[_Outcome]) -> _Outcome:
    gradients: dict[str, Tensor] = {}
    for outcome in outcomes:
        for name, gradient in outcome.gradients.items():
            gradients[name] = gradients[name] + gradient if name in gradients else gradient
    return _Outcome(sum(outcome.loss for outcome in outcomes), gradients)


def _relative(difference: float, scale: float) -> float:
    return abs(difference) / abs(scale) if scale else abs(difference)


def _compare(got: _Outcome, expected: _Outcome) -> _Difference:
    """Return differences relative to the loss and the largest gradient; a missing one counts as zero."""
    scale = max((gradient.abs().max().item() for gradient in expected.gradients.values()), default=0.0)
    names = sorted(expected.gradients.keys() | got.gradients.keys())
    zero = torch.zeros((), dtype=torch.float64)
    off = [
        (got.gradients.get(name, zero) - expected.gradients.get(name, zero)).abs().max().item()
        for name in names
    ]
    worst = max(range(len(names)), key=lambda index: math.inf if math.isnan(off[index]) else off[index])
    return _Difference(
        _relative(got.loss - expected.loss, expected.loss), _relative(off[worst], scale), names[worst]
    )
