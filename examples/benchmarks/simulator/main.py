"""How long does it take to simulate a step? See README.md."""

import argparse
import os
import platform
import statistics
import time
from collections.abc import Iterable

from cost_model.cluster import Cluster, Device, Link, Node
from cost_model.layer_profile import LayerProfile, LayerTimes
from cost_model.profile import KindProfile, ModelProfile
from hetpipe.profiling.profile_cache import processor_name
from hetpipe.program.costs import ProgramCosts
from hetpipe.reporting.critical_path import critical_path
from hetpipe.reporting.idle_time import device_times
from hetpipe.simulation.prediction import evaluator
from hetpipe.simulation.schedule_selection import lower
from hetpipe.simulation.simulator import simulate
from partition.plan import Pipeline, Plan, Stage

DEVICES_PER_NODE = 4
HEADER = (
    "| devices | pipelines | microbatches of each | instructions | lower s | simulate s, median [min, max] "
    "| us an instruction | critical path and waiting s |\n|---|---|---|---|---|---|---|---|"
)

PREDICT_HEADER = (
    "| devices | pipelines | instructions | CPU s, median [min, max] | elapsed s, median |\n"
    "|---|---|---|---|---|"
)


def main() -> None:
    options = _options()
    print("growth with the microbatches: 8 devices in one pipeline\n", HEADER, sep="\n")
    for total in options.instructions:
        print(_row(8, 1, total, options.rounds), flush=True)
    most = max(options.instructions)
    print("\ngrowth with the devices, one pipeline\n", HEADER, sep="\n")
    for count in (4, 32, 250, 1000):
        print(_row(count, 1, most, options.rounds), flush=True)
    print("\n1,000 devices in several pipelines, which sync gradients\n", HEADER, sep="\n")
    for pipelines in (10, 1000):
        print(_row(1000, pipelines, most, options.rounds), flush=True)
    print("\na whole prediction: four devices a pipeline, 16 microbatches each\n", PREDICT_HEADER, sep="\n")
    for count in (1024, 10_000):
        print(_predict_row(count, count // 4, 16, options.rounds), flush=True)
    load = os.getloadavg()[0]
    print(f"\n{_machine()}; Python {platform.python_version()}; load at the end {load:.2f}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--instructions", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    return parser.parse_args()


def case(count: int, pipelines: int, microbatches: int) -> tuple[Plan, ModelProfile, Cluster]:
    """1F1B over `count` devices of five speeds, four to a node, in equal pipelines of one layer a stage."""
    depth = count // pipelines
    profile = ModelProfile(
        model="made-up",
        sequence_length=1,
        dtype="float32",
        layers=tuple(LayerProfile(f"layer{index}", 8.0, 4.0, 1.0) for index in range(depth)),
        kinds={"one": KindProfile("measured", (1,), (LayerTimes((1.0,), (2.0,)),) * depth, 1e-3)},
    )
    devices = [
        Device(
            f"n{index // DEVICES_PER_NODE}/{index}", f"n{index // DEVICES_PER_NODE}", "one", 1e9, speed=speed
        )
        for index in range(count)
        for speed in [1 + 0.1 * (index * 3 % 5)]
    ]
    nodes = tuple(_nodes(devices))
    entries = tuple(
        Pipeline(
            1,
            microbatches,
            tuple(
                Stage((device.name,), (stage, stage + 1), depth - stage)
                for stage, device in enumerate(devices[first : first + depth])
            ),
        )
        for first in range(0, depth * pipelines, depth)
    )
    plan = Plan("manual", "made-up", microbatches * pipelines, entries)
    return plan, profile, Cluster("made-up", Link(0.01, 40.0), nodes)


def _nodes(devices: list[Device]) -> Iterable[Node]:
    for first in range(0, len(devices), DEVICES_PER_NODE):
        members = tuple(devices[first : first + DEVICES_PER_NODE])
        yield Node(members[0].node, members)


def _microbatches(count: int, pipelines: int, instructions: int) -> int:
    """Of each pipeline, for a program of at least so many instructions.

    A stage has a forward and a backward of each, and two sends and two receives, one of each at an end.
    """
    each = 6 * (count // pipelines) - 4
    return -(-instructions // (pipelines * each))


def _row(count: int, pipelines: int, instructions: int, rounds: int) -> str:
    microbatches = _microbatches(count, pipelines, instructions)
    plan, profile, cluster = case(count, pipelines, microbatches)
    lower_s, simulate_s, explain_s = [], [], []
    for _ in range(rounds):
        begin = time.perf_counter()
        program = lower(plan, profile)
        lowered = time.perf_counter()
        costs = ProgramCosts(program, profile, cluster)
        trace = simulate(costs)
        simulated = time.perf_counter()
        critical_path(trace, costs)
        device_times(trace, costs)
        explain_s.append(time.perf_counter() - simulated)
        lower_s.append(lowered - begin)
        simulate_s.append(simulated - lowered)
    number = sum(map(len, program.ranks))
    median = statistics.median(simulate_s)
    return (
        f"| {count:,} | {pipelines} | {microbatches:,} | {number:,} | {statistics.median(lower_s):.2f} "
        f"| {median:.2f} [{min(simulate_s):.2f}, {max(simulate_s):.2f}] | {median / number * 1e6:.1f} "
        f"| {statistics.median(explain_s):.2f} |"
    )


def _predict_row(count: int, pipelines: int, microbatches: int, rounds: int) -> str:
    plan, profile, cluster = case(count, pipelines, microbatches)
    cpu_s, elapsed_s = [], []
    for _ in range(rounds):
        begin, cpu_begin = time.perf_counter(), time.process_time()
        evaluator(profile, cluster)(plan)
        cpu_s.append(time.process_time() - cpu_begin)
        elapsed_s.append(time.perf_counter() - begin)
    number = sum(map(len, lower(plan, profile, cluster).ranks))
    return (
        f"| {count:,} | {pipelines:,} | {number:,} | {statistics.median(cpu_s):.2f} "
        f"[{min(cpu_s):.2f}, {max(cpu_s):.2f}] | {statistics.median(elapsed_s):.2f} |"
    )


def _machine() -> str:
    return f"{os.cpu_count()} cores ({processor_name()})"


if __name__ == "__main__":
    main()
