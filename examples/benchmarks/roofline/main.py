"""How far off is the roofline for a kind of GPU that it was not fitted to? See README.md."""

import dataclasses
import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cost_model.catalogue import accelerator
from cost_model.known_errors import TRUSTED_ERROR, KnownError
from cost_model.roofline import ELEMENT_BYTES, Measurement, Roofline, Work, fit

MEASUREMENTS = Path(__file__).parent / "measurements.json"
WHOLE_STEPS = Path(__file__).parent / "whole_steps.json"
PRODUCTS = {
    "A100": "A100",
    "V100": "V100",
    "H100": "H100",
    "Titan-RTX": "Turing RTX",
    "Quadro-RTX": "Turing RTX",
}
Point = tuple[tuple[Any, ...], Measurement]
"""What was measured (publication, model, sequence, dtype, microbatch size, direction), and its time."""
Speeds = list[tuple[str, float, float]]
"""Of one layer or model: each kind, its measured speed and its predicted one."""


def points() -> list[Point]:
    tables = json.loads(MEASUREMENTS.read_text(encoding="utf-8"))["tables"]
    return [
        point for table in tables for layer in table["layers"] for point in _layer(table["source"], layer)
    ]


def _layer(source: str, layer: dict[str, Any]) -> list[Point]:
    dtype, seq = layer["dtype"], layer["sequence_length"]
    device = accelerator(layer["kind"])
    found = []
    for direction in ("forward", "backward"):
        for samples, ms in zip(layer["microbatch_sizes"], layer[f"{direction}_ms"], strict=True):
            work = _block(layer, seq, dtype, samples, direction == "backward")
            key = (source, layer["model"], seq, dtype, samples, direction)
            found.append((key, Measurement(device, work, ms / 1e3)))
    return found


def _block(sizes: dict[str, Any], seq: int, dtype: str, samples: int, backward: bool) -> Work:
    """The work of a block of a transformer."""
    passes, hidden, parameters = 2 if backward else 1, sizes["hidden_size"], sizes["parameters"]
    # a block keeps 34 s h + 5 a s^2 bytes a sample at 16 bit (Korthikanti et al., MLSys 2023)
    kept = (34 * seq * hidden + 5 * sizes["num_heads"] * seq**2) * ELEMENT_BYTES[dtype] / 2
    return Work(
        flops=passes * samples * (2 * parameters * seq + 4 * seq**2 * hidden),
        weight_bytes=parameters * ELEMENT_BYTES[dtype],
        activation_bytes=passes * samples * kept,
        dtype=dtype,
        backward=backward,
    )


def product(kind: str) -> str:
    """The product that a kind is a variant of: variants would give each other away."""
    return next((name for prefix, name in PRODUCTS.items() if kind.startswith(prefix)), kind)


def without(kind: str, data: Sequence[Point]) -> Roofline:
    """The roofline fitted to all other products."""
    return fit([entry for _, entry in data if product(entry.device.name) != product(kind)])


def errors_of(kind: str, data: Sequence[Point]) -> list[float]:
    """Errors of a kind's speed relative to each other product timed on the same layer; above 0: too fast."""
    roofline = without(kind, data)
    groups = defaultdict(list)
    for key, entry in data:
        predicted_s = roofline.seconds(entry.work, entry.device)
        groups[key].append((entry.device.name, 1 / entry.seconds, 1 / predicted_s))
    return _relative_errors(kind, groups.values())


def step_errors_of(kind: str, data: Sequence[Point]) -> list[float]:
    """The same of training steps of whole models, none of which the roofline is fitted to."""
    roofline, content = without(kind, data), json.loads(WHOLE_STEPS.read_text(encoding="utf-8"))
    shape = content["sequence_length"], content["dtype"]
    groups = []
    for model, block in content["blocks"].items():
        for table in content["tables"]:
            speeds = []
            for row in table["samples_per_s"]:
                (samples, measured), device = row[model], accelerator(row["kind"])
                passes = (_block(block, *shape, samples, backward) for backward in (False, True))
                step_s = block["number"] * sum(roofline.seconds(work, device) for work in passes)
                speeds.append((row["kind"], measured, samples / step_s))
            groups.append(speeds)
    return _relative_errors(kind, groups)


def step_kinds() -> list[str]:
    """The kinds on which whole steps were timed."""
    tables = json.loads(WHOLE_STEPS.read_text(encoding="utf-8"))["tables"]
    return sorted({row["kind"] for table in tables for row in table["samples_per_s"]})


def _relative_errors(kind: str, groups: Iterable[Speeds]) -> list[float]:
    return [
        (predicted / reference_predicted) / (measured / reference_measured) - 1
        for group in groups
        for name, measured, predicted in group
        if name == kind
        for reference, reference_measured, reference_predicted in group
        if product(reference) != product(kind)
    ]


def known_error(errors: Sequence[float]) -> KnownError:
    median, bias = statistics.median(map(abs, errors)), statistics.median(errors)
    return KnownError(round(median, 3), round(bias, 3))


def show(what: str, errors: dict[str, list[float]]) -> None:
    """Print a table of the errors by kind, and the constant of `cost_model/known_errors.py`."""
    print(f"\n{what}\n\n| kind | pairs | median error | signed | 90th percentile | trusted |")
    print("|---|---|---|---|---|---|")
    known = {kind: known_error(values) for kind, values in errors.items()}
    for kind, values in errors.items():
        tail = np.quantile(np.abs(values), 0.9)
        trusted = "yes" if known[kind].median <= TRUSTED_ERROR else "no"
        print(
            f"| {kind} | {len(values)} | {known[kind].median:.1%} | {known[kind].bias:+.1%} | {tail:.1%} "
            f"| {trusted} |"
        )
    everything = np.abs([error for values in errors.values() for error in values])
    print(
        f"\n{len(everything)} pairs: median {np.median(everything):.1%}, 90th percentile "
        f"{np.quantile(everything, 0.9):.1%}; mean of the kinds' medians "
        f"{statistics.mean(entry.median for entry in known.values()):.1%}"
    )
    print("\n" + "\n".join(f'    "{kind}": KnownError({e.median}, {e.bias}),' for kind, e in known.items()))


def main() -> None:
    data = points()
    kinds = sorted({entry.device.name for _, entry in data})
    show(f"Blocks, {len(data)} points", {kind: errors_of(kind, data) for kind in kinds})
    show("Whole steps", {kind: step_errors_of(kind, data) for kind in step_kinds()})
    fitted = dataclasses.asdict(fit([entry for _, entry in data]))
    print(f"\nFITTED { ({name: float(f'{value:.4g}') for name, value in fitted.items()}) }")


if __name__ == "__main__":
    main()
