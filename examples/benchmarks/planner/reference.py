"""How far `auto` is from the best symmetric families that a long enumeration finds, where sync takes long.

    python examples/benchmarks/planner/reference.py find FILE [--first 0] [--cases 100] [--seconds 60]
    python examples/benchmarks/planner/reference.py plan RESULTS [--without] [--thorough] [--proof-seconds S]
        [--label L]
    python examples/benchmarks/planner/reference.py compare FILE RESULTS

`find` adds a line of JSON for each case of `measured_cases.mixed_case` that FILE does not have yet: the best
families after so many CPU seconds. `plan` adds a line to RESULTS for each case that it does not have by this
label: the step of `auto`; --without: and of `auto` without families; --thorough: of a thorough search;
--proof-seconds: and its bound.
`compare` simulates the families of FILE again, and sums both up.
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
from partition.estimates.family_effort import FamilyEffort
from partition.local_search.families import Counts, Family, FamilySet, FamilySpace, Outline
from partition.local_search.family_cuts import FamilyCutter
from partition.local_search.family_moves import FamilyClimb
from partition.local_search.family_starts import FamilyStarts
from partition.local_search.pipeline_search import PipelineSearch
from partition.problem import Problem
from partition.solver import bound_of

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


def planned(index: int, label: str, without: bool, thorough: bool, proof_s: float | None) -> dict[str, Any]:
    """Return the step of `auto`, without: that of `auto` without families, proof_s: its bound."""
    problem = replace(mixed_case(index), thorough=thorough)
    evaluate, search = evaluator(problem.profile, problem.cluster), PipelineSearch(problem)
    begin_s = time.process_time()
    plan = auto(problem, evaluate, search=search)
    auto_s, cpu_s = evaluate(plan).step_s, time.process_time() - begin_s
    result = {"case": index, "label": label, "auto_s": auto_s, "cpu_s": cpu_s, "zero": plan.zero}
    if proof_s:
        begin_s, search.best = time.process_time(), search.best or auto_s
        bound = bound_of(plan, search, auto_s, proof_s)
        without_sums_s = max(bound.fractional_s, bound.pipeline_s or 0.0)
        result |= {"without_sums_s": without_sums_s, "bound_s": max(without_sums_s, bound.sync_s or 0.0)}
        result |= {"proof_s": time.process_time() - begin_s}
    if without:
        search = PipelineSearch(problem)
        search.effort = replace(search.effort, families=replace(search.effort.families, **NONE))
        result["without_s"] = evaluate(auto(problem, evaluate, search=search)).step_s
    return result


def simulated_again(row: dict[str, Any]) -> dict[str, Any]:
    """Return a line of references with the step of today's simulator; inf without families."""
    problem = mixed_case(row["case"])
    search = PipelineSearch(problem)
    cutter, evaluate = FamilyCutter(search, FamilySpace(search)), evaluator(problem.profile, problem.cluster)
    families = families_of(row)
    return {**row, "step_s": simulated_s(search, cutter, evaluate, families) if families else math.inf}


def table(references: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Give the cases in which `auto` is behind, and a summary, by label."""
    known_s = {row["case"]: row["step_s"] for row in references}
    for label in dict.fromkeys(row["label"] for row in rows):
        chosen = [row for row in rows if row["label"] == label]
        pairs = [(row, known_s[row["case"]]) for row in chosen if row["case"] in known_s]
        behind = sorted(max(0.0, row["auto_s"] / step_s - 1) for row, step_s in pairs)
        yield (
            f"{label}: {len(pairs)} cases; more than 0.5 % behind in {sum(one > 0.005 for one in behind)}, "
            f"90th percentile {ninetieth(behind):.2%}, most {behind[-1]:.2%}; "
            f"ahead in {sum(row['auto_s'] < step_s * 0.999 for row, step_s in pairs)}"
        )
        for over, under, what in (
            ("without_s", "auto_s", "auto without families over auto"),
            ("auto_s", "bound_s", "auto over its bound"),
        ):
            gains = sorted(row[over] / row[under] - 1 for row in chosen if over in row and under in row)
            if gains:
                yield (
                    f"  {what} in {len(gains)}: median {statistics.median(gains):.1%}, "
                    f"90th percentile {ninetieth(gains):.1%}, least {gains[0]:.1%}, most {gains[-1]:.1%}"
                )
        for row, step_s in pairs:
            if row["auto_s"] > 1.005 * step_s:
                yield f"  case {row['case']}: {row['auto_s']:.4g} s for {step_s:.4g} s"


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _append(path: Path, row: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=("find", "plan", "compare"))
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--label", default="auto")
    parser.add_argument("--without", action="store_true", help="plan without families too")
    parser.add_argument("--thorough", action="store_true", help="search several times as long")
    parser.add_argument("--proof-seconds", type=float, help="bound each case, in so many CPU seconds")
    options = parser.parse_args()
    file, *others = options.files
    indices = range(options.first, options.first + options.cases)
    if options.what == "find":
        known = {row["case"] for row in lines(file)}
        for index in indices:
            if index not in known:
                _append(file, found(index, options.seconds))
    elif options.what == "plan":
        known = {row["case"] for row in lines(file) if row["label"] == options.label}
        for index in indices:
            if index not in known:
                _append(
                    file,
                    planned(index, options.label, options.without, options.thorough, options.proof_seconds),
                )
    else:
        references = [simulated_again(row) for row in lines(file) if row["case"] in indices]
        for results in others:
            print("\n".join(table(references, lines(results))))


if __name__ == "__main__":
    main()
