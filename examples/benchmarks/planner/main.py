"""How fast the planner is, and how far its plans can be from the best.

    python examples/benchmarks/planner/main.py speed [--devices 16 64 1024 10000]
    python examples/benchmarks/planner/main.py plans [--devices 16 64]
    python examples/benchmarks/planner/main.py grid
    python examples/benchmarks/planner/main.py growth
    python examples/benchmarks/planner/main.py quality [--first 0] [--cases 200] [--proof-seconds 60]
                                                       [--samples-per-device 2]
    python examples/benchmarks/planner/main.py table RESULTS.jsonl

Each size and each case runs in a process of its own, on one core.
"""

import argparse
import dataclasses
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from families import without_sync
from growth import draw
from shares import PARTS, Shares

from cases import random_case, regular_case
from hetpipe.program.costs import ProgramCosts
from hetpipe.program.instructions import Broadcast, Compute, Program, Step, Sync
from hetpipe.simulation.fast_simulator import step_times
from hetpipe.simulation.prediction import evaluator
from hetpipe.simulation.schedule_selection import lower
from hetpipe.simulation.simulator import simulate
from partition.bounds.best_bound import best_bound
from partition.local_search.moves import PipelineSet
from partition.local_search.pipeline_search import PipelineSearch
from partition.plan import Plan
from partition.problem import Problem
from partition.solver import solve

SHAPES = {16: (4, 26), 64: (4, 26), 1024: (8, 98), 10000: (8, 98)}
GRID = (
    (10000, 8, 98, 480_000),
    (10000, 8, 98, 160_000),
    (10000, 8, 98, 40_000),
    (10000, 8, 26, 480_000),
    (10000, 2, 98, 480_000),
    (10000, 2, 26, 160_000),
    (1000, 8, 98, 48_000),
    (1000, 8, 98, 8_000),
    (1000, 8, 26, 16_000),
    (1000, 2, 98, 16_000),
    (1000, 2, 26, 48_000),
)
"""Devices, kinds, layers, samples of a step; nodes have eight devices."""
GROWTH = (16, 64, 256, 1024, 4096, 10000)
GROWTH_SHAPE = (8, 98)
LARGE = 0.1
GROUPS = (
    ("ample", lambda row: not row["tight"]),
    ("tight, up to 16 devices", lambda row: row["tight"] and row["devices"] <= 16),
    ("tight, more devices", lambda row: row["tight"] and row["devices"] > 16),
)


def planned(
    num_devices: int, shape: tuple[int, int], samples: int | None = None, *, fast_links: bool = False
) -> dict[str, Any]:
    """CPU seconds of the whole solve without proof, by part.

    fast_links: sums and messages take next to nothing.
    """
    problem, shares = regular_case(num_devices, *shape, samples=samples), Shares()
    problem = without_sync(problem) if fast_links else problem
    evaluate = shares.evaluator(evaluator(problem.profile, problem.cluster))
    begin = time.process_time()
    with shares.measured():
        plan = solve(problem, evaluate, proof_s=0)
    plan_s = time.process_time() - begin
    assert plan.predicted is not None
    return {
        "devices": num_devices,
        "kinds": shape[0],
        "layers": shape[1],
        "nodes": len(problem.cluster.nodes),
        "samples": problem.global_batch_size,
        "plan_s": plan_s,
        "shares": shares.seconds,
        "step_s": plan.predicted.step_s,
        "megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def speed(num_devices: int) -> dict[str, Any]:
    """CPU seconds of the whole solve, by part, of the search alone, and of the proof."""
    shape = SHAPES[num_devices]
    row = planned(num_devices, shape)
    search = PipelineSearch(regular_case(num_devices, *shape))
    begin = time.process_time()
    search.search(lambda _, seconds: seconds)
    row["search_s"] = time.process_time() - begin
    begin = time.process_time()
    bound = best_bound(search) if num_devices <= 1024 else best_bound(search, proof_s=0)
    row["proof_s"] = time.process_time() - begin
    assert search.best is not None
    return {**row, "gap": search.best / max(bound.pipeline_s or 0.0, bound.fractional_s) - 1}


def quality(
    seed: int, proof_s: float | None = None, samples_per_device: float | None = None
) -> dict[str, Any]:
    """The gap of the plan that is searched without gradient sync; the simulator chooses it among the best."""
    problem, tight = random_case(seed)
    if samples_per_device is not None:
        batch = max(1, round(samples_per_device * len(problem.cluster.devices)))
        problem = dataclasses.replace(problem, global_batch_size=batch)
    search = PipelineSearch(problem)
    begin = time.perf_counter()
    found = search.search(lambda _, seconds: seconds)
    row: dict[str, Any] = {
        "seed": seed,
        "devices": len(problem.cluster.devices),
        "kinds": len(search.classes.members),
        "layers": problem.profile.num_layers,
        "batch": problem.global_batch_size,
        "tight": tight,
    }
    if not found:
        return {**row, "gap": None}
    step_s = min(without_sync_s(plan, problem) for plan in chosen(search, found))
    row["search_s"] = time.perf_counter() - begin
    begin = time.perf_counter()
    bound = best_bound(search, proof_s=proof_s)
    row["proof_s"] = time.perf_counter() - begin
    bound_s = max(bound.pipeline_s or 0.0, bound.fractional_s)
    row |= {"step_s": step_s, "bound_s": bound_s, "fractional_s": bound.fractional_s}
    assert search.best is not None
    row |= {"held_by": bound.held_by, "queues": step_s / search.best - 1}
    if search.columns is not None:
        row["above_columns"] = step_s / search.columns.step_s - 1
    return {**row, "gap": step_s / bound_s - 1}


def chosen(search: PipelineSearch, found: Sequence[PipelineSet]) -> list[Plan]:
    """Those of a search that the simulator decides between, as `auto` does."""
    improved = search.improve_with_simulator(found, lambda plan: clock_s(plan, search.problem))
    least = search.effort.choice.always_simulated
    plans = (search.plan("search", entry.timed) for entry in [*found[:least], *improved])
    return [plan for plan in plans if plan is not None]


def clock_s(plan: Plan, problem: Problem) -> float:
    """About `without_sync_s`, sooner."""
    program = Program(plan, (), (), first_trained=problem.profile.first_trained)
    return step_times(ProgramCosts(program, problem.profile, problem.cluster)).step_s


def without_sync_s(plan: Plan, problem: Problem) -> float:
    """Seconds of a simulated step that sums no gradients: to its last computation, and the longest optimizer.

    The sums would also keep the messages of pipelines waiting that are not done yet.
    """
    program = lower(plan, problem.profile, problem.cluster)
    ranks = tuple(
        tuple(instruction for instruction in rank if not isinstance(instruction, Sync | Broadcast))
        for rank in program.ranks
    )
    bare = dataclasses.replace(program, buckets=(), ranks=ranks)
    trace = simulate(ProgramCosts(bare, problem.profile, problem.cluster))
    last = max(event.end_s for event in trace.events if isinstance(event.instruction, Compute))
    return last + max(
        event.end_s - event.start_s for event in trace.events if isinstance(event.instruction, Step)
    )


def alone(command: list[str]) -> dict[str, Any]:
    """The result of one measurement in a process of its own."""
    done = subprocess.run([sys.executable, __file__, *command], capture_output=True, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def groups(rows: list[dict[str, Any]]) -> Iterator[str]:
    """A table of the gaps by group."""
    yield "| clusters | cases | median gap | 90th percentile | worst |"
    yield "|---|---|---|---|---|"
    for name, belongs in GROUPS:
        gaps = sorted(row["gap"] for row in rows if row["gap"] is not None and belongs(row))
        if gaps:
            high = ninetieth(gaps)
            yield (f"| {name} | {len(gaps)} | {statistics.median(gaps):.2%} | {high:.2%} | {gaps[-1]:.2%} |")
    yield from held(rows)
    failed = sum(row["gap"] is None for row in rows)
    if failed:
        yield f"\n{failed} cases without a plan."


def ninetieth(values: Sequence[float]) -> float:
    """The 90th percentile, one of the values."""
    return sorted(values)[min(len(values) - 1, int(0.9 * len(values)))]


def in_parts(row: dict[str, Any]) -> str:
    return "".join(f"| {row['shares'][part]:.2f} s " for part in PARTS)


def growth_table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Seconds by number of devices."""
    yield f"| devices | plan | {' | '.join(PARTS)} | memory |"
    yield "|---" * (3 + len(PARTS)) + "|"
    for row in rows:
        yield (f"| {row['devices']:,} | {row['plan_s']:.2f} s {in_parts(row)}| {row['megabytes']:.0f} MiB |")


def grid_table(rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Seconds by kinds, layers, nodes and batch; with the step, for a comparison of versions."""
    yield f"| devices | nodes | kinds | layers | samples | plan | {' | '.join(PARTS)} | memory | step |"
    yield "|---" * (8 + len(PARTS)) + "|"
    for row in rows:
        yield (
            f"| {row['devices']:,} | {row['nodes']:,} | {row['kinds']} | {row['layers']} "
            f"| {row['samples']:,} | {row['plan_s']:.1f} s {in_parts(row)}| {row['megabytes']:.0f} MiB "
            f"| {row['step_s']:.2f} s |"
        )


def held(rows: list[dict[str, Any]]) -> Iterator[str]:
    """What holds the large gaps: the bound, the rounding to whole pipelines, or queues at network cards."""
    large = [row for row in rows if row["gap"] is not None and row["gap"] > LARGE and "held_by" in row]
    if not large:
        return
    yield f"\nGaps above {LARGE:.0%}:\n"
    yield "| case | devices | gap | bound held by | plan above the relaxed columns | plan above its clock |"
    yield "|---|---|---|---|---|---|"
    for row in sorted(large, key=lambda row: -float(row["gap"])):
        above = f"{row['above_columns']:.1%}" if "above_columns" in row else "no columns"
        yield (
            f"| {row['seed']} | {row['devices']} | {row['gap']:.1%} | {row['held_by']} | {above} "
            f"| {row['queues']:.1%} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "what",
        choices=(
            "speed",
            "plans",
            "grid",
            "growth",
            "quality",
            "table",
            "one-speed",
            "one-plan",
            "one-grid",
            "one-growth",
            "one-quality",
        ),
    )
    parser.add_argument("rest", nargs="*")
    parser.add_argument("--rows", type=int, nargs="+", default=list(range(len(GRID))), help="of the grid")
    parser.add_argument("--devices", type=int, nargs="+", default=list(SHAPES))
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--proof-seconds", type=float, help="of quality, instead of the default")
    parser.add_argument("--samples-per-device", type=float, help="of quality, instead of 8 to 45")
    options = parser.parse_args()
    if options.what == "one-speed":
        print(json.dumps(speed(int(options.rest[0]))))
    elif options.what == "one-plan":
        num_devices, fast_links = map(int, options.rest)
        print(json.dumps(planned(num_devices, SHAPES[num_devices], fast_links=bool(fast_links))))
    elif options.what == "plans":
        for count in options.devices:
            plans = [alone(["one-plan", str(count), str(int(fast_links))]) for fast_links in (False, True)]
            steps = ", ".join(f"{row['plan_s']:.2f} s for a step of {row['step_s']:.4g} s" for row in plans)
            print(f"{count:,} devices: {steps} with fast links", flush=True)
    elif options.what == "one-grid":
        num_devices, kinds, layers, samples = map(int, options.rest)
        print(json.dumps(planned(num_devices, (kinds, layers), samples)))
    elif options.what == "grid":
        found = (alone(["one-grid", *map(str, GRID[place])]) for place in options.rows)
        for line in grid_table(found):
            print(line, flush=True)
    elif options.what == "one-growth":
        print(json.dumps(planned(int(options.rest[0]), GROWTH_SHAPE)))
    elif options.what == "growth":
        rows = []
        for count in GROWTH:
            rows.append(alone(["one-growth", str(count)]))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
        print("\n".join(growth_table(rows)))
        draw(rows, Path(__file__).parent / "growth.png")
    elif options.what == "one-quality":
        print(json.dumps(quality(int(options.rest[0]), options.proof_seconds, options.samples_per_device)))
    elif options.what == "table":
        print(
            "\n".join(groups([json.loads(line) for line in Path(options.rest[0]).read_text().splitlines()]))
        )
    elif options.what == "speed":
        print(
            f"| devices | kinds | layers | plan | {' | '.join(PARTS)} | search alone | proof | gap | memory |"
        )
        print("|---" * (8 + len(PARTS)) + "|")
        for count in options.devices:
            row = alone(["one-speed", str(count)])
            print(
                f"| {count:,} | {row['kinds']} | {row['layers']} | {row['plan_s']:.2f} s {in_parts(row)}"
                f"| {row['search_s']:.2f} s | {row['proof_s']:.1f} s | {row['gap']:.1%} "
                f"| {row['megabytes']:.0f} MiB |",
                flush=True,
            )
    else:
        rows = []
        wanted = {
            "--proof-seconds": options.proof_seconds,
            "--samples-per-device": options.samples_per_device,
        }
        given = [word for name, value in wanted.items() if value is not None for word in (name, str(value))]
        for seed in range(options.first, options.first + options.cases):
            rows.append(alone(["one-quality", str(seed), *given]))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
        print("\n".join(groups(rows)))


if __name__ == "__main__":
    main()
