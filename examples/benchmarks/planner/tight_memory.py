"""Planning where the memory of all devices is hardly more than the model asks for, or less.

    python examples/benchmarks/planner/tight_memory.py [--first 0] [--cases 30] [--forced 1 2 3 4]

2 to 24 devices of one to three kinds on nodes of one to four, with layers that others have measured. Each
has 0.6 to 1.5 times an equal share of 0.7 to 2.2 times what weights, gradients, AdamW's states and a sample's
activations take. Prints the step and the CPU seconds of `auto`, and of as many pipelines as are forced.
"""

import argparse
import time

import numpy as np
from measured_cases import MODELS, SIZES, measured_profile

from cost_model.cluster import Cluster, Device, Link, Node
from cost_model.errors import InfeasibleError
from hetpipe.simulation.prediction import evaluator
from partition.auto import auto
from partition.local_search.searched_plans import with_as_many
from partition.problem import Problem

COUNTS = (2, 3, 4, 6, 8, 12, 16, 24)
GBIT_PER_S = (1, 10, 25, 100)


def tight_case(seed: int) -> tuple[Problem, float]:
    """Return a random problem, and its memory over what the model takes; the same for the same seed."""
    rng = np.random.default_rng(90_000 + seed)
    model = str(rng.choice(list(MODELS)))
    known = list(MODELS[model]["kinds"])
    kinds = [str(kind) for kind in rng.choice(known, min(len(known), int(rng.integers(1, 4))), replace=False)]
    count = int(rng.choice(COUNTS))
    profile = measured_profile(model, kinds)
    states = (2 + profile.optimizer_bytes_per_parameter_byte) * sum(
        layer.parameter_bytes for layer in profile.layers
    )
    needed = states + sum(layer.saved_bytes_per_sample for layer in profile.layers)
    memory = float(rng.uniform(0.7, 2.2))
    gbit_per_s, nodes, left = float(rng.choice(GBIT_PER_S)), list[Node](), count
    while left:
        width, kind = min(int(rng.choice([1, 2, 4])), left), str(rng.choice(kinds))
        name, each = f"n{len(nodes)}", memory * needed / count * float(rng.choice([0.6, 1.0, 1.5]))
        devices = (Device(f"{name}/{slot}", name, kind, each) for slot in range(width))
        nodes.append(Node(name, tuple(devices), Link(20e-6, 10e9)))
        left -= width
    cluster = Cluster("tight", Link(1e-4, gbit_per_s * 1e9 / 8), tuple(nodes))
    used = sorted({device.kind for device in cluster.devices})
    batch = count * int(rng.choice([4, 8, 16]))
    return Problem(measured_profile(model, used), cluster, batch, SIZES), memory


def answer(problem: Problem) -> str:
    """Return the step of the plan, its pipelines and what they shard, and the CPU seconds of planning."""
    evaluate, begun = evaluator(problem.profile, problem.cluster), time.process_time()
    try:
        plan = auto(problem, evaluate)
        sharded = f", zero {plan.zero}" if plan.zero else ""
        found = f"{evaluate(plan).step_s:.4g} s, {len(plan.pipelines)}{sharded}"
    except InfeasibleError:
        found = "none fits"
    return f"{found} | {time.process_time() - begun:.1f} s"


def main() -> None:
    """Print a row for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--cases", type=int, default=30)
    parser.add_argument("--forced", type=int, nargs="*", default=[])
    given = parser.parse_args()
    forced = "".join(f" {number} forced | CPU |" for number in given.forced)
    print(f"| case | devices | model | memory | step, pipelines | CPU |{forced}")
    print("|---" * (6 + 2 * len(given.forced)) + "|")
    for seed in range(given.first, given.first + given.cases):
        problem, memory = tight_case(seed)
        count = len(problem.cluster.devices)
        asked = [with_as_many(problem, number) for number in given.forced if number <= count]
        answers = " | ".join(map(answer, [problem, *asked]))
        print(f"| {seed} | {count} | {problem.profile.model} | {memory:.2f} | {answers} |", flush=True)


if __name__ == "__main__":
    main()
