"""The published layouts of Sailor, Zorse and HexiScale, beside `auto` on the same facts. See README.md."""

import argparse
from pathlib import Path

from layouts import Layout, cluster_text, layouts

from cost_model.profile import profile_text
from cost_model.units import format_bytes
from hetpipe.simulation.prediction import evaluator
from partition.auto import STRATEGIES
from partition.plan import Figures, Plan
from partition.plan_file import plan_text
from partition.problem import Problem

SYSTEMS = ("sailor", "zorse", "hexiscale")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="layouts, or systems, by name")
    parser.add_argument(
        "--write", type=Path, metavar="FOLDER", help="write plan, profile and cluster of each"
    )
    options = parser.parse_args()
    chosen = [
        each for each in layouts() if not options.only or {each.name, each.plan.strategy} & set(options.only)
    ]
    if options.write:
        for layout in chosen:
            write(layout, options.write / layout.name)
    for system in SYSTEMS:
        of_system = [layout for layout in chosen if layout.plan.strategy == system]
        if of_system:
            print(table(of_system), flush=True)


def write(layout: Layout, folder: Path) -> None:
    """Write what `hetpipe simulate --plan`, `plan` and `compare` read."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.json").write_text(plan_text(layout.plan), encoding="utf-8")
    (folder / "profile.json").write_text(profile_text(layout.problem.profile), encoding="utf-8")
    (folder / "cluster.toml").write_text(cluster_text(layout.cluster_data), encoding="utf-8")


def table(of_system: list[Layout]) -> str:
    """Return markdown: each layout's step as its authors give it, as predicted here, and `auto`'s."""
    alone = any(layout.alone for layout in of_system)
    columns = ["layout", "samples", f"s ({of_system[0].said})", "predicted s", "bubble"]
    columns += ["`auto`, predicted s", "gain"] + ["`auto`, single GPUs", "gain"] * alone
    lines = [f"### {of_system[0].plan.strategy}\n", _row(columns), _row(["---"] * len(columns))]
    notes = []
    for layout in of_system:
        figures = predicted(layout.problem, layout.plan)
        cells = [layout.name, str(layout.plan.global_batch_size), f"{layout.said_s:.2f}"]
        cells += [f"{figures.step_s:.2f}", f"{figures.bubble:.0%}"]
        for problem in (layout.problem, layout.alone):
            if problem is not None:
                plan, own = best(problem)
                cells += [f"{own.step_s:.2f}", f"{figures.step_s / own.step_s:.2f}"]
                notes.append(f"* {layout.name}, `auto` on {len(problem.cluster.devices)}: {shape(plan)}")
        lines.append(_row(cells))
        notes.append(f"* {layout.name}: {lacking(layout.problem, figures)}")
    return "\n".join([*lines, "", *notes]) + "\n"


def predicted(problem: Problem, plan: Plan) -> Figures:
    return evaluator(problem.profile, problem.cluster)(plan)


def best(problem: Problem) -> tuple[Plan, Figures]:
    """Return the plan of `auto`, with its figures."""
    evaluate = evaluator(problem.profile, problem.cluster)
    plan = STRATEGIES["auto"](problem, evaluate)
    return plan, evaluate(plan)


def shape(plan: Plan) -> str:
    """Say how many pipelines of which depth and microbatch a plan has, and what of it is sharded.

    >>> from partition.plan import Pipeline, Stage
    >>> shape(Plan("p", "m", 4, (Pipeline(2, 4, (Stage(("a",), (0, 3), 1),)),)))
    '1 pipeline of 1 stage (microbatch 2) on 1 device'
    """
    counts: dict[tuple[int, int], int] = {}
    for pipeline in plan.pipelines:
        key = len(pipeline.stages), pipeline.microbatch_size
        counts[key] = counts.get(key, 0) + 1
    parts = [
        f"{_many(count, 'pipeline')} of {_many(depth, 'stage')} (microbatch {size})"
        for (depth, size), count in counts.items()
    ]
    sharded = f", ZeRO {plan.zero}" if plan.zero else ""
    return f"{', '.join(parts)} on {_many(len(plan.device_names), 'device')}{sharded}"


def lacking(problem: Problem, figures: Figures) -> str:
    """Say how full the fullest device is, or what it lacks."""
    name, share = max(
        (
            (name, each.memory_bytes / problem.cluster.device(name).usable_bytes)
            for name, each in figures.devices.items()
        ),
        key=lambda entry: entry[1],
    )
    usable = problem.cluster.device(name).usable_bytes
    if share > 1:
        return f"{name} lacks {format_bytes((share - 1) * usable)} of {format_bytes(usable)}"
    return f"fits, {share:.0%} of the fullest device ({name})"


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
