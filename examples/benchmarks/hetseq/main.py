"""The table of HetSeq, simulated: fitted on its first two rows, the other two predicted. See README.md."""

from collections.abc import Callable

from cost_model.cluster import Cluster, Device, Link, Node
from cost_model.layer_profile import LayerProfile, LayerTimes
from cost_model.profile import KindProfile, ModelProfile
from cost_model.units import format_bandwidth
from hetpipe.simulation.prediction import predict
from partition.plan import Pipeline, Plan, Stage

PUBLISHED_S = {1: 2.60, 2: 2.69, 4: 2.794, 8: 3.126}
"""Seconds a step by nodes of four GPUs (README of github.com/yifding/hetseq, "Performance table")."""
GPUS_PER_NODE = 4
SAMPLES_PER_GPU = 32
TOKENS = 128
WIDTH, BLOCKS, WORDS = 768, 12, 30522
FLOAT32 = 4.0
PCIE = Link(latency_s=10e-6, bandwidth_bytes_per_s=12e9)
LATENCY_S = 50e-6
KIND = "GPU"


def main() -> None:
    compute_s = fitted(lambda seconds: step_s(1, seconds, 1e9), PUBLISHED_S[1], 1.0, 4.0)
    bandwidth = fitted(lambda rate: step_s(2, compute_s, rate), PUBLISHED_S[2], 1e8, 1e11, falls=True)
    print(f"forward and backward of {SAMPLES_PER_GPU} samples on a GPU: {compute_s:.4f} s, fitted on row 1")
    print(f"link between nodes: {format_bandwidth(bandwidth)}, fitted on row 2\n")
    print("| nodes | GPUs | batch | published s | simulated s | error | speedup by published s | simulated |")
    print("|---|---|---|---|---|---|---|---|")
    for nodes, published_s in PUBLISHED_S.items():
        found_s = step_s(nodes, compute_s, bandwidth)
        error = "fitted" if nodes <= 2 else f"{100 * (found_s / published_s - 1):+.1f} %"
        print(
            f"| {nodes} | {nodes * GPUS_PER_NODE} | {nodes * GPUS_PER_NODE * SAMPLES_PER_GPU} "
            f"| {published_s:.3f} | {found_s:.3f} | {error} "
            f"| {nodes * PUBLISHED_S[1] / published_s:.2f} | {nodes * PUBLISHED_S[1] / found_s:.2f} |"
        )


def step_s(num_nodes: int, compute_s: float, bandwidth_bytes_per_s: float) -> float:
    """Return the seconds of a simulated step: a copy of the model on each GPU, as DistributedDataParallel."""
    nodes = tuple(
        Node(
            f"n{node}",
            tuple(Device(f"n{node}/{gpu}", f"n{node}", KIND, 12e9) for gpu in range(GPUS_PER_NODE)),
            PCIE,
        )
        for node in range(num_nodes)
    )
    cluster = Cluster("hetseq", Link(LATENCY_S, bandwidth_bytes_per_s), nodes)
    profile = bert_base(compute_s)
    copies = tuple(
        Pipeline(SAMPLES_PER_GPU, SAMPLES_PER_GPU, (Stage((device.name,), (0, profile.num_layers), 1),))
        for device in cluster.devices
    )
    plan = Plan("ddp", profile.model, SAMPLES_PER_GPU * len(copies), copies)
    return predict(plan, profile, cluster).step_s


def bert_base(compute_s: float) -> ModelProfile:
    """Return BERT-base with both heads, whose layers share the seconds of a step by their multiplications."""
    vector = FLOAT32 * WIDTH
    embedded = (WORDS + 512 + 2 + 2) * vector
    matrices = 12 * WIDTH**2
    block = (matrices + 13 * WIDTH) * FLOAT32
    head = (2 * WIDTH**2 + 6 * WIDTH + WORDS + 2) * FLOAT32  # masked words, next sentence, pooler
    of_block, of_head = matrices + 2 * TOKENS * WIDTH, (WORDS + WIDTH) * WIDTH
    whole = BLOCKS * of_block + of_head
    tokens_out = TOKENS * vector
    layers = [
        LayerProfile("embeddings", embedded, tokens_out, tokens_out),
        *(LayerProfile(f"block{index}", block, tokens_out, 16 * tokens_out) for index in range(BLOCKS)),
        LayerProfile("head", head + WORDS * vector, 0.0, tokens_out, tied_to="embeddings",
                     tied_bytes=WORDS * vector),
    ]  # fmt: skip
    seconds = [0.0, *[compute_s * of_block / whole] * BLOCKS, compute_s * of_head / whole]
    times = tuple(LayerTimes((duration_s / 3,), (2 * duration_s / 3,)) for duration_s in seconds)
    kinds = {KIND: KindProfile("estimated", (SAMPLES_PER_GPU,), times)}
    return ModelProfile("bert-base-uncased", TOKENS, "float32", tuple(layers), kinds)


def fitted(
    function: Callable[[float], float], wanted: float, low: float, high: float, *, falls: bool = False
) -> float:
    """Return where a function that rises, or falls, has the wanted value, by bisection of the logarithm."""
    for _ in range(60):
        middle = (low * high) ** 0.5
        if (function(middle) < wanted) is falls:
            high = middle
        else:
            low = middle
    return (low * high) ** 0.5


if __name__ == "__main__":
    main()
