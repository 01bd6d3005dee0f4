"""Options of `run` about the optimizer, the loss on held-out texts, and what a resumed run changes."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from cost_model.errors import InputError
from hetpipe.commands.given_data import given_place
from hetpipe.models.names import ModelEntry
from hetpipe.runs.settings import Decay, Settings

TRAINING, OPTIMIZER, HELD_OUT = "Training", "The optimizer", "Held-out data"
"""Groups of options in the help of `run`."""


@dataclass(frozen=True, slots=True)
class LearningOptions:
    """How the optimizer moves, which held-out texts tell how far it is, and what may change on resume."""

    title: ClassVar[str] = OPTIMIZER
    warmup_steps: Annotated[
        int | None,
        typer.Option("--warmup-steps", min=0, help="Steps in which the rate rises; a tenth, or as --resume."),
    ] = None
    decay: Annotated[
        Decay | None, typer.Option("--decay", help="How the rate falls then; linear, or as --resume.")
    ] = None
    weight_decay: Annotated[
        float | None, typer.Option("--weight-decay", help="Of matrices; 0.01, or as --resume.")
    ] = None
    betas: Annotated[
        str | None, typer.Option("--betas", help="Of adamw and adam; 0.9,0.999, or those of --resume.")
    ] = None
    epsilon: Annotated[
        float | None,
        typer.Option("--epsilon", help="Added to divisors; 1e-8 (adadelta 1e-6, adagrad 1e-10)."),
    ] = None
    rho: Annotated[
        float | None, typer.Option("--rho", help="Of adadelta and rmsprop, in [0, 1); 0.9, or as --resume.")
    ] = None
    clip_norm: Annotated[
        float | None,
        typer.Option("--clip-norm", help="The longest gradient of all parameters; 1, or as --resume."),
    ] = None
    group_by_length: Annotated[
        bool | None,
        typer.Option(
            "--group-by-length/--no-group-by-length",
            rich_help_panel=TRAINING,
            help="Samples of a step alike in length, filled up to the longest of them; no.",
        ),
    ] = None
    doc_stride: Annotated[
        int | None,
        typer.Option(
            "--doc-stride",
            min=0,
            rich_help_panel=TRAINING,
            help="Contexts in windows with so many tokens in common; else cut.",
        ),
    ] = None
    eval_data: Annotated[
        list[Path] | None,
        typer.Option(
            "--eval-data",
            parser=given_place,
            metavar="<Path>",
            rich_help_panel=HELD_OUT,
            help="Held-out data, as --data; several times.",
        ),
    ] = None
    eval_every: Annotated[
        int | None,
        typer.Option(
            "--eval-every",
            min=0,
            rich_help_panel=HELD_OUT,
            help="Each so many steps, and at the end; 0: at the end alone.",
        ),
    ] = None
    patience: Annotated[
        int | None,
        typer.Option(
            "--patience",
            min=0,
            rich_help_panel=HELD_OUT,
            help="End after so many without a new best; 0: never.",
        ),
    ] = None
    best: Annotated[
        str | None,
        typer.Option(
            "--best",
            rich_help_panel=HELD_OUT,
            help="What is best when held out, as the task has it: loss, accuracy, f1, exact_match, bleu.",
        ),
    ] = None
    override: Annotated[
        list[str] | None,
        typer.Option(
            "--override",
            rich_help_panel=TRAINING,
            help="What to change on --resume, such as learning-rate,betas.",
        ),
    ] = None

    @property
    def given(self) -> dict[str, Any]:
        """Return what is given of the optimizer, as arguments of `Settings`; None for what is not.

        Raises: InputError for betas that are not two numbers.
        """
        return {
            "warmup_steps": self.warmup_steps,
            "decay": self.decay,
            "weight_decay": self.weight_decay,
            "betas": None if self.betas is None else _betas(self.betas),
            "epsilon": self.epsilon,
            "rho": self.rho,
            "clip_norm": self.clip_norm,
            "group_by_length": self.group_by_length,
            "doc_stride": self.doc_stride,
        }


def check_samples(given: Mapping[str, Any], entry: ModelEntry, *, resumes: bool) -> None:
    """Check that samples of the data can be made as asked for: packed, grouped by length, or in windows.

    given: arguments of `Settings`. resumes: whether data that are not given are those of the run before.

    Raises: InputError if they cannot.
    """
    data = given["data"] or ()
    if given.get("pack"):
        from hetpipe.data.kinds import check_packed
        from hetpipe.models.packed_inputs import check_packs

        check_packs(entry.name, entry.task)
        check_packed(data, entry)
    if given["group_by_length"] and (data or not resumes):
        from hetpipe.data.kinds import check_grouped

        check_grouped(data, entry)
    if given["doc_stride"] is not None:
        from hetpipe.data.questions import check_windows

        check_windows(entry)


def measured_for(settings: Settings) -> dict[str, Any]:
    """Return those settings of a run that decide what layers cost."""
    return {name: getattr(settings, name) for name in ("pack", "optimizer", "momentum")}


def _betas(text: str) -> tuple[float, float]:
    """Return the two betas of AdamW.

    >>> _betas("0.9,0.95")
    (0.9, 0.95)

    Raises: InputError if it is anything else.
    """
    try:
        first, second = (float(word) for word in text.split(","))
    except ValueError:
        raise InputError(f"--betas is {text!r}; give two numbers, such as 0.9,0.999") from None
    return first, second
