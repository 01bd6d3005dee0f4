"""env: versions and hardware."""

import importlib.metadata
import os
import platform
from typing import Any

import typer

from cost_model.units import format_bytes
from hetpipe.commands.init import host_memory_bytes
from hetpipe.commands.options import JsonOption
from hetpipe.commands.output import print_json
from hetpipe.runtime.gpus import free_memory_here, gpus_here

PACKAGES = ("hetpipe", "torch", "transformers", "numpy", "PuLP", "highspy", "pydantic", "rich", "typer")


def env_command(json: JsonOption = False) -> None:
    """Versions and hardware, for bug reports; no names of users or folders."""
    facts = environment()
    if json:
        print_json(facts)
        return
    for key, value in facts.items():
        shown = ", ".join(map(str, value)) or "none" if isinstance(value, list) else value
        typer.echo(f"{key}: {shown}")


def environment() -> dict[str, Any]:
    """Return what `hetpipe env` prints."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return {
        **versions,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "memory": format_bytes(host_memory_bytes()),
        "gpus": [
            f"{kind} {format_bytes(memory)} free"
            for kind, memory in zip(gpus_here(), free_memory_here(), strict=True)
        ],
    }
