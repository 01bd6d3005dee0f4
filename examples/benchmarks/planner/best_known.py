"""How far plans are from the best ones known: of an exhaustive search up to 4 devices, else of a long one.

    python examples/benchmarks/planner/best_known.py [--first 0] [--cases 20] [--seconds 600] [--few]

Both sides without gradient sync, by the simulator. `seconds` are CPU seconds of the long search of a case.
"""

import argparse
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import combinations, permutations, product
from typing import Any

from cases import random_case
from cost_model.cluster import Device
from main import chosen, clock_s, groups, ninetieth, without_sync_s
from partition.estimates.batch_split import share_out
from partition.estimates.effort import Sweeps
from partition.estimates.timed_pipeline import TimedPipeline
from partition.local_search.moves import EvaluateSet, LocalSearch, PipelineSet
from partition.local_search.pipeline_search import PipelineSearch
from partition.local_search.threshold_accepting import perturb, threshold_accepting

FEW = 4
WALK = Sweeps(tries=400, sweeps=2, most_late=math.inf)
AMOUNTS = (1.0, 0.6, 0.35, 0.2, 0.1)
"""Shares of the batch for which the pipelines of the exhaustive search are cut."""


def compare(seed: int, seconds: float) -> dict[str, Any]:
    """Step of our plan over that of the best plan known, less one, both without gradient sync."""
    problem, tight = random_case(seed)
    search = PipelineSearch(problem)
    begin = time.process_time()
    found = search.search(_clock)
    row: dict[str, Any] = {
        "seed": seed,
        "devices": len(problem.cluster.devices),
        "layers": problem.profile.num_layers,
        "tight": tight,
        "search_s": time.process_time() - begin,
    }
    if not found:
        return {**row, "gap": None}
    exhaustive = row["devices"] <= FEW
    others = _every_set(search) if exhaustive else _long_search(search, found, seconds)
    ours_s = min(without_sync_s(plan, problem) for plan in chosen(search, found))
    best_s = min(ours_s, *(_simulated_s(search, timed) for timed in others))
    return {**row, "exhaustive": exhaustive, "step_s": ours_s, "best_s": best_s, "gap": ours_s / best_s - 1}


def _clock(_: Sequence[TimedPipeline], seconds: float) -> float:
    return seconds


def _simulated_s(search: PipelineSearch, timed: Sequence[TimedPipeline]) -> float:
    plan = search.plan("best known", timed)
    assert plan is not None
    return without_sync_s(plan, search.problem)


def _every_set(search: PipelineSearch, kept: int = 20) -> list[list[TimedPipeline]]:
    """The best of all sets of pipelines over some of the devices, in any order, of any microbatch sizes."""
    problem = search.problem
    batch = problem.global_batch_size
    options: dict[tuple[Device, ...], list[TimedPipeline]] = {}

    def workers_on(order: tuple[Device, ...]) -> list[TimedPipeline]:
        if order not in options:
            cuts: dict[object, TimedPipeline] = {}
            for size, share in product(problem.microbatch_sizes, AMOUNTS if len(order) > 1 else (1.0,)):
                pipeline = search.cut_optimizer.recut(order, size, max(size, round(share * batch)))
                if pipeline is not None and pipeline.timing.fits:
                    cuts.setdefault((size, pipeline.stages), pipeline)
            options[order] = list(cuts.values())
        return options[order]

    judged: list[tuple[float, list[TimedPipeline]]] = []
    devices = problem.cluster.devices
    for count in range(1, len(devices) + 1):
        for used in combinations(devices, count):
            for orders in partitions(used):
                for timed in product(*map(workers_on, orders)):
                    judged.append((share_out(timed, batch)[0], list(timed)))
        judged = sorted(judged, key=lambda entry: entry[0])[:kept]
    return [timed for seconds, timed in judged if seconds < float("inf")]


def partitions(devices: tuple[Device, ...]) -> Iterator[tuple[tuple[Device, ...], ...]]:
    """All sets of ordered groups that use every device once."""
    if not devices:
        yield ()
        return
    first, rest = devices[0], devices[1:]
    for count in range(len(rest) + 1):
        for others in combinations(rest, count):
            left = tuple(device for device in rest if device not in others)
            for order in permutations((first, *others)):
                for more in partitions(left):
                    yield (order, *more)


def _long_search(
    search: PipelineSearch, found: Sequence[PipelineSet], seconds: float
) -> list[list[TimedPipeline]]:
    """Walks from many starts, then from the best, every third one after random changes, until the time is up.

    Out of all that was seen new sets are made between them, as in the search. For two thirds of the time by
    the clocks of pipelines, then with the simulator.
    """

    def simulated(timed: Sequence[TimedPipeline], _: float) -> float:
        return _clock_of(search, timed)

    begin = time.process_time()
    starts = [PipelineSet(entry.step_s, entry.timed, "start") for entry in [*found, *search.starts()]]
    best = walks(search, starts, _clock, begin + 2 / 3 * seconds)
    ends = [*best[-5:], found[0]]
    judged = [PipelineSet(simulated(entry.timed, 0.0), entry.timed, "end") for entry in ends]
    judged.sort(key=lambda entry: entry.step_s)
    better = walks(search, judged[:1], simulated, begin + seconds)
    return [list(entry.timed) for entry in [*ends, *better[-1:]]]


def walks(
    search: PipelineSearch, starts: Sequence[PipelineSet], evaluate: EvaluateSet, end_s: float
) -> list[PipelineSet]:
    """The better and better sets that were found, the best last; end_s: of CPU time."""
    rng, found, turn = random.Random(0), [min(starts, key=lambda entry: entry.step_s)], 0
    batch = search.problem.global_batch_size
    while time.process_time() < end_s:
        turn += 1
        start = starts[turn] if turn < len(starts) else found[-1]
        if turn >= len(starts) and turn % 3 == 1:
            changes = LocalSearch(search.cut_optimizer, evaluate, WALK.tries)
            timed = perturb(changes, rng, list(start.timed), start.step_s, WALK.perturbations)
            start = PipelineSet(evaluate(timed, share_out(timed, batch)[0]), tuple(timed), "perturbed")
        walk = threshold_accepting(
            search.cut_optimizer, start, evaluate, WALK, lambda: time.process_time() < end_s, seed=turn
        )
        found += [entry for entry in walk[-1:] if entry.step_s < found[-1].step_s]
        if turn % 3 == 2:
            mixed = search.recombined(found[-1], evaluate)
            found += [entry for entry in mixed if entry.step_s < found[-1].step_s]
    return found


def _clock_of(search: PipelineSearch, timed: Sequence[TimedPipeline]) -> float:
    plan = search.plan("best known", timed)
    return clock_s(plan, search.problem) if plan is not None else float("inf")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--cases", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--few", action="store_true", help="only cases of up to 4 devices, searched in full")
    options = parser.parse_args()
    rows, seed = [], options.first
    while len(rows) < options.cases:
        few = len(random_case(seed)[0].cluster.devices) <= FEW
        if few == options.few:
            rows.append(compare(seed, options.seconds))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
        seed += 1
    print("\n".join(groups(rows)))
    gaps = [row["gap"] for row in rows if row["gap"] is not None]
    print(f"\nAll {len(gaps)}: median {statistics.median(gaps):.2%}, ", end="")
    print(f"90th percentile {ninetieth(gaps):.2%}, worst {max(gaps):.2%}")


if __name__ == "__main__":
    main()
