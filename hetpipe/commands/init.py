"""init: write a cluster.toml of what this host has."""

import os
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from cost_model.cluster import CPU, EMULATED, FASTEST, SLOWEST
from cost_model.cluster_file import cluster_from_data
from cost_model.errors import InputError
from cost_model.units import format_bytes
from hetpipe.commands.options import JsonOption
from hetpipe.commands.output import EMULATED_SHARE, print_json, warn_if_too_fast, write_output
from hetpipe.runtime.gpus import free_memory_here, gpus_here

_HEAD = """\
# The devices at hand, written by `hetpipe init`. Sizes, rates and times take units; keys are explained in
# docs/cluster-file.md. Correct what is wrong: the links are defaults, not measured.

name = "{name}"
reserve = "10 %"                     # of each device's memory, never planned with

[network]                            # between nodes, and inside a node without interconnect
bandwidth = "10 Gbit/s"
latency = "50 us"

[[nodes]]
name = "{node}"
"""


def init_command(
    output: Annotated[Path, typer.Option("-o", "--output", help="The file to write.")] = Path("cluster.toml"),
    emulate: Annotated[
        str | None,
        typer.Option("--emulate", help='Emulated devices instead, by speed: "0.6,0.4,0.2".'),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
    json: JsonOption = False,
) -> None:
    """Look at this host and write a cluster.toml to start from."""
    if (output.exists() or output.is_symlink()) and not force:
        raise InputError(f"{output}: exists already; give another name with -o, or --force to overwrite it")
    text = host_text() if emulate is None else emulated_text(parse_speeds(emulate), host_memory_bytes())
    cluster = cluster_from_data(tomllib.loads(text), str(output))
    write_output(output, text)
    if json:
        print_json({"file": str(output), "cluster": cluster.to_json()})
        return
    typer.echo(f"wrote {output}:")
    for device in cluster.devices:
        speed = "" if device.speed == 1 else f" x {device.speed:g}"
        typer.echo(f"  {device.name}  {device.kind}{speed}, {format_bytes(device.memory_bytes)}")
    if len(cluster.devices) == 1:
        typer.echo("one device leaves nothing to plan; to try it, let this host play several:")
        typer.echo("  hetpipe init --emulate 0.6,0.4,0.2 -o emulated.toml")


def parse_speeds(text: str) -> tuple[float, ...]:
    """Return the speeds of emulated devices from text such as "0.6,0.4".

    Raises: InputError if they are not numbers above zero.
    """
    try:
        speeds = tuple(float(word) for word in text.split(","))
    except ValueError:
        raise InputError(f'--emulate {text!r} is no list of speeds; write it like "0.6,0.4,0.2"') from None
    if any(not SLOWEST <= speed <= FASTEST for speed in speeds):
        raise InputError(
            f"--emulate {text!r}: speeds must be above zero, from {SLOWEST:g} to {FASTEST:g}; 1 is one core "
            "of this host"
        )
    return speeds


def emulated_text(speeds: Sequence[float], memory_bytes: float, name: str = "emulated") -> str:
    """Return a cluster.toml of one node of emulated devices that share the host's memory.

    Warns if the host has too few cores for them.
    """
    warn_if_too_fast(speeds)
    memory = _memory(memory_bytes * EMULATED_SHARE / len(speeds))
    devices = [f'  {{ kind = "{EMULATED}", speed = {speed:g}, memory = "{memory}" }},' for speed in speeds]
    interconnect = 'interconnect = { bandwidth = "1 GB/s", latency = "50 us" }'
    lines = ["devices = [", *devices, "]", f"{interconnect}   # between these devices, emulated too"]
    return _HEAD.format(name=name, node="host") + "\n".join(lines) + "\n"


def host_text() -> str:
    """Return a cluster.toml of this host's GPUs, with what is free of their memory, or of its CPU."""
    gpus = gpus_here()
    if not gpus:
        device = f'{{ kind = "{CPU}", memory = "{_memory(host_memory_bytes())}" }}'
        return _HEAD.format(name="host", node="host") + f"devices = [{device}]\n"
    devices = [
        f'  {{ kind = "{kind}", memory = "{_memory(memory)}" }},'
        for kind, memory in zip(gpus, free_memory_here(), strict=True)
    ]
    interconnect = 'interconnect = { bandwidth = "12 GB/s", latency = "10 us" }'
    lines = ["devices = [", *devices, "]", f"{interconnect}   # between the GPUs: PCIe 3, correct it"]
    return _HEAD.format(name="host", node="host") + "\n".join(lines) + "\n"


def host_memory_bytes() -> float:
    """Return the bytes of memory that this host has."""
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _memory(num_bytes: float) -> str:
    """Format bytes, rounded down to be sure that they are there."""
    return f"{int(num_bytes / 2**30 * 100) / 100:g} GiB"
