"""Do thousands of steps under a hundred plans hang, leak or drift? See README.md."""

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from hetpipe.profiling.profile_cache import processor_name
from hetpipe.runtime.processes import RankGroup, run_ranks
from random_cases import MODULES
from stress_ranks import stress

MOST_RSS_MIB = 12.0
"""A rank may hold so much more memory at the end than after the warm-up: the allocator's pieces, and what
torch's store keeps of each process group for as long as the process lives."""
MOST_DIFFERENCE = 1e-9
"""Of gradients from those of one process, in units of the largest, after steps that follow each other."""
COUNTS = ("files", "threads", "tensors")
HEADER = (
    "| steps | plans | RSS MiB of each rank | open files | threads | live tensors | worst difference |\n"
    "|---|---|---|---|---|---|---|"
)


def main() -> int:
    options = _options()
    print(HEADER)
    rows: list[dict[str, Any]] = []

    def show(row: dict[str, Any]) -> None:
        rows.append(row)
        print(_line(row, options.steps_of_plan), flush=True)

    run(options, show)
    if options.results:
        with open(options.results, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    found = drift(rows, options.warm_up)
    print(f"\n{os.cpu_count()} cores ({processor_name()}); Python {platform.python_version()}", end="")
    print(f", torch {version('torch')}; load at the end {os.getloadavg()[0]:.1f}")
    print("\n".join(found) or "no drift")
    return 1 if found else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--steps-of-plan", type=int, default=20)
    parser.add_argument("--every", type=int, default=200, help="steps from row to row")
    parser.add_argument("--warm-up", type=int, default=2, help="rows before the one that is compared with")
    parser.add_argument("--seed", type=int, default=1000, help="of the first plan")
    parser.add_argument("--results", help="file to write, a line for each row")
    return parser.parse_args()


def run(options: argparse.Namespace, show: Callable[[dict[str, Any]], None]) -> None:
    """Run all steps on ranks that are started once; show is called with each row."""
    names = tuple(f"n/{rank}" for rank in range(options.ranks))
    group = RankGroup(names, (1,) * options.ranks, preload=MODULES, timeout_s=120.0)
    arguments = (options.steps, options.steps_of_plan, options.every, options.ranks, options.seed)
    run_ranks(stress, arguments, group, show)


def drift(rows: list[dict[str, Any]], warm_up: int) -> list[str]:
    """What grew between the end of the warm-up and the end, or differs from one process: a line for each."""
    found = [
        f"after {row['steps']} steps gradients differ by {row['worst']:.1e}, above {MOST_DIFFERENCE:.0e}"
        for row in rows
        if not row["worst"] <= MOST_DIFFERENCE
    ]
    begin, end = rows[warm_up], rows[-1]
    for rank, (before, after) in enumerate(zip(begin["ranks"], end["ranks"], strict=True)):
        if after["rss_mib"] > before["rss_mib"] + MOST_RSS_MIB:
            found.append(f"rank {rank} has {after['rss_mib']:.0f} MiB, {before['rss_mib']:.0f} before")
        found += [
            f"rank {rank} has {after[name]} {name}, {before[name]} before"
            for name in COUNTS
            if after[name] > before[name]
        ]
    return found


def _line(row: dict[str, Any], steps_of_plan: int) -> str:
    rss = " ".join(f"{rank['rss_mib']:.0f}" for rank in row["ranks"])
    counts = " | ".join(" ".join(f"{rank[name]:.0f}" for rank in row["ranks"]) for name in COUNTS)
    steps = row["steps"]
    return f"| {steps:,} | {steps // steps_of_plan} | {rss} | {counts} | {row['worst']:.1e} |"


if __name__ == "__main__":
    sys.exit(main())
