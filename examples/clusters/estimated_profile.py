"""A profile for the clusters of published papers: blocks of GPT with published times, other kinds estimated.

    python examples/clusters/estimated_profile.py hetpipe -o profile.json

See README.md for what is measured and what is not.
"""

import argparse
import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cost_model.catalogue import accelerator
from cost_model.cluster_file import read_cluster
from cost_model.layer_profile import LayerProfile, LayerTimes
from cost_model.profile import KindProfile, ModelProfile, profile_text
from cost_model.roofline import estimate_kind, nearest_kind

MEASUREMENTS = Path(__file__).parents[1] / "benchmarks" / "roofline" / "measurements.json"
SEQUENCE_LENGTH, DTYPE, BYTES = 512, "float32", 4
SIZES = (1, 2, 4, 8)
NUM_BLOCKS = {"gpt_1.3b": 24, "gpt_2.7b": 32, "bert_large": 24}
STATES = 2.0  # Adam: two numbers for each parameter
PASSES, SHARE = (
    7,
    0.75,
)  # an optimizer step reads and writes each parameter byte so often, at so much bandwidth


def published(model: str) -> ModelProfile:
    """The blocks of a model on the kinds that it was measured on; no embedding, no head."""
    tables = json.loads(MEASUREMENTS.read_text(encoding="utf-8"))["tables"]
    layers = [
        layer
        for table in tables
        for layer in table["layers"]
        if (layer["model"], layer["sequence_length"], layer["dtype"]) == (model, SEQUENCE_LENGTH, DTYPE)
        and set(SIZES) <= set(layer["microbatch_sizes"])
    ]
    first, count = layers[0], NUM_BLOCKS[model]
    seq, hidden = SEQUENCE_LENGTH, first["hidden_size"]
    # a block keeps 34 s h + 5 a s^2 bytes a sample at 16 bit (Korthikanti et al., MLSys 2023)
    saved = (34 * seq * hidden + 5 * first["num_heads"] * seq**2) * BYTES / 2
    block = LayerProfile("block", first["parameters"] * BYTES, seq * hidden * BYTES, saved)
    return ModelProfile(
        model=f"{model}-blocks",
        sequence_length=seq,
        dtype=DTYPE,
        optimizer_bytes_per_parameter_byte=STATES,
        layers=tuple(dataclasses.replace(block, name=f"block{index}") for index in range(count)),
        kinds={layer["kind"]: _kind(layer, count) for layer in layers},
    )


def _kind(layer: dict[str, Any], count: int) -> KindProfile:
    places = [layer["microbatch_sizes"].index(size) for size in SIZES]
    forward, backward = (
        tuple(layer[f"{direction}_ms"][place] / 1e3 for place in places)
        for direction in ("forward", "backward")
    )
    bandwidth = accelerator(layer["kind"]).memory_bandwidth_bytes_per_s
    times = LayerTimes(forward, backward)
    return KindProfile("measured", SIZES, (times,) * count, optimizer_s_per_byte=PASSES / (SHARE * bandwidth))


def with_kinds(profile: ModelProfile, kinds: Iterable[str]) -> ModelProfile:
    """The profile with the kinds of a cluster; those that were not measured are estimated."""
    for kind in sorted(set(kinds) - profile.kinds.keys()):
        device = accelerator(kind)
        estimated = estimate_kind(profile, nearest_kind(profile, device), device)
        profile = dataclasses.replace(profile, kinds={**profile.kinds, kind: estimated})
    return profile


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("clusters", nargs="+", help="cluster files, or names of hetpipe clusters")
    parser.add_argument("--model", choices=NUM_BLOCKS, default="gpt_1.3b")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    kinds = {device.kind for path in options.clusters for device in read_cluster(path).devices}
    options.output.write_text(profile_text(with_kinds(published(options.model), kinds)), encoding="utf-8")


if __name__ == "__main__":
    main()
