"""Whose the gap is, the plan's or the bound's, where every plan can be tried: clusters of four devices.

    python examples/benchmarks/planner/small_gaps.py [--first 0] [--cases 24] [--proof-seconds 10]

Two nodes of two devices each, of one kind or two, and a model of four blocks between an embedding and a head;
1 to 100 Gbit/s between nodes, 4 to 16 samples a device. All sets of pipelines that share no device, with all
orders, cuts and microbatch sizes, are simulated whose clocks alone are shorter than the best step so far.
"""

import argparse
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise, product

import numpy as np
from best_known import partitions
from sync_cases import GBIT_PER_S, INTERCONNECTS, KINDS, OTHER_INTERCONNECT, SIZES, gpt_profile

from cost_model.cluster import Cluster, Device, Link, Node
from hetpipe.simulation.prediction import evaluator
from partition.auto import auto
from partition.bounds.best_bound import best_bound
from partition.estimates.batch_split import share_out
from partition.estimates.timed_pipeline import TimedPipeline, TimedStage
from partition.local_search.pipeline_search import PipelineSearch
from partition.problem import Problem

BLOCKS, WIDTH = 4, 2
HIDDEN = ((1024, 512), (1600, 1024), (2560, 2048))
"""Hidden size, sequence length."""


def small_case(seed: int) -> Problem:
    """Return a random problem of four devices; the same for the same seed."""
    rng = np.random.default_rng(3000 + seed)
    kinds = [str(kind) for kind in rng.choice(list(KINDS), int(rng.integers(1, 3)), replace=False)]
    hidden, length = HIDDEN[int(rng.integers(0, len(HIDDEN)))]
    profile = gpt_profile(f"small-{seed}", kinds, rng, (hidden, BLOCKS, length))
    gbit_per_s, nodes = float(rng.choice(GBIT_PER_S)), []
    for place in range(2):
        kind = kinds[place % len(kinds)]
        memory_bytes = KINDS[kind][1] * float(rng.choice([0.3, 0.5, 1]))
        devices = (Device(f"n{place}/{slot}", f"n{place}", kind, memory_bytes) for slot in range(WIDTH))
        inside = Link(20e-6, INTERCONNECTS.get(kind, OTHER_INTERCONNECT))
        nodes.append(Node(f"n{place}", tuple(devices), inside))
    network = Link(100e-6 if gbit_per_s > 5 else 1e-3, gbit_per_s * 1e9 / 8)
    samples = int(rng.choice([4, 8, 16]))
    return Problem(profile, Cluster(f"small-{seed}", network, tuple(nodes)), 2 * WIDTH * samples, SIZES)


def best_steps_s(search: PipelineSearch, step_s: float) -> tuple[float, float]:
    """Return the least simulated step of all sets of pipelines that share no device, and the least clock.

    step_s: of a plan that is known. Samples are shared out by clocks, in which no sums and queues are;
    in_flight is what suits a pipeline best.
    """
    problem, evaluate = search.problem, evaluator(search.problem.profile, search.problem.cluster)
    batch, sets = problem.global_batch_size, sorted(_sets(search, step_s), key=lambda pair: pair[0])
    for seconds, timed in sets:
        if seconds >= step_s:
            break
        _, samples = share_out(timed, batch)
        pairs = zip(timed, samples, strict=True)
        pipelines = tuple(one.pipeline(count) for one, count in pairs if count)
        step_s = min(step_s, evaluate(problem.plan("every plan", pipelines)).step_s)
    return step_s, sets[0][0] if sets else step_s


def _sets(search: PipelineSearch, within_s: float) -> Iterator[tuple[float, Sequence[TimedPipeline]]]:
    """Give (clock, pipelines) of all sets that may be faster than a step; those alike once."""
    devices, batch, seen = search.problem.cluster.devices, search.problem.global_batch_size, set[object]()
    options: dict[tuple[Device, ...], list[TimedPipeline]] = {}
    for count in range(1, len(devices) + 1):
        for used in combinations(devices, count):
            for chains in partitions(used):
                names: dict[str, int] = {}
                alike = [
                    tuple((d.kind, names.setdefault(d.node, len(names))) for d in chain) for chain in chains
                ]
                key = tuple(alike)
                if key in seen:
                    continue
                seen.add(key)
                for chain in chains:
                    if chain not in options:
                        options[chain] = list(_cut(search, chain))
                for timed in product(*(options[chain] for chain in chains)):
                    seconds, _ = share_out(timed, batch, 1e-3, within_s=within_s)
                    if math.isfinite(seconds):
                        yield seconds / (1 + 1e-3), timed


def _cut(search: PipelineSearch, devices: Sequence[Device]) -> Iterator[TimedPipeline]:
    """Give the pipelines over devices in order: all cuts and sizes, recompute where memory asks for it."""
    layers = search.problem.profile.num_layers
    for size in search.problem.microbatch_sizes:
        for cuts in combinations(range(1, layers), len(devices) - 1):
            spans = list(pairwise((0, *cuts, layers)))
            flags = [
                (False,) if search.costs.cap(device, *span, size) > len(devices) else (False, True)
                for device, span in zip(devices, spans, strict=True)
            ]
            for again in product(*flags):
                stages = zip(devices, *zip(*spans, strict=True), again, strict=True)
                made = search.timings.pipeline([TimedStage(*each) for each in stages], size)
                if made.timing.fits:
                    yield made


def row(seed: int, proof_s: float) -> tuple[float, float, float] | None:
    """Print a case's row of the table; return what plan, bound and bound without sums are off by.

    None where the plan shards states, of which the bounds that count sums say nothing.
    """
    problem = small_case(seed)
    search, begin_s = PipelineSearch(problem), time.process_time()
    evaluate = evaluator(problem.profile, problem.cluster)
    plan = auto(problem, evaluate, search=search)
    step_s = evaluate(plan).step_s
    if plan.zero:
        return None
    bound = best_bound(search, proof_s=proof_s, step_s=step_s)
    without_s = max(bound.fractional_s, bound.pipeline_s or 0.0)
    bound_s = max(without_s, bound.sync_s or 0.0)
    best_s, clock_s = best_steps_s(search, step_s)
    gaps = step_s / best_s - 1, best_s / bound_s - 1, clock_s / without_s - 1
    gbit_per_s = problem.cluster.network.bandwidth_bytes_per_s * 8e-9
    print(
        f"| {seed} | {gbit_per_s:g} Gbit/s | {problem.global_batch_size // 4} | {len(plan.pipelines)} "
        f"| {step_s:.4g} s | {best_s:.4g} s | {bound_s:.4g} s | {clock_s:.4g} s | {without_s:.4g} s "
        f"| {gaps[0]:.1%} | {gaps[1]:.1%} | {gaps[2]:.1%} | {time.process_time() - begin_s:.0f} s |",
        flush=True,
    )
    return gaps


def main() -> None:
    """Print a row for each case by its seed, and what plans and bounds are off by."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--cases", type=int, default=24)
    parser.add_argument("--proof-seconds", type=float, default=10.0, help="CPU seconds of a case's bounds")
    given = parser.parse_args()
    seeds = range(given.first, given.first + given.cases)
    rows = [gaps for seed in seeds if (gaps := row(seed, given.proof_seconds)) is not None]
    names = ("plan over the best", "best over the bound", "least clock over the bound without sums")
    for name, parts in zip(names, zip(*rows, strict=True), strict=True):
        print(f"{name}: median {statistics.median(parts):.1%}, most {max(parts):.1%}")


if __name__ == "__main__":
    main()
