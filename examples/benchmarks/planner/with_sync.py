"""What gradient sync adds to the steps of plans, and how far they are ahead of every other strategy's.

    python examples/benchmarks/planner/with_sync.py [--first 0] [--cases 200]

Simulated steps, gradient sync, transfers and optimizer included; a line for each case, then a table by group.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

from cases import random_case
from hetpipe.simulation.prediction import evaluator
from main import GROUPS, ninetieth, without_sync_s
from partition.exact.chain_search import AUTO
from partition.solver import compare


def with_sync(seed: int) -> dict[str, Any]:
    """Steps of `auto` and of the best other strategy, and what sync adds to that of `auto`'s plan."""
    problem, tight = random_case(seed)
    begin = time.perf_counter()
    outcomes = compare(problem, evaluator(problem.profile, problem.cluster), proof_s=0)
    seconds = time.perf_counter() - begin
    steps = {
        outcome.strategy: outcome.plan.predicted.step_s
        for outcome in outcomes
        if outcome.plan is not None and outcome.plan.predicted is not None
    }
    ours = next(outcome.plan for outcome in outcomes if outcome.strategy == AUTO)
    assert ours is not None
    others = {name: step_s for name, step_s in steps.items() if name != AUTO}
    return {
        "seed": seed,
        "devices": len(problem.cluster.devices),
        "tight": tight,
        "seconds": seconds,
        "step_s": steps[AUTO],
        "sync": steps[AUTO] / without_sync_s(ours, problem) - 1,
        "other": min(others, key=lambda name: others[name]) if others else None,
        "ahead": min(others.values()) / steps[AUTO] if others else None,
    }


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield "| clusters | cases | sync adds, median, 90th % | behind | ahead, median, most | only ours fits |"
    yield "|---|---|---|---|---|---|"
    for name, belongs in GROUPS:
        chosen = [row for row in rows if belongs(row)]
        ahead = [row["ahead"] for row in chosen if row["ahead"] is not None]
        if not ahead:
            continue
        added = [row["sync"] for row in chosen]
        behind = sum(one < 1 for one in ahead)
        yield (
            f"| {name} | {len(chosen)} | {statistics.median(added):.1%}, {ninetieth(added):.1%} | {behind} "
            f"| {statistics.median(ahead):.2f}, {max(ahead):.1f} times | {len(chosen) - len(ahead)} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--cases", type=int, default=200)
    options = parser.parse_args()
    rows = []
    for seed in range(options.first, options.first + options.cases):
        rows.append(with_sync(seed))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
