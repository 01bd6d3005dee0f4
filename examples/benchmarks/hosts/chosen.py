"""Are plans whose messages meet less faster on real links, as the second clock says? See README.md."""

import argparse
import os
import statistics
from dataclasses import replace

from crowded import BURST, plan_of, run_plan

from cost_model.cluster import Cluster, Node
from cost_model.cluster_file import read_cluster
from cost_model.profile import read_profile
from hetpipe.simulation.prediction import evaluator, predict
from hetpipe.simulation.shared_choice import EVERYWHERE, TIES, least_shared
from hetpipe.simulation.shared_network import shared_step_s
from main import machine, three_hosts
from partition.plan import Plan
from partition.problem import Forced, Problem, problem_of
from partition.solver import solve

CHOICES = {"by turns": None, "auto": (TIES,), "--shared-network": EVERYWHERE}


def main() -> None:
    options = _options()
    os.environ["OMP_NUM_THREADS"] = "1"  # of each rank
    heads = "devices", "memory", "links", "batch", "choice", "by turns s", "shared s", "measured s", "spread"
    print(f"| {' | '.join(heads)} |\n" + "|---" * len(heads) + "|")
    for counts in options.counts:
        nodes = tuple(zip("abc", map(int, counts), strict=True))
        with three_hosts((options.rate,) * 3, burst=BURST) as (hosts, folder):
            _, first = run_plan(hosts, folder, plan_of(("abc",), 1), 1, nodes)  # measures devices and links
            profile, cluster = read_profile(first / "profile.json"), read_cluster(first / "cluster.toml")
            tight = _tight(cluster, 1e6 * options.memory)
            problem = problem_of(profile, tight, options.batch, options.microbatch)
            plans = _plans(replace(problem, forced=Forced(num_pipelines=options.pipelines)))
            seconds: dict[Plan, list[float]] = {plan: [] for plan in plans.values()}
            for _ in range(options.rounds):
                for plan, found in seconds.items():
                    report, _ = run_plan(hosts, folder, plan, options.steps, nodes)
                    found.append(report["measured_step_s"])
        for name, plan in plans.items():
            prediction, found = predict(plan, profile, cluster), seconds[plan]
            shared_s = shared_step_s(prediction.costs)
            cells = (
                ", ".join(counts), f"{options.memory:g} MB", options.rate, str(options.batch), name,
                f"{prediction.step_s:.2f}", f"{shared_s:.2f}", f"{statistics.median(found):.2f}",
                f"{min(found):.2f} to {max(found):.2f}",
            )  # fmt: skip
            print(f"| {' | '.join(cells)} |", flush=True)
    print(f"\n{machine()}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--counts", nargs="+", default=["333", "234"], help="devices of each host")
    parser.add_argument("--rate", default="20mbit")
    parser.add_argument("--memory", type=float, default=20, help="MB of a device; none takes the whole model")
    parser.add_argument("--batch", type=int, default=96)
    parser.add_argument("--microbatch", type=int, help="samples of each; 8: messages of 524 kB")
    parser.add_argument("--pipelines", type=int)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    return parser.parse_args()


def _tight(cluster: Cluster, memory_bytes: float) -> Cluster:
    """Return the cluster with so much memory in each device."""

    def tight(node: Node) -> Node:
        devices = (replace(each, memory_bytes=memory_bytes, reserve_bytes=0.0) for each in node.devices)
        return replace(node, devices=tuple(devices))

    return replace(cluster, nodes=tuple(map(tight, cluster.nodes)))


def _plans(problem: Problem) -> dict[str, Plan]:
    """Return the plan of each choice."""
    profile, cluster = problem.profile, problem.cluster
    evaluate = evaluator(profile, cluster)
    return {
        name: replace(
            solve(
                problem, evaluate, proof_s=0,
                choose=None if looks is None else least_shared(profile, cluster, looks),
            ),
            predicted=None, profile_sha256=None, cluster_sha256=None,
        )
        for name, looks in CHOICES.items()
    }  # fmt: skip


if __name__ == "__main__":
    main()
