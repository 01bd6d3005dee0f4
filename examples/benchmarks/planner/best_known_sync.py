"""How far plans are from the best ones known where the network decides: of families and walks, each long.

    python examples/benchmarks/planner/best_known_sync.py find best.jsonl [--seconds 600] [--cases 0 20 40]
    python examples/benchmarks/planner/best_known_sync.py compare best.jsonl plans.jsonl

`find` adds a line for each case of `reference.py`: the step of the best plan that so many CPU seconds find,
half of them by enumerating and changing families, half by walks of single pipelines with the simulator from
the best families, from the plan of `auto` and from what its search finds. `compare` reads steps of `auto` out
of files that `reference.py plan` writes; the best known is no longer than the families of `reference.jsonl`
and than those.
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from best_known import walks
from measured_cases import mixed_case
from reference import Reference, families_of, lines

from hetpipe.simulation.prediction import evaluator
from main import ninetieth
from partition.auto import auto
from partition.estimates.timed_pipeline import TimedPipeline, TimedStage
from partition.local_search.families import FamilySet
from partition.local_search.moves import PipelineSet
from partition.local_search.pipeline_search import PipelineSearch
from partition.plan import Plan

CASES = (0, 50, 25, 75, 10, 60, 35, 85, 20, 70, 45, 95, 5, 55, 30, 80, 15, 65, 40, 90)
"""Every fifth, so that the first of them lie apart, too."""
STARTS = 6
REFERENCES = Path(__file__).with_name("reference.jsonl")


def found(index: int, seconds: float, known: Sequence[FamilySet]) -> dict[str, Any]:
    """Return the line of a case. known: families that a shorter search found."""
    problem = mixed_case(index)
    evaluate, search = evaluator(problem.profile, problem.cluster), PipelineSearch(problem)
    plan = auto(problem, evaluate, search=search)
    auto_s = evaluate(plan).step_s
    begin_s = time.process_time()
    reference = Reference(problem, seconds / 2)
    for families in known:
        reference.step_s(families)
    families, families_s = reference.find()

    def simulated(timed: Sequence[TimedPipeline], _: float) -> float:
        trial = search.plan("best known", timed)
        return evaluate(trial).step_s if trial is not None else float("inf")

    likely = sorted(reference.known, key=lambda it: reference.known[it])[:STARTS]
    sets = [timed for one in likely if (timed := reference.cutter.timed(one)) is not None]
    sets += [list(start.timed) for start in search.starts()[:STARTS]]
    sets += [timed] if (timed := _pipelines_of(plan, search)) is not None else []
    starts = [PipelineSet(simulated(timed, 0.0), tuple(timed), "start") for timed in sets]
    starts.sort(key=lambda start: start.step_s)
    best = walks(search, starts[: 2 * STARTS], simulated, begin_s + seconds)[-1]
    return {
        "case": index,
        "devices": len(problem.cluster.devices),
        "auto_s": auto_s,
        "families_s": families_s,
        "walks_s": best.step_s,
        "best_s": min(auto_s, families_s, best.step_s),
        "cpu_s": time.process_time() - begin_s,
    }


def _pipelines_of(plan: Plan, search: PipelineSearch) -> list[TimedPipeline] | None:
    """Return the pipelines of a plan; None where it shares devices or shards states: walks do not."""
    names = [name for pipeline in plan.pipelines for stage in pipeline.stages for name in stage.devices]
    if plan.state_owners is not None or plan.zero or len(set(names)) < len(names):
        return None
    devices = {device.name: device for device in search.problem.cluster.devices}
    return [
        search.timings.pipeline(
            tuple(
                TimedStage(devices[stage.devices[0]], *stage.layers, stage.recompute)
                for stage in pipeline.stages
            ),
            pipeline.microbatch_size,
        )
        for pipeline in plan.pipelines
    ]


def table(best: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Give a line for each case, and a summary."""
    families_s = {row["case"]: row["step_s"] for row in lines(REFERENCES)}
    auto_s = {row["case"]: row["auto_s"] for row in rows}
    yield "| case | devices | families | walks | best known | `auto` | behind |"
    yield "|---|---|---|---|---|---|---|"
    behind = []
    for row in sorted(best, key=lambda row: int(row["case"])):
        case = row["case"]
        ours_s = auto_s.get(case, row["auto_s"])
        best_s = min(row["best_s"], families_s[case], ours_s)
        behind.append(ours_s / best_s - 1)
        yield (
            f"| {case} | {row['devices']} | {min(row['families_s'], families_s[case]):.4g} s "
            f"| {row['walks_s']:.4g} s | {best_s:.4g} s | {ours_s:.4g} s | {behind[-1]:.2%} |"
        )
    yield (
        f"\n{len(behind)} cases: median {statistics.median(behind):.2%}, "
        f"90th percentile {ninetieth(behind):.2%}, most {max(behind):.2%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=("find", "compare"))
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--cases", type=int, nargs="*", default=list(CASES))
    parser.add_argument("--seconds", type=float, default=600.0)
    options = parser.parse_args()
    file, *others = options.files
    if options.what == "compare":
        print("\n".join(table(lines(file), [row for other in others for row in lines(other)])))
        return
    references = {row["case"]: row for row in lines(REFERENCES)}
    for index in options.cases:
        if index not in {row["case"] for row in lines(file)}:
            known = [families_of(references[index])] if references[index]["families"] else []
            with file.open("a") as output:
                output.write(json.dumps(found(index, options.seconds, known)) + "\n")


if __name__ == "__main__":
    main()
