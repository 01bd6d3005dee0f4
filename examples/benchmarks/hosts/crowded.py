"""How long is a step where messages of several pipelines meet on real links? See README.md. As root."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cost_model.cluster_file import read_cluster
from cost_model.profile import read_profile
from hetpipe.simulation.prediction import predict
from hetpipe.simulation.shared_network import shared_step_s
from main import machine, run_on_hosts, three_hosts
from partition.plan import Pipeline, Plan, Stage
from partition.plan_file import plan_text

BURST = "64kb"  # of a link
MODEL, SEQUENCE_LENGTH, SAMPLES = "bert-tiny", 256, 8  # of a microbatch: messages of 524 kB
CUTS = ((0, 3), (3, 6), (6, 8))
NODES, SPEED = (("a", 3), ("b", 3), ("c", 3)), 0.05
SHAPES = {
    "all the same way": ("abc", "abc", "abc"),
    "taking turns": ("abc", "bca", "cab"),
    "there and back": ("abc", "cba", "abc"),
}
"""The nodes of the three stages, of each pipeline."""


def main() -> None:
    options = _options()
    os.environ["OMP_NUM_THREADS"] = "1"  # of each rank
    print("| links | pipelines | by turns s | error | shared s | error | measured s |\n" + "|---" * 7 + "|")
    for rate in options.rates:
        with three_hosts((rate,) * 3, burst=BURST) as (hosts, folder):
            for shape, chains in SHAPES.items():
                plan = plan_of(chains, options.microbatches)
                report, run = run_plan(hosts, folder, plan, options.steps)
                measured_s = report["measured_step_s"]
                profile, cluster = read_profile(run / "profile.json"), read_cluster(run / "cluster.toml")
                prediction = predict(plan, profile, cluster)
                shared_s = shared_step_s(prediction.costs)
                cells = [
                    f"{seconds:.2f} | {100 * (measured_s / seconds - 1):+.1f} %"
                    for seconds in (prediction.step_s, shared_s)
                ]
                print(f"| {rate} | {shape} | {' | '.join(cells)} | {measured_s:.2f} |", flush=True)
    print(f"\n{machine()}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rates", nargs="+", default=["20mbit", "30mbit", "50mbit"])
    parser.add_argument("--microbatches", type=int, default=12)
    parser.add_argument("--steps", type=int, default=4)
    return parser.parse_args()


def plan_of(chains: tuple[str, ...], microbatches: int) -> Plan:
    """Return a pipeline for each chain of nodes, over one device of each."""
    pipelines = tuple(
        Pipeline(
            SAMPLES,
            SAMPLES * microbatches,
            tuple(
                Stage((f"{node}/{number}",), cut, len(CUTS) - stage)
                for stage, (node, cut) in enumerate(zip(nodes, CUTS, strict=True))
            ),
        )
        for number, nodes in enumerate(chains)
    )
    return Plan("by hand", MODEL, SAMPLES * microbatches * len(chains), pipelines)


def run_plan(
    hosts: Any, folder: Path, plan: Plan, steps: int, nodes: Sequence[tuple[str, int]] = NODES
) -> tuple[dict[str, Any], Path]:
    """Return the leader's report of a run of the plan over the hosts, and its run folder."""
    line = (
        f"run --model {MODEL} --cluster cluster.toml --plan plan.json --token-file token --trust-network "
        f"--no-save --rendezvous tcp://{hosts[0].address}:29500 --sequence-length {SEQUENCE_LENGTH} "
        f"--profile-budget 20 --steps {steps} --json"
    )
    files = {"plan.json": plan_text(plan)}
    report, _ = run_on_hosts(hosts, folder, nodes, line, speed=SPEED, files=files)
    return report, folder / nodes[0][0] / report["run_folder"]


if __name__ == "__main__":
    main()
