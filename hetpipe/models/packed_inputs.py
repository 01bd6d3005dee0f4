"""Samples packed into rows: which models keep them apart, by positions that begin anew with each.

The attention of a packed row is block-diagonal: a token sees those of its own sample, up to itself. Models of
transformers make such a mask of position_ids that do not rise by one, where no attention_mask is given:

    row        a a a b b c
    positions  0 1 2 0 1 0

That a model does, in its attention and in all else that mixes tokens, is proven on its tiny copy.
"""

import inspect
import json
from dataclasses import replace

import torch
from torch import Tensor, nn

from cost_model.errors import InputError
from hetpipe.models.block_structure import call_options, logits_of
from hetpipe.models.huggingface import ModelSpec
from hetpipe.models.task_inputs import POSITIONS, TOKENS, positions_of
from hetpipe.models.tasks import Task

PACKING_TOLERANCE = 1e-6
"""Largest difference of logits, relative to the largest: some models compute norms in float32."""

_LENGTHS = [5, 1, 6]


def packs(task: Task) -> bool:
    """Return whether samples of a task can share a row."""
    return task is Task.CAUSAL_LM


def check_packs(name: str, task: Task) -> None:
    """Check that samples of a model's task can share a row.

    Raises: InputError if they cannot.
    """
    if not packs(task):
        raise InputError(
            f"--pack is for models that continue text ({Task.CAUSAL_LM}), and {name} learns {task}; leave it "
            "out"
        )


def packed(spec: ModelSpec) -> ModelSpec:
    """Return a model whose rows hold several samples each; its split is proven anew, with such rows.

    Raises: InputError if its task has none.
    """
    check_packs(spec.name, spec.task)
    return replace(
        spec,
        inputs=replace(spec.inputs, packed=True),
        shrunken_inputs=replace(spec.shrunken_inputs, packed=True),
        tested=False,
        proof=spec.proof and json.dumps([*json.loads(spec.proof), "packed"]),
    )


def check_takes_positions(spec: ModelSpec) -> None:
    """Check that a model can be told where samples of a row begin.

    Raises: InputError if its forward takes no position_ids.
    """
    with torch.device("meta"):
        model = spec.build_shrunk()
    if POSITIONS not in inspect.signature(model.forward).parameters:
        raise InputError(
            f"{spec.name} takes no {POSITIONS}, which tell the samples of a row apart; leave out --pack"
        )


def seen_by_others(model: nn.Module, ids: Tensor) -> str:
    """Return that samples of a row have other logits than alone, in one line; empty if they have not.

    ids: [rows, 12].
    """
    model.eval()
    options = call_options(model)
    with torch.no_grad():
        together = logits_of(model(**{TOKENS: ids, POSITIONS: positions_of(ids, _LENGTHS)}, **options))
        alone = [logits_of(model(**{TOKENS: part}, **options)) for part in torch.split(ids, _LENGTHS, dim=1)]
    expected = torch.cat(alone, dim=1)
    if float((together - expected).abs().max()) <= PACKING_TOLERANCE * float(expected.abs().max()):
        return ""
    return "samples of one row have other logits than alone: positions that begin anew do not hide the others"
