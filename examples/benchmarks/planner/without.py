"""What each source of candidate plans wins: steps of `auto` without it over those with all of them.

    python examples/benchmarks/planner/without.py few [--cases 24]
    python examples/benchmarks/planner/without.py tight [--cases 45]
    python examples/benchmarks/planner/without.py equal [--cases 48]

few: clusters of `cases.py` of up to 5 devices; tight: those of 6 to 24 with tight memory; equal: 2 to 8 equal
devices, few microbatches, links of 0.1 to 20 Gbit/s.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import cache
from itertools import count, islice
from unittest.mock import patch

import partition.auto
from cases import equal_case, random_case
from cost_model.errors import InfeasibleError
from hetpipe.simulation.prediction import evaluator
from partition.exact.chain_search import Candidates
from partition.local_search import searched_plans
from partition.plan import Figures, Plan
from partition.problem import Problem
from partition.shared_devices.replicated_stages import ReplicatedStages
from partition.shared_devices.shifted_cuts import ShiftedCuts

NONE = "with all"
SOURCES: Mapping[str, tuple[object, str, object]] = {
    "orders of one pipeline": (searched_plans, "search_chains", Candidates((), ())),
    "replicated stages": (ReplicatedStages, "drafts", ()),
    "shifted cuts": (ShiftedCuts, "drafts", ()),
    "interleaved": (partition.auto, "interleaved_plans", ()),
}
GAIN = 1e-3


def problems(which: str) -> Iterator[tuple[int, Problem]]:
    """Yield (seed, problem) of a set"""
    for seed in count():
        if which == "equal":
            yield seed, equal_case(seed)
            continue
        problem, tight = random_case(seed)
        devices = len(problem.cluster.devices)
        if (which == "few" and devices <= 5) or (which == "tight" and tight and 5 < devices <= 24):
            yield seed, problem


def steps(problem: Problem) -> dict[str, float | None]:
    """Return the step of the best plan with all sources and without each; None where none fits."""
    simulated: Callable[[Plan], Figures] = cache(evaluator(problem.profile, problem.cluster))
    found: dict[str, float | None] = {}
    for name in (NONE, *SOURCES):
        with ExitStack() as off:
            if name in SOURCES:
                owner, function, nothing = SOURCES[name]
                off.enter_context(patch.object(owner, function, lambda *_, value=nothing: value))
            try:
                found[name] = simulated(partition.auto.auto(problem, simulated)).step_s
            except InfeasibleError:
                found[name] = None
    return found


def table(rows: list[dict[str, float | None]]) -> Iterator[str]:
    yield "| without | cases | mean | most | above 0.1 % |"
    yield "|---|---|---|---|---|"
    for name in SOURCES:
        pairs = [(row[name], row[NONE]) for row in rows]
        lost = [step_s / best_s - 1 for step_s, best_s in pairs if step_s and best_s]
        many = sum(one > GAIN for one in lost)
        yield f"| {name} | {len(lost)} | {sum(lost) / len(lost):.2%} | {max(lost):.1%} | {many} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("which", choices=("few", "tight", "equal"))
    parser.add_argument("--cases", type=int, default=24)
    options = parser.parse_args()
    rows = []
    for seed, problem in islice(problems(options.which), options.cases):
        rows.append(steps(problem))
        print(json.dumps({"seed": seed, **rows[-1]}), file=sys.stderr, flush=True)
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
