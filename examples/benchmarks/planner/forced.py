"""`auto` on 320 and 512 GPUs that others measured, beside what it answers where wishes are given.

    python examples/benchmarks/planner/forced.py [--model OPT-350M] [--pipelines 12 16] [--max-devices 256]

Layer times of A100 and V100 as in `measured_cases`, 11.7 Gbit/s between nodes of four. Printed: predicted
step with sums, pipelines and CPU seconds of each plan, and how far `auto` is behind the best of them.
"""

import argparse
import time
from dataclasses import replace

from measured_cases import SIZES, measured_cluster, measured_profile

from cost_model.errors import InfeasibleError
from hetpipe.simulation.prediction import evaluator
from partition.auto import auto
from partition.problem import Forced, Problem

GBIT_PER_S = 11.7
CASES = {
    "OPT-350M": ({"A100-40": 80, "V100-16": 240}, 1024),
    "GPT-Neo-2.7B": ({"A100-40": 128, "V100-16": 384}, 2048),
}
NUMBERS = (12, 16, 20, 24, 32, 48, 64, 80)


def problem_of(model: str) -> Problem:
    """Return the problem of a model of CASES."""
    counts, batch = CASES[model]
    profile = measured_profile(model, list(counts))
    return Problem(profile, measured_cluster(model, counts, GBIT_PER_S), batch, SIZES)


def planned(what: str, problem: Problem) -> float:
    """Print the plan of `auto` and return its step; inf where there is none."""
    evaluate, begun = evaluator(problem.profile, problem.cluster), time.process_time()
    try:
        plan = auto(problem, evaluate)
    except InfeasibleError:
        print(f"{what}: no plan", flush=True)
        return float("inf")
    step_s, cpu_s = evaluate(plan).step_s, time.process_time() - begun
    print(f"{what}: {step_s:.4g} s, {len(plan.pipelines)} pipelines, {cpu_s:.1f} CPU s", flush=True)
    return step_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=CASES)
    parser.add_argument("--pipelines", type=int, nargs="*", default=NUMBERS)
    parser.add_argument("--max-devices", type=int, nargs="*", default=())
    arguments = parser.parse_args()
    for model in [arguments.model] if arguments.model else CASES:
        problem = problem_of(model)
        print(f"{model}, {len(problem.cluster.devices)} devices, {problem.global_batch_size} samples")
        ours_s = planned("auto", problem)
        wishes = [Forced(num_pipelines=number) for number in arguments.pipelines]
        wishes += [Forced(max_devices=number) for number in arguments.max_devices]
        steps = []
        for wish in wishes:
            text = f"{wish.num_pipelines} pipelines" if wish.num_pipelines else f"{wish.max_devices} devices"
            steps.append(
                planned(
                    f"  at most {text}" if wish.max_devices else f"  {text}", replace(problem, forced=wish)
                )
            )
        if steps:
            print(f"behind the best of these: {ours_s / min(ours_s, *steps) - 1:.2%}")


if __name__ == "__main__":
    main()
