"""How far the estimates of the search are from the simulator where gradient sync takes long.

    python examples/benchmarks/planner/estimates.py RESULTS [--first 0] [--cases 30]

Sets of each case of `measured_cases.mixed_case`: starts of the search over single pipelines, and the first
families. *set* is what each step of the local search is judged by; *shared* and *alone* are the two estimates
of families, with links shared by copies that send side by side and as if there were no others, whose rankings
are interleaved; *family* is the lesser. Relative errors: estimate over simulated step, less one.
"""

import argparse
import json
import math
import statistics
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from measured_cases import mixed_case

from hetpipe.simulation.prediction import evaluator
from partition.estimates.gradient_sync import SyncCosts
from partition.local_search.family_starts import FamilyStarts
from partition.local_search.pipeline_search import PipelineSearch

FAMILIES, STARTS = 8, 6


def errors(index: int) -> Iterator[dict[str, Any]]:
    """Give the relative errors of the estimates of each set of a case."""
    problem = mixed_case(index)
    search, evaluate = PipelineSearch(problem), evaluator(problem.profile, problem.cluster)
    sync = SyncCosts(search.costs)
    judge = search._with_cards(lambda timed, seconds: seconds + sync.exposed_s(timed))
    starts = FamilyStarts(search, search.effort.families)
    rows: list[tuple[str, Sequence[Any], dict[str, float]]] = []
    for families in islice(starts.likely(), FAMILIES):
        timed = starts.cutter.timed(families)
        if timed is not None:
            both = {
                name: starts.cutter.estimate_s(families, shared=shared)
                for name, shared in (("shared", True), ("alone", False))
            }
            rows.append(("families", timed, {**both, "family": min(both.values())}))
    rows += [("starts", start.timed, {}) for start in search.starts()[:STARTS]]
    for name, timed, estimates in rows:
        plan = search.plan("estimate", timed)
        if plan is not None:
            step_s = evaluate(plan).step_s
            estimates = {**estimates, "set": judge(timed, search.clock_s(timed))}
            known = {key: value / step_s - 1 for key, value in estimates.items() if math.isfinite(value)}
            yield {"case": index, "of": name, "step_s": step_s, **known}


def table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield "| sets | estimate | number | median | median of sizes | 95th percentile | most below | above |"
    yield "|---|---|---|---|---|---|---|---|"
    for group in ("families", "starts"):
        for name in ("set", "shared", "alone", "family"):
            found = sorted(row[name] for row in rows if row["of"] == group and name in row)
            if found:
                sizes = sorted(map(abs, found))
                high = sizes[min(len(sizes) - 1, int(0.95 * len(sizes)))]
                yield (
                    f"| {group} | {name} | {len(found)} | {statistics.median(found):+.1%} "
                    f"| {statistics.median(sizes):.1%} | {high:.1%} | {found[0]:+.0%} | {found[-1]:+.0%} |"
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--cases", type=int, default=30)
    options = parser.parse_args()
    path: Path = options.results
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    for index in range(options.first, options.first + options.cases):
        if all(row["case"] != index for row in rows):
            new = list(errors(index))
            rows += new
            with path.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in new)
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
