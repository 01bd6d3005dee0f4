"""What families of pipelines gain where gradient sync takes much of a step.

    python examples/benchmarks/planner/families.py [--seeds 3 5 7] [--without-sync 0 4 5]

A row for each case of `sync_cases.py` (--seeds) and of `cases.py` with all links a thousand times as fast
(--without-sync): steps of `auto` without families and with them, and of the best of many more families, which
are enumerated and not changed. Simulated steps, gradient sync included; CPU seconds.
"""

import argparse
import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from sync_cases import sync_case

from cases import random_case
from cost_model.cluster import Cluster, Link
from hetpipe.simulation.prediction import evaluator
from partition.auto import auto
from partition.local_search.family_search import best_families
from partition.local_search.pipeline_search import PipelineSearch
from partition.problem import Problem

NONE = {"least_gap": math.inf, "near": math.inf}
MORE = {"kept": 112, "kept_with_rest": 36, "second": 24}
MANY = {**MORE, "simulated": 200, "always_simulated": 200, "climbed": 0}
FASTER = 1000.0


@dataclass(frozen=True, slots=True)
class Row:
    """A case: simulated steps and CPU seconds of `auto` before and after, and the reference's step."""

    problem: Problem
    before_s: float
    before_cpu_s: float
    after_s: float
    after_cpu_s: float
    reference_s: float

    @property
    def gain(self) -> float:
        return self.before_s / self.after_s - 1


def measured(problem: Problem) -> Row:
    """Plan a problem without families and with them."""
    before_s, before_cpu_s = _planned(problem, **NONE)
    after_s, after_cpu_s = _planned(problem)
    return Row(problem, before_s, before_cpu_s, after_s, after_cpu_s, _reference_s(problem))


def _planned(problem: Problem, **effort: float) -> tuple[float, float]:
    begin, evaluate = time.process_time(), evaluator(problem.profile, problem.cluster)
    plan = auto(problem, evaluate, search=_search(problem, **effort))
    return evaluate(plan).step_s, time.process_time() - begin


def _search(problem: Problem, **effort: float) -> PipelineSearch:
    """Return a search with other numbers for the effort on families."""
    search = PipelineSearch(problem)
    search.effort = replace(search.effort, families=replace(search.effort.families, **effort))
    return search


def _reference_s(problem: Problem) -> float:
    """Return the step of the best of many families; inf where none fits."""
    evaluate = evaluator(problem.profile, problem.cluster)
    sets = best_families(_search(problem, **MANY), lambda plan: evaluate(plan).step_s, math.inf)
    return sets[0].step_s if sets else math.inf


def without_sync(problem: Problem) -> Problem:
    """Return a problem whose links are so fast that sums and messages take next to nothing."""

    def fast(link: Link) -> Link:
        return Link(link.latency_s / FASTER, link.bandwidth_bytes_per_s * FASTER)

    cluster = problem.cluster
    nodes = tuple(
        replace(node, interconnect=fast(node.interconnect or cluster.network)) for node in cluster.nodes
    )
    return replace(problem, cluster=Cluster(cluster.name, fast(cluster.network), nodes))


def line(name: str, row: Row) -> str:
    behind = max(0.0, row.after_s / row.reference_s - 1)
    return (
        f"| {name} | {len(row.problem.cluster.devices)} | {row.before_s:.4g} | {row.reference_s:.4g} "
        f"| {row.after_s:.4g} | {row.gain:.1%} | {behind:.1%} "
        f"| {row.before_cpu_s:.1f} | {row.after_cpu_s:.1f} |"
    )


def summary(rows: list[Row]) -> Iterator[str]:
    gains = sorted(row.gain for row in rows)
    before_s, after_s = (sum(getattr(row, name) for row in rows) for name in ("before_cpu_s", "after_cpu_s"))
    yield (
        f"\n{len(rows)} cases: median gain {statistics.median(gains):.1%}, least {gains[0]:.1%}, most "
        f"{gains[-1]:.1%}; {before_s:.0f} CPU s before, {after_s:.0f} s after"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="*", default=list(range(23)))
    parser.add_argument("--without-sync", type=int, nargs="*", default=[])
    options = parser.parse_args()
    print(
        "| case | devices | auto before | many families | auto after | gain | behind | CPU s before | after |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    rows = []
    for seed in options.seeds:
        rows.append(measured(sync_case(seed)))
        print(line(str(seed), rows[-1]), flush=True)
    for seed in options.without_sync:
        row = measured(without_sync(random_case(seed)[0]))
        print(line(f"{seed}, no sync", row), flush=True)
    if rows:
        print("\n".join(summary(rows)))


if __name__ == "__main__":
    main()
