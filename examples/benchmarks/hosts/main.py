"""Are runs over several hosts predicted, whose links were measured before? See README.md. As root."""

import argparse
import importlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hetpipe.profiling.profile_cache import processor_name

ROOT = Path(__file__).parents[3]
NODES = (("big", 2), ("mid", 1), ("small", 1))
TOKEN = "0123456789abcdef" * 2
CLUSTER = """
name = "three"
[network]
bandwidth = "10 Gbit/s"
latency = "0.1 ms"
"""
NODE = """
[[nodes]]
name = "{name}"
host = "{host}"
devices = [{{ kind = "emulated", memory = "4 GiB", count = {count}, speed = {speed} }}]
"""


def main() -> None:
    options = _options()
    print("| links | strategy | predicted s | measured s | error |\n|---|---|---|---|---|")
    said: list[str] = []
    for rates in (("1gbit", "1gbit", "1gbit"), ("1gbit", "1gbit", "100mbit")):
        with three_hosts(rates) as (hosts, folder):
            for strategy in options.strategies:
                report, notes = _run(hosts, folder, strategy, options)
                predicted_s, measured_s = report["predicted_step_s"], report["measured_step_s"]
                error = f"{100 * (measured_s / predicted_s - 1):+.1f} %"
                print(
                    f"| {', '.join(rates)} | {strategy} | {predicted_s:.3f} | {measured_s:.3f} | {error} |",
                    flush=True,
                )
                said += [f"{', '.join(rates)}: {line}" for line in notes if line not in "".join(said)]
    print("", *said, sep="\n")
    print(f"\n{machine()}; {_load()}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="bert-tiny")
    parser.add_argument("--sequence-length", type=int, default=64)
    parser.add_argument("--speed", type=float, default=0.05)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--strategies", nargs="+", default=["auto", "gpipe-even", "ddp"])
    return parser.parse_args()


def _run(
    hosts: Any, folder: Path, strategy: str, options: argparse.Namespace
) -> tuple[dict[str, Any], list[str]]:
    """Return the leader's report of a run over the hosts, and what it said of the links."""
    line = (
        f"run --model {options.model} --cluster cluster.toml --token-file token --trust-network --no-save "
        f"--rendezvous tcp://{hosts[0].address}:29500 --sequence-length {options.sequence_length} "
        f"--global-batch-size 16 --profile-budget 30 --strategy {strategy} --steps {options.steps} "
        "--json"
    )
    report, said = run_on_hosts(hosts, folder, NODES, line, speed=options.speed)
    return report, [line for line in said if line.startswith("note: measured")]


@contextmanager
def three_hosts(rates: Sequence[str], *, burst: str | None = None) -> Iterator[tuple[Any, Path]]:
    """Give hosts of the tests whose links have these rates, and a folder for what they do; burst: of each."""
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    of_tests = importlib.import_module("three_hosts")
    with of_tests.three_hosts(rates) as hosts, tempfile.TemporaryDirectory() as folder:
        if burst is not None:
            for host, rate in zip(hosts, rates, strict=True):
                host.shape(rate, burst=burst)
        yield hosts, Path(folder)


def machine() -> str:
    """Return what ran: cores, processor and versions."""
    cores = f"{os.cpu_count()} x {processor_name()}"
    return f"{cores}; Python {platform.python_version()}, torch {version('torch')}"


def run_on_hosts(
    hosts: Any,
    folder: Path,
    nodes: Sequence[tuple[str, int]],
    line: str,
    *,
    speed: float,
    files: Mapping[str, str] | None = None,
) -> tuple[dict[str, Any], list[str]]:
    """Start a line of hetpipe on each host, in a folder of its own; return what the leader reported and said.

    nodes: name and number of devices of each. files: texts by name that the folders have beside cluster.toml.
    """
    text = CLUSTER + "".join(
        NODE.format(name=name, host=host.address, count=count, speed=speed)
        for (name, count), host in zip(nodes, hosts, strict=True)
    )
    started = []
    for (name, _), host in zip(nodes, hosts, strict=True):
        own = folder / name
        own.mkdir(exist_ok=True)
        (own / "token").touch(0o600)
        for file, content in {"cluster.toml": text, "token": TOKEN, **(files or {})}.items():
            (own / file).write_text(content)
        environment = {"XDG_CACHE_HOME": str(own / "cache"), "PYTHONPATH": str(ROOT)}
        command = (sys.executable, "-m", "hetpipe", *line.split(), "--node", name)
        started.append(host.start(*command, folder=own, environment=environment))
    ends = [process.communicate() for process in started]
    if any(process.returncode for process in started):
        raise subprocess.SubprocessError("\n".join(err for _, err in ends))
    report: dict[str, Any] = json.loads(ends[0][0])
    return report, ends[0][1].splitlines()


def _load() -> str:
    return f"load at the end {os.getloadavg()[0]:.2f}"


if __name__ == "__main__":
    main()
