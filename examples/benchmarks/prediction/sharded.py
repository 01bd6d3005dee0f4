"""How far is the predicted step from the measured one where gradients, or weights, are sharded?

    python examples/benchmarks/prediction/sharded.py [--retries 2] [--steps 4] [--profile FILE]

Ten plans on three unequal emulated devices and links of two speeds. See README.md, "Sharded gradients and
weights".
"""

import statistics
import sys

from combinations import cluster_data, toml_of
from measuring import kept_profile, measured_steps, parser_of, show, spread

from cost_model.cluster import Cluster
from cost_model.cluster_file import cluster_from_data
from cost_model.profile import ModelProfile
from hetpipe.simulation.prediction import predict
from partition.estimates.optimizer_sharding import with_state_owners
from partition.plan import Pipeline, Plan, Stage

MODEL, SEQUENCE_LENGTH = "bert-tiny", 64
SPEEDS = [[0.12, 0.06], [0.03]]
CLUSTERS = {
    "2 + 1, 25 Mbit/s": cluster_data("slow", SPEEDS, "25 Mbit/s", "1 ms"),
    "2 + 1, 400 Mbit/s": cluster_data("fast", SPEEDS, "400 Mbit/s", "0.2 ms"),
}


def main() -> None:
    options = parser_of(__doc__).parse_args()
    profile = kept_profile(options, MODEL, SEQUENCE_LENGTH, CLUSTERS)
    lines = [
        "| cluster | plan | zero | predicted s | measured s, median [min, max] of n | error |",
        "|---" * 6 + "|",
    ]
    errors = []
    for name, data in CLUSTERS.items():
        cluster = cluster_from_data(data, name)
        for shape, plan in plans_of(profile, cluster).items():
            predicted_s = predict(plan, profile, cluster).step_s
            steps, busy = measured_steps(plan, profile, toml_of(data), options)
            errors.append(statistics.median(steps) / predicted_s - 1)
            lines.append(
                f"| {name} | {shape} | {plan.zero} | {predicted_s:.3f} "
                f"| {spread(steps)} "
                f"| {errors[-1]:+.1%}{busy} |"
            )
            print(lines[-1], file=sys.stderr, flush=True)
    show(lines, errors)


def plans_of(profile: ModelProfile, cluster: Cluster) -> dict[str, Plan]:
    """Return five plans: gradients sharded between replicas, and beside stages; weights, in three ways."""
    fast, middle, slow = (device.name for device in cluster.devices)
    layers = profile.num_layers
    whole = [(fast, (0, layers), 1)], [(middle, (0, layers), 1)], [(slow, (0, layers), 1)]
    cut = [(fast, (0, layers), 1)], [(middle, (0, layers - 3), 2), (slow, (layers - 3, layers), 1)]
    together = tuple([(name, span, layers)] for ((name, span, _),) in whole)
    in_rounds, of_ones = ((8, 16), (4, 8), (2, 4)), ((1, 5), (1, 3), (1, 1))
    made = {
        "unequal microbatches, two each": _plan(profile, whole, in_rounds, 2),
        "a replica, and two stages": _plan(profile, cut, ((2, 8), (1, 4)), 2),
        "unequal microbatches, two each, weights too": _plan(profile, whole, in_rounds, 3),
        "a replica, and two stages, weights too": _plan(profile, cut, ((2, 8), (1, 4)), 3),
        "5, 3 and 1 microbatches": _plan(profile, whole, of_ones, 3),
        "5, 3 and 1 microbatches, in one pass": _plan(profile, together, of_ones, 3),
    }
    return {name: with_state_owners(plan, profile, cluster) for name, plan in made.items()}


def _plan(
    profile: ModelProfile,
    chains: tuple[list[tuple[str, tuple[int, int], int]], ...],
    shares: tuple[tuple[int, int], ...],
    zero: int,
) -> Plan:
    """Return a plan of stages (device, layers, in_flight) with (microbatch size, samples) by pipeline."""
    pipelines = tuple(
        Pipeline(*share, tuple(Stage((name,), cut, in_flight) for name, cut, in_flight in chain))
        for chain, share in zip(chains, shares, strict=True)
    )
    batch = sum(samples for _, samples in shares)
    return Plan("by hand", profile.model, batch, pipelines, zero=zero)


if __name__ == "__main__":
    main()
