"""The options with which users decide parts of a plan themselves."""

import dataclasses
from typing import Annotated

import typer

from cost_model.cluster import Cluster
from cost_model.errors import InputError
from partition.problem import Forced, Problem

PinOption = Annotated[
    list[str] | None,
    typer.Option(
        "--pin", help="Device and layers, as big/0=0-11; it serves these only. Give it several times."
    ),
]
ExcludeOption = Annotated[
    list[str] | None, typer.Option("--exclude", help="A device or a node to leave out; several times.")
]
PipelinesOption = Annotated[int | None, typer.Option("--pipelines", help="Exactly so many pipelines.")]
MaxDevicesOption = Annotated[int | None, typer.Option("--max-devices", help="At most so many devices.")]
NoProofOption = Annotated[
    bool, typer.Option("--no-proof", help="Spend no time on a tighter bound; the plan is the same.")
]
ProofSecondsOption = Annotated[
    float | None,
    typer.Option("--proof-seconds", help="That the bound may take; more make it tighter.", min=0.0),
]


def proof_seconds(no_proof: bool, seconds: float | None) -> float | None:
    """Seconds for the proof of a plan; None for what suits the devices.

    Raises: InputError if there is to be none, and seconds for it.
    """
    if no_proof and seconds:
        raise InputError(f"--no-proof leaves out what --proof-seconds {seconds:g} is for; give one of them")
    return 0.0 if no_proof else seconds


def remaining(cluster: Cluster, exclude: list[str] | None) -> Cluster:
    """The cluster less what is excluded.

    Raises: InputError for an unknown name, or if nothing is left.
    """
    if not exclude:
        return cluster
    from partition.constraints.forced_plans import without

    return without(cluster, exclude)


def forced_problem(
    problem: Problem,
    strategy: str,
    pins: list[str] | None,
    num_pipelines: int | None,
    max_devices: int | None,
) -> Problem:
    """The problem with what is forced.

    Raises: InputError if it contradicts itself, or the strategy takes no such wishes.
    """
    if not pins and num_pipelines is None and max_devices is None:
        return problem
    from partition.constraints.forced_plans import check_forced, describe, forced_of, parse_pin

    parsed = [parse_pin(text) for text in pins or ()]
    forced: Forced = forced_of(problem.profile, problem.cluster, parsed, num_pipelines, max_devices)
    if strategy != "auto":
        raise InputError(f"{describe(forced)} is for --strategy auto; {strategy!r} decides all by itself")
    forced_one = dataclasses.replace(problem, forced=forced)
    check_forced(forced_one)
    return forced_one
