"""What the verbs share: their options, the files they read, and how they print."""

import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from cost_model.cluster import Cluster, Device
from cost_model.dtypes import FLOAT32, check_fast, parse_dtype
from cost_model.errors import InputError
from cost_model.profile import ModelProfile, read_profile
from cost_model.strict_files import did_you_mean, write_atomically
from hetpipe.models.names import model_entry
from hetpipe.program.instructions import Schedule
from hetpipe.reporting.tables import console
from partition.estimates.optimizer_sharding import with_state_owners
from partition.plan import Plan, check_plan

MODEL_HELP = "A model by name, such as bert-large, or a Hugging Face folder."
ModelOption = Annotated[str | None, typer.Option("--model", help=MODEL_HELP)]
ProfileOption = Annotated[
    Path | None, typer.Option("--profile", help="A profile.json; without it the model is measured here.")
]
ClusterOption = Annotated[Path, typer.Option("--cluster", help="The cluster.toml.")]
BatchOption = Annotated[
    int, typer.Option("--global-batch-size", help="Samples a step, all devices together.")
]
SequenceOption = Annotated[int, typer.Option("--sequence-length", help="Tokens a sample.")]
MicrobatchOption = Annotated[
    int | None, typer.Option("--microbatch-size", help="Force it; else the best of the profiled ones.")
]
StrategyOption = Annotated[
    str, typer.Option("--strategy", help="auto, or the plan space of a known system (hetpipe compare).")
]
ScheduleOption = Annotated[
    Schedule | None,
    typer.Option("--schedule", help="Order of computations; auto: the fastest of all by simulation."),
]
DtypeOption = Annotated[
    str | None,
    typer.Option("--dtype", help="float32 (default), or bf16: bfloat16 autocast on float32 weights."),
]
AllowSlowOption = Annotated[
    bool, typer.Option("--allow-slow-bf16", help="Also on devices that have no units for bfloat16.")
]
BudgetOption = Annotated[float, typer.Option("--profile-budget", help="Seconds to spend on measuring.")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, nothing else.")]


def print_json(data: Mapping[str, Any]) -> None:
    """One JSON object, the whole of stdout; what is not a finite number becomes null, since JSON has none."""
    sys.stdout.write(json.dumps(_finite(data), indent=1, allow_nan=False) + "\n")


def _finite(data: Any) -> Any:
    if isinstance(data, Mapping):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


EMULATED_SHARE = 0.75
"""Of the host: memory that emulated devices get together, and cores that their speeds may add up to."""


def warn(message: str) -> None:
    """One unwrapped line on stderr."""
    sys.stderr.write(f"warning: {message}\n")


def note(sentences: Iterable[str]) -> None:
    """Unwrapped lines on stderr, for what --json has no place for."""
    sys.stderr.writelines(f"note: {sentence}\n" for sentence in sentences)


def warn_if_too_fast(speeds: Iterable[float]) -> None:
    """Warn if this host has too few cores for emulated devices of these speeds."""
    total, cores = sum(speeds), os.cpu_count() or 1
    if total > EMULATED_SHARE * cores:
        warn(
            f"speeds add up to {total:g}, more than {EMULATED_SHARE:g} x {cores} cores; the host "
            "cannot keep up, and measured times will be too long: lower the speeds"
        )


def write_output(path: Path, text: str) -> None:
    """Write a file that the user asked for.

    Raises: InputError if it cannot be written.
    """
    try:
        write_atomically(path, text)
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror})") from None


def check_strategy(strategy: str) -> None:
    """Raises: InputError with the nearest strategy, before anything slow is done for a typing mistake."""
    from partition.auto import STRATEGIES

    if strategy not in STRATEGIES:
        raise InputError(f"unknown strategy {strategy!r}; {did_you_mean(strategy, STRATEGIES)}")


@contextmanager
def progress_bar(title: str, *, quiet: bool = False) -> Iterator[Callable[[float, str], None]]:
    """A function (fraction done, text) that moves a bar on stderr; none where stdout is not a terminal."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[text]}"),
        TimeRemainingColumn(),
        console=console(sys.stderr),
        transient=True,
        disable=quiet or not sys.stdout.isatty(),
    )
    with bar:
        task = bar.add_task(title, total=1.0, text="")

        def report(fraction: float, text: str) -> None:
            bar.update(task, completed=fraction, text=text)

        yield report


def get_profile(
    model: str | None,
    path: Path | None,
    cluster: Cluster,
    sequence_length: int,
    *,
    dtype: str | None = None,
    fast: Iterable[Device] = (),
    budget_s: float = 60.0,
    quiet: bool = False,
) -> ModelProfile:
    """The profile of a file, or else of the named model, measured here (or taken from the cache).

    dtype: as given to --dtype; None for the file's, else float32. fast: devices that have to be made for it.

    Raises: InputError if neither is given, the file is of another model or dtype, or a device is too slow.
    """
    wanted = parse_dtype(dtype)
    name = None if model is None else model_entry(model).name
    if path is not None:
        profile = read_profile(path)
        if name is not None and profile.model != name:
            raise InputError(
                f"{path}: a profile of {profile.model!r}, not of --model {name!r}; give the profile of that "
                "model, or leave one of the two out"
            )
        if wanted is not None and profile.dtype != wanted:
            raise InputError(
                f"{path}: a profile in {profile.dtype}, and --dtype is {dtype}; profile again with "
                f"--dtype {dtype}, or leave the option out"
            )
        check_fast(profile.dtype, fast)
        return profile
    if model is None:
        raise InputError("neither --model nor --profile is given; name a model, or give its profile.json")
    check_fast(wanted or FLOAT32, fast)
    from hetpipe.profiling.profile_cache import profile_model

    with progress_bar(f"measuring {name}", quiet=quiet) as report:
        return profile_model(
            model, cluster, sequence_length, dtype=wanted or FLOAT32, budget_s=budget_s, progress=report
        )


def checked_plan(plan: Plan, profile: ModelProfile, cluster: Cluster) -> Plan:
    """A given plan with what it leaves open; warns where it was made from another profile or cluster.

    Raises: InputError if it does not fit the profile or the cluster.
    """
    check_plan(plan, profile, cluster)
    for what, made_from, given in (
        ("profile", plan.profile_sha256, profile.sha256),
        ("cluster", plan.cluster_sha256, cluster.sha256),
    ):
        if made_from is not None and made_from != given:
            warn(
                f"the plan was made from the {what} {made_from[:12]}, this {what} is {given[:12]}; "
                "its figures are computed anew"
            )
    return with_state_owners(plan, profile, cluster) if plan.zero else plan
