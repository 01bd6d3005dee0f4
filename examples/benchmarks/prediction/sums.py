"""How far is the predicted step from the measured one where gradients are summed inside nodes first?

    python examples/benchmarks/prediction/sums.py [--retries 2] [--steps 4] [--bucket-bytes 2e5]
        [--slow-inside]

Twelve plans on emulated clusters of three nodes; --slow-inside: four on one of two nodes, whose links inside
are slow. See README.md, "Sums inside nodes first".
"""

import statistics
import sys
from dataclasses import replace

from combinations import cluster_data, toml_of
from measuring import kept_profile, measured_steps, parser_of, show, spread

from cost_model.cluster import Cluster
from cost_model.cluster_file import cluster_from_data
from cost_model.collectives import Collective
from cost_model.profile import ModelProfile
from hetpipe.program import bucket_sizes
from hetpipe.program.costs import ProgramCosts
from hetpipe.program.sync_starts import inner_syncs
from hetpipe.simulation.prediction import Prediction, predict
from hetpipe.simulation.simulator import simulate
from partition.plan import Pipeline, Plan, Stage

MODEL = "bert-tiny"
SEQUENCE_LENGTH = 64
SAMPLES = 2  # of each pipeline, one a microbatch
CLUSTERS = {
    "3 x 2, 25 Mbit/s": cluster_data("three of two", [[0.04] * 2] * 3, "25 Mbit/s", "1 ms"),
    "3 x 2, 100 Mbit/s": cluster_data("three of two", [[0.04] * 2] * 3, "100 Mbit/s", "0.2 ms"),
    "3 + 2 + 1, 50 Mbit/s": cluster_data(
        "three, two and one", [[0.03] * 3, [0.045] * 2, [0.08]], "50 Mbit/s", "0.5 ms"
    ),
}
SLOW_INSIDE = {
    "2 x 3, 50 Mbit/s, 100 inside": cluster_data(
        "two of three",
        [[0.04] * 3] * 2,
        "50 Mbit/s",
        "0.2 ms",
        {"bandwidth": "100 Mbit/s", "latency": "50 us"},
    )
}
"""Where sums inside a node take as long as between nodes, so that parts of them go side by side."""


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--bucket-bytes",
        type=float,
        help="of sums that begin inside the last backward; small models need few",
    )
    parser.add_argument("--slow-inside", action="store_true", help="on two nodes with slow links inside")
    options = parser.parse_args()
    if options.bucket_bytes is not None:
        bucket_sizes.BUCKET_BYTES = options.bucket_bytes  # this process lowers the plans, the ranks read them
    clusters = SLOW_INSIDE if options.slow_inside else CLUSTERS
    profile = kept_profile(options, MODEL, SEQUENCE_LENGTH, clusters)
    lines = [
        "| cluster | plan | buckets inside nodes first | sums inside a backward "
        "| with rings alone, predicted s | predicted s | measured s, median [min, max] of n | error |",
        "|---" * 8 + "|",
    ]
    errors = []
    for name, data in clusters.items():
        cluster = cluster_from_data(data, name)
        for shape, plan in plans_of(profile, cluster).items():
            predicted = predict(plan, profile, cluster)
            steps, busy = measured_steps(plan, profile, toml_of(data), options)
            errors.append(statistics.median(steps) / predicted.step_s - 1)
            cells = _row(predicted, steps, rings_s(predicted, profile, cluster))
            lines.append(f"| {name} | {shape} | {cells} | {errors[-1]:+.1%}{busy} |")
            print(lines[-1], file=sys.stderr, flush=True)
    show(lines, errors)


def plans_of(profile: ModelProfile, cluster: Cluster) -> dict[str, Plan]:
    """Return four plans for six devices, in all of which several devices of a node have a layer."""
    nodes = [[device.name for device in node.devices] for node in cluster.nodes]
    ordered = [name for node in nodes for name in node]
    turns = [node[index] for index in range(max(map(len, nodes))) for node in nodes if index < len(node)]
    half, layers = profile.num_layers // 2, profile.num_layers
    whole = (0, layers)
    row = ordered if len(nodes) == 3 else turns  # so that each stage is on several nodes
    pairs = [((row[index], row[3 + index]), ((0, half), (half, layers))) for index in range(3)]
    chain = ((ordered[0], ordered[5]), ((0, half + 1), (half + 1, layers)))
    return {
        "a replica on each device": _plan(profile, [((name,), (whole,)) for name in ordered]),
        "the same, nodes taking turns": _plan(profile, [((name,), (whole,)) for name in turns]),
        "three pipelines of two stages": _plan(profile, pairs),
        "a pipeline, and four replicas": _plan(
            profile, [chain, *(((name,), (whole,)) for name in ordered[1:5])]
        ),
    }


def _plan(profile: ModelProfile, chains: list[tuple[tuple[str, ...], tuple[tuple[int, int], ...]]]) -> Plan:
    pipelines = tuple(
        Pipeline(
            1,
            SAMPLES,
            tuple(
                Stage((name,), cut, len(names) - index)
                for index, (name, cut) in enumerate(zip(names, cuts, strict=True))
            ),
        )
        for names, cuts in chains
    )
    return Plan("by hand", profile.model, SAMPLES * len(pipelines), pipelines)


def rings_s(predicted: Prediction, profile: ModelProfile, cluster: Cluster) -> float:
    """Return the predicted step with rings in the order of the ranks."""
    program = predicted.program
    rings = tuple(replace(bucket, collective=Collective.RING, nodes=()) for bucket in program.buckets)
    return simulate(ProgramCosts(replace(program, buckets=rings), profile, cluster)).makespan_s


def _row(predicted: Prediction, steps: list[float], rings: float) -> str:
    """Return the cells of a plan; those with no sum inside nodes first have no place here."""
    program = predicted.program
    buckets = program.buckets
    inside = [bucket.collective is Collective.HIERARCHICAL for bucket in buckets]
    assert any(inside), list(map(str, buckets))
    ranks = range(len(program.ranks))
    begun = {sync.bucket for rank in ranks for syncs in inner_syncs(program, rank).values() for sync in syncs}
    return (
        f"{sum(inside)} of {len(buckets)} | {len(begun)} | {rings:.3f} | {predicted.step_s:.3f} "
        f"| {spread(steps)}"
    )


if __name__ == "__main__":
    main()
