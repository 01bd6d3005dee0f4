"""How far `auto` is from the best symmetric families that a long enumeration finds, where sync takes long.

    python examples/benchmarks/planner/reference.py find FILE [--first 0] [--cases 100] [--seconds 60]
    python examples/benchmarks/planner/reference.py compare FILE RESULTS [--label NAME]
    python examples/benchmarks/planner/reference.py table RESULTS

`find` adds a line of JSON for each case of `measured_cases.mixed_case` that FILE does not have yet: the best
families after so many CPU seconds. `compare` simulates them again, plans the case with `auto` as it
is, --without: and with `auto` without families, and adds a line to RESULTS; `table` sums those up.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

from families import MORE, NONE
from measured_cases import mixed_case

from hetpipe.simulation.prediction import evaluator
from main import ninetieth
from partition.auto import auto
from partition.estimates.effort import FamilyEffort
from partition.local_search.families import Counts, Family, FamilySet, FamilySpace, Outline
from partition.local_search.family_cuts import FamilyCutter
from partition.local_search.family_moves import FamilyClimb
from partition.local_search.family_starts import FamilyStarts
from partition.local_search.pipeline_search import PipelineSearch
from partition.problem import Problem

WIDER = ({}, MORE, {"kept": 300, "kept_with_rest": 100, "second": 60, "second_options": 6})
"""Effort of one enumeration after the other, while there is time."""
ENUMERATED, SHARED = 0.4, (1.0, 0.75, 0.5, 1 / 3, 0.25)
"""Share of the time after which the best are changed; copies of a chain, of the most."""
ALWAYS = 24  # likely families that are simulated of each enumeration
LONG_CLIMB = {"climb_tries": 120, "most_in_vain": 60}
CLIMBED = 6


class ManyStarts(FamilyStarts):
    """Families with other numbers of copies than all and half of those that there is room for."""

    def _vectors(self) -> list[tuple[Counts, int]]:
        more = [
            (vector, max(1, round(part * self._space.room(vector, self._space.counts))))
            for vector, _ in super()._vectors()
            for part in SHARED
        ]
        return list(dict.fromkeys(more))


class Reference:
    """The best families of a problem, simulated until a number of CPU seconds is over."""

    def __init__(self, problem: Problem, seconds: float) -> None:
        self.search, self.evaluate = PipelineSearch(problem), evaluator(problem.profile, problem.cluster)
        self._end_s, self._seconds = time.process_time() + seconds, seconds
        self.known: dict[FamilySet, float] = {}
        self.cutter = FamilyCutter(self.search, FamilySpace(self.search))

    def find(self) -> tuple[FamilySet, float]:
        """Return the best families and their simulated step."""
        for index, wider in enumerate(WIDER):
            effort = replace(self.search.effort.families, **wider)
            starts = (ManyStarts if index else FamilyStarts)(self.search, effort)
            starts.cutter = self.cutter
            for place, families in enumerate(starts.likely()):
                if place >= ALWAYS and self._left() < 1 - ENUMERATED * (index + 1) / len(WIDER):
                    break
                self.step_s(families)
            if self._left() < 1 - ENUMERATED:
                break
        self._climb(replace(self.search.effort.families, **LONG_CLIMB))
        return min(self.known.items(), key=lambda item: item[1])

    def step_s(self, families: FamilySet, _: float = math.inf) -> float:
        if families not in self.known:
            self.known[families] = simulated_s(self.search, self.cutter, self.evaluate, families)
        return self.known[families]

    def _climb(self, effort: FamilyEffort) -> None:
        """Change the best families again and again, with other seeds, while there is time."""
        climb, seed = FamilyClimb(self.cutter, self.step_s, effort), 0
        while self._left() > 0:
            for families in sorted(self.known, key=lambda it: self.known[it])[:CLIMBED]:
                if self._left() > 0:
                    climb.improve(families, lambda: self._left() > 0, seed)
            seed += 1

    def _left(self) -> float:
        return (self._end_s - time.process_time()) / self._seconds


def simulated_s(
    search: PipelineSearch, cutter: FamilyCutter, evaluate: Callable[..., Any], families: FamilySet
) -> float:
    """Return the simulated step of families; inf where they are no plan."""
    timed = cutter.timed(families)
    plan = search.plan("families", timed) if timed is not None else None
    return float(evaluate(plan).step_s) if plan is not None else math.inf


def found(index: int, seconds: float) -> dict[str, Any]:
    """Return the line of a case."""
    problem = mixed_case(index)
    reference = Reference(problem, seconds)
    families, step_s = reference.find()
    return {
        "case": index,
        "model": problem.profile.model,
        "devices": len(problem.cluster.devices),
        "simulated": len(reference.known),
        "step_s": step_s,
        "families": [astuple(family) for family in families],
    }


def families_of(row: dict[str, Any]) -> FamilySet:
    """Return the families of a line."""
    return tuple(
        Family(Outline(tuple(chain), *rest), tuple((start, stop, again) for start, stop, again in cuts))
        for (chain, *rest), cuts in row["families"]
    )


def compared(row: dict[str, Any], label: str, without: bool) -> dict[str, Any]:
    """Return the step of `auto` beside those of the reference, and of `auto` without families."""
    problem = mixed_case(row["case"])
    evaluate, search = evaluator(problem.profile, problem.cluster), PipelineSearch(problem)
    cutter = FamilyCutter(search, FamilySpace(search))
    reference_s = simulated_s(search, cutter, evaluate, families_of(row)) if row["families"] else math.inf
    begin_s = time.process_time()
    auto_s = evaluate(auto(problem, evaluate, search=search)).step_s
    cpu_s = time.process_time() - begin_s
    result = {"case": row["case"], "label": label, "devices": row["devices"], "model": row["model"]}
    result |= {"reference_s": reference_s, "auto_s": auto_s, "cpu_s": cpu_s}
    if without:
        search = PipelineSearch(problem)
        search.effort = replace(search.effort, families=replace(search.effort.families, **NONE))
        result["without_s"] = evaluate(auto(problem, evaluate, search=search)).step_s
    return result


def table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Give the cases in which `auto` is behind, and a summary, by label."""
    for label in dict.fromkeys(row["label"] for row in rows):
        chosen = [row for row in rows if row["label"] == label]
        behind = sorted(max(0.0, row["auto_s"] / row["reference_s"] - 1) for row in chosen)
        gains = sorted(row["without_s"] / row["auto_s"] - 1 for row in chosen if "without_s" in row)
        yield (
            f"{label}: {len(chosen)} cases; more than 0.5 % behind in {sum(one > 0.005 for one in behind)}, "
            f"90th percentile {ninetieth(behind):.2%}, most {behind[-1]:.2%}; "
            f"ahead in {sum(row['auto_s'] < row['reference_s'] * 0.999 for row in chosen)}"
        )
        if gains:
            yield (
                f"  gain over auto without families in {len(gains)}: median {statistics.median(gains):.1%}, "
                f"mean {statistics.mean(gains):.1%}, least {gains[0]:.1%}, most {gains[-1]:.1%}"
            )
        for row in chosen:
            if row["auto_s"] > 1.005 * row["reference_s"]:
                yield (
                    f"  case {row['case']}, {row['model']}, {row['devices']} devices: "
                    f"{row['auto_s']:.4g} s for {row['reference_s']:.4g} s"
                )


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _append(path: Path, row: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=("find", "compare", "table"))
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--label", default="auto")
    parser.add_argument("--without", action="store_true", help="plan without families too")
    options = parser.parse_args()
    first, *others = options.files
    indices = range(options.first, options.first + options.cases)
    if options.what == "table":
        print("\n".join(table(_lines(first))))
    elif options.what == "find":
        known = {row["case"] for row in _lines(first)}
        for index in indices:
            if index not in known:
                _append(first, found(index, options.seconds))
    else:
        (results,) = others
        known = {row["case"] for row in _lines(results) if row["label"] == options.label}
        for row in _lines(first):
            if row["case"] in indices and row["case"] not in known:
                _append(results, compared(row, options.label, options.without))


if __name__ == "__main__":
    main()
