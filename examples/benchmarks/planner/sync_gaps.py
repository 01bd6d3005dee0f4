"""Gaps of auto's plans on clusters where gradient sync takes much of a step, without sums and with them.

python examples/benchmarks/planner/sync_gaps.py 5 6 9

With --steps the plans are made once: their steps, and the search's clocks without sums, are kept there.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

from sync_cases import sync_case

from hetpipe.simulation.prediction import evaluator
from partition.auto import auto
from partition.bounds.best_bound import best_bound
from partition.local_search.pipeline_search import PipelineSearch


def row(seed: int, steps: dict[str, tuple[float, float]], proof_s: float | None) -> tuple[float, float]:
    """Print a case's row of the table; return its gaps without sums and with them.

    steps: seconds of the plan's step and of its clock without sums, by seed; those that lack are added, of
    plans that shard no states alone: the bound with sums speaks of no others.
    """
    problem = sync_case(seed)
    search = PipelineSearch(problem)
    if str(seed) not in steps:
        evaluate = evaluator(problem.profile, problem.cluster)
        plan = auto(problem, evaluate, search=search)
        step_s = evaluate(plan).step_s
        if plan.zero:
            raise SystemExit(f"{seed}: the plan shards states; give a step of one that does not by --steps")
        steps[str(seed)] = step_s, search.best or step_s
    step_s, search.best = steps[str(seed)]
    begin_s = time.process_time()
    bound = best_bound(search, proof_s=proof_s, step_s=step_s)
    proof_s = time.process_time() - begin_s
    without_s = max(bound.fractional_s, bound.pipeline_s or 0.0)
    with_s = max(without_s, bound.sync_s or 0.0)
    gaps = step_s / without_s - 1, step_s / with_s - 1
    devices, bandwidth = len(problem.cluster.devices), problem.cluster.network.bandwidth_bytes_per_s
    print(
        f"| {seed} | {devices} | {bandwidth * 8e-9:g} Gbit/s | {problem.global_batch_size // devices} "
        f"| {step_s:.4g} s | {without_s:.4g} s | {with_s:.4g} s | {gaps[0]:.1%} | {gaps[1]:.1%} "
        f"| {proof_s:.1f} s |",
        flush=True,
    )
    return gaps


def main() -> None:
    """Print a row for each case by its seed, and the medians of the gaps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seeds", type=int, nargs="+")
    parser.add_argument("--steps", type=Path, help="JSON file of steps that are known, and of new ones")
    parser.add_argument("--proof-seconds", type=float, help="by the clock, of a case's bounds")
    given = parser.parse_args()
    steps = json.loads(given.steps.read_text()) if given.steps and given.steps.exists() else {}
    gaps = [row(seed, steps, given.proof_seconds) for seed in given.seeds]
    if given.steps:
        given.steps.write_text(json.dumps(steps))
    print("median", *(f"{statistics.median(column):.1%}" for column in zip(*gaps, strict=True)))


if __name__ == "__main__":
    main()
