"""How far off is the roofline for a kind of GPU that it was not fitted to? See README.md."""

import dataclasses
import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cost_model.catalogue import accelerator
from cost_model.roofline import ELEMENT_BYTES, TRUSTED_ERROR, Measurement, Work, fit

MEASUREMENTS = Path(__file__).parent / "measurements.json"
Point = tuple[tuple[Any, ...], Measurement]
"""What was measured (publication, model, sequence, dtype, microbatch size, direction), and its time."""


def points() -> list[Point]:
    tables = json.loads(MEASUREMENTS.read_text(encoding="utf-8"))["tables"]
    return [
        point for table in tables for layer in table["layers"] for point in _layer(table["source"], layer)
    ]


def _layer(source: str, layer: dict[str, Any]) -> list[Point]:
    dtype, seq, hidden = layer["dtype"], layer["sequence_length"], layer["hidden_size"]
    device, parameters = accelerator(layer["kind"]), layer["parameters"]
    found = []
    for direction in ("forward", "backward"):
        passes = 2 if direction == "backward" else 1
        for samples, ms in zip(layer["microbatch_sizes"], layer[f"{direction}_ms"], strict=True):
            # a block keeps 34 s h + 5 a s^2 bytes a sample at 16 bit (Korthikanti et al., MLSys 2023)
            kept = (34 * seq * hidden + 5 * layer["num_heads"] * seq**2) * ELEMENT_BYTES[dtype] / 2
            work = Work(
                flops=passes * samples * (2 * parameters * seq + 4 * seq**2 * hidden),
                weight_bytes=parameters * ELEMENT_BYTES[dtype],
                activation_bytes=passes * samples * kept,
                dtype=dtype,
                backward=direction == "backward",
            )
            key = (source, layer["model"], seq, dtype, samples, direction)
            found.append((key, Measurement(device, work, ms / 1e3)))
    return found


def product(kind: str) -> str:
    """The product that a kind is a variant of: both A100s and both V100s would give each other away."""
    return next((name for name in ("A100", "V100") if kind.startswith(name)), kind)


def errors_of(kind: str, data: Sequence[Point]) -> list[float]:
    """Relative errors of a kind's speed relative to each other product measured on the same layer."""
    roofline = fit([entry for _, entry in data if product(entry.device.name) != product(kind)])
    groups = defaultdict(list)
    for key, entry in data:
        groups[key].append((entry.device.name, entry.seconds, roofline.seconds(entry.work, entry.device)))
    return [
        abs((reference_predicted / predicted) / (reference_s / seconds) - 1)
        for group in groups.values()
        for name, seconds, predicted in group
        if name == kind
        for reference, reference_s, reference_predicted in group
        if product(reference) != product(kind)
    ]


def main() -> None:
    data = points()
    kinds = sorted({entry.device.name for _, entry in data})
    errors = {kind: errors_of(kind, data) for kind in kinds}
    print("| kind | points | median error | 90th percentile | trusted |\n|---|---|---|---|---|")
    for kind in kinds:
        count = sum(entry.device.name == kind for _, entry in data)
        median = statistics.median(errors[kind])
        trusted = "yes" if median <= TRUSTED_ERROR else "no"
        print(f"| {kind} | {count} | {median:.1%} | {np.quantile(errors[kind], 0.9):.1%} | {trusted} |")
    everything = [error for values in errors.values() for error in values]
    medians = {kind: round(statistics.median(values), 3) for kind, values in errors.items()}
    print(
        f"\nall {len(data)} points, {len(everything)} pairs: median {statistics.median(everything):.1%}, "
        f"90th percentile {np.quantile(everything, 0.9):.1%}; mean of the kinds' medians "
        f"{statistics.mean(medians.values()):.1%}"
    )
    fitted = dataclasses.asdict(fit([entry for _, entry in data]))
    print(f"\nFITTED { ({name: float(f'{value:.4g}') for name, value in fitted.items()}) }")
    print(f"CHECKED {medians}")


if __name__ == "__main__":
    main()
