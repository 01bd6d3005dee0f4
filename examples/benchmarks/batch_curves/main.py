"""Are cubic curves nearer than straight lines to times at batch sizes not measured? See README.md."""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from cost_model.cluster import EMULATED, Cluster, Device, Link, Node
from cost_model.interpolation import interpolate
from cost_model.layer_profile import LayerProfile, LayerTimes
from cost_model.profile import KindProfile, ModelProfile
from hetpipe.models.chain import ChainModel
from hetpipe.models.huggingface import model_spec
from hetpipe.simulation.prediction import evaluator, simulate_plan
from partition.baselines.catalogue import BASELINES
from partition.problem import problem_of

BLOCKS = Path(__file__).parents[1] / "roofline" / "measurements.json"
KNOTS = (1, 2, 4, 8, 16, 32, 64)
SPEEDS = (1.0, 0.6, 0.35)
BATCHES = (20, 40, 60)
OWN_SIZES, OWN_LENGTH = tuple(range(1, 17)), 64
Method = Callable[[Sequence[int], Sequence[float], float], float]
"""(sizes, seconds, size) -> seconds, between the first and the last size."""


def natural_spline(sizes: Sequence[int], values: Sequence[float], size: float) -> float:
    """Return the value of the cubic spline without curvature at its ends.

    >>> natural_spline([1, 2, 4], [1.0, 2.0, 4.0], 3)
    3.0
    """
    widths, rises = np.diff(sizes), np.diff(values)
    count = len(sizes)
    matrix, right = np.eye(count), np.zeros(count)
    for i in range(1, count - 1):
        matrix[i, i - 1 : i + 2] = widths[i - 1], 2 * (widths[i - 1] + widths[i]), widths[i]
        right[i] = 6 * (rises[i] / widths[i] - rises[i - 1] / widths[i - 1])
    bends = np.linalg.solve(matrix, right)
    i = _segment(sizes, size)
    left, rest, width = size - sizes[i], sizes[i + 1] - size, widths[i]
    cubic = (bends[i] * rest**3 + bends[i + 1] * left**3) / (6 * width)
    line = (values[i] / width - bends[i] * width / 6) * rest
    return float(cubic + line + (values[i + 1] / width - bends[i + 1] * width / 6) * left)


def monotone_cubic(sizes: Sequence[int], values: Sequence[float], size: float) -> float:
    """Return the value of a cubic curve that rises and falls only where the values do.

    Fritsch and Carlson, SIAM Journal on Numerical Analysis 17 (2), 1980; slopes inside are harmonic means
    (Fritsch and Butland, 1984), those at the ends of three points, as in PCHIP.

    >>> monotone_cubic([1, 2, 4], [1.0, 2.0, 4.0], 3)
    3.0
    """
    widths, slopes = np.diff(sizes), np.diff(values) / np.diff(sizes)
    if len(slopes) == 1:
        return float(values[0] + slopes[0] * (size - sizes[0]))
    at = np.zeros(len(sizes))
    for i in range(1, len(sizes) - 1):
        before, after = slopes[i - 1], slopes[i]
        if before * after > 0:
            first, second = 2 * widths[i] + widths[i - 1], widths[i] + 2 * widths[i - 1]
            at[i] = (first + second) / (first / before + second / after)
    at[0] = _end_slope(widths[0], widths[1], slopes[0], slopes[1])
    at[-1] = _end_slope(widths[-1], widths[-2], slopes[-1], slopes[-2])
    i = _segment(sizes, size)
    part = (size - sizes[i]) / widths[i]
    rise = values[i] * (1 + 2 * part) * (1 - part) ** 2 + values[i + 1] * part**2 * (3 - 2 * part)
    bend = at[i] * part * (1 - part) ** 2 - at[i + 1] * part**2 * (1 - part)
    return float(rise + widths[i] * bend)


def _end_slope(width: float, next_width: float, slope: float, next_slope: float) -> float:
    found = ((2 * width + next_width) * slope - width * next_slope) / (width + next_width)
    if found * slope <= 0:
        return 0.0
    return 3 * slope if slope * next_slope <= 0 and abs(found) > 3 * abs(slope) else found


def _segment(sizes: Sequence[int], size: float) -> int:
    return min(max(0, int(np.searchsorted(sizes, size, side="right")) - 1), len(sizes) - 2)


METHODS: dict[str, Method] = {
    "linear": interpolate,
    "natural spline": natural_spline,
    "monotone cubic": monotone_cubic,
}


@dataclass(frozen=True)
class Curve:
    """Seconds by batch size, some of which are what a curve is laid through."""

    name: str
    sizes: tuple[int, ...]
    seconds: tuple[float, ...]

    def split(self, knots: Iterable[int]) -> tuple[list[int], list[float], list[tuple[int, float]]]:
        """Return sizes and seconds of the knots, and what is measured between them."""
        wanted = set(knots)
        known = [(b, s) for b, s in zip(self.sizes, self.seconds, strict=True) if b in wanted]
        last = known[-1][0]
        rest = [
            (b, s)
            for b, s in zip(self.sizes, self.seconds, strict=True)
            if b not in wanted and known[0][0] < b < last
        ]
        return [b for b, _ in known], [s for _, s in known], rest


def of_blocks() -> Iterator[Curve]:
    """Blocks of transformers on GPUs, at 1, 2, 4, 8 and 16 samples."""
    for table in json.loads(BLOCKS.read_text(encoding="utf-8"))["tables"]:
        for layer in table["layers"]:
            name = f"{layer['kind']} {layer['model']} {layer['sequence_length']} {layer['dtype']}"
            both = zip(layer["forward_ms"], layer["backward_ms"], strict=True)
            yield Curve(name, tuple(layer["microbatch_sizes"]), tuple((f + b) / 1e3 for f, b in both))


def of_latencies(path: Path) -> Iterator[Curve]:
    """Blocks of the file of layer latencies of benson-guo/cephalo, at 1, 2, 3, ... samples."""
    for model, kinds in json.loads(path.read_text(encoding="utf-8")).items():
        for kind, lengths in kinds.items():
            for length, dtypes in lengths.items():
                for dtype, entry in dtypes.items():
                    rows = entry if isinstance(entry, list) else []  # others are lines
                    lists = [row for row in rows if isinstance(row, list) and len(row) > 2]
                    if len(lists) == 2:
                        seconds = tuple((f + b) / 1e3 for f, b in zip(*lists, strict=False))
                        sizes = tuple(range(1, len(seconds) + 1))
                        yield Curve(f"{kind} {model} {length} {dtype}", sizes, seconds)


def of_model(model: str, rounds: int) -> Curve:
    """Forward and backward of a whole model on one core, in CPU seconds, the least of so many rounds.

    Other processes slow these down too, through caches, but by less than seconds on the wall.
    """
    torch.set_num_threads(1)
    chain = ChainModel.from_spec(model_spec(model))
    layers = chain.materialise(range(chain.num_layers), 0, torch.float32)
    for value in layers.owned_parameters().values():
        value.requires_grad_(True)
    least = dict.fromkeys(OWN_SIZES, float("inf"))
    for _ in range(rounds):
        for size in OWN_SIZES:
            ids = torch.randint(0, 100, (size, OWN_LENGTH))
            begin_s = time.process_time()
            (logits,) = layers.run(0, chain.num_layers, {"input_ids": ids})
            logits.square().mean().backward()
            least[size] = min(least[size], time.process_time() - begin_s)
    return Curve(model, OWN_SIZES, tuple(least.values()))


def rows(what: str, curves: Sequence[Curve], *, leave_one_out: bool = False) -> Iterator[str]:
    """A row for each method: errors at the sizes between the knots, and how often time falls there.

    leave_one_out: each size but the first and the last in turn, from all the others.
    """
    for name, method in METHODS.items():
        errors, falls = [], 0
        for curve in curves:
            held_out = [curve.sizes[1:-1]] if not leave_one_out else [(b,) for b in curve.sizes[1:-1]]
            for out in held_out:
                knots = set(curve.sizes) - set(out) if leave_one_out else set(KNOTS)
                sizes, seconds, rest = curve.split(knots)
                errors += [abs(method(sizes, seconds, b) / s - 1) for b, s in rest]
                grid = np.linspace(sizes[0], sizes[-1], 61)
                drawn = [method(sizes, seconds, at) for at in grid]
                rising = all(b >= a for a, b in pairwise(seconds))
                falls += rising and any(b < a * (1 - 1e-9) for a, b in pairwise(drawn))
        errors.sort()
        worst, ninth = errors[-1], errors[int(0.9 * len(errors))]
        yield (
            f"| {what} | {len(curves)} | {len(errors)} | {name} | {statistics.median(errors):.2%} | "
            f"{statistics.mean(errors):.2%} | {ninth:.2%} | {worst:.1%} | {falls} |"
        )


def planned(what: str, curves: Sequence[Curve]) -> Iterator[str]:
    """How much longer steps of `poplar-2` are that were planned by a curve than by all that was measured."""
    ways: dict[str, Method | None] = {"knots alone, linear between": None}
    ways |= {f"all sizes, {name}": method for name, method in METHODS.items()}
    ratios: dict[str, list[float]] = {name: [] for name in ways}
    for curve in curves:
        profile = profile_of(curve)
        last = max(size for size in curve.sizes if size in KNOTS)
        whole = profile_of(Curve(curve.name, curve.sizes[:last], curve.seconds[:last]))
        for batch in BATCHES:
            least_s = step_s(whole, profile, batch)
            for name, method in ways.items():
                ratios[name].append(step_s(profile_of(drawn(curve, method)), profile, batch) / least_s)
    for name, found in ratios.items():
        yield f"| {what} | {name} | {statistics.mean(found) - 1:.2%} | {max(found) - 1:.1%} |"


def profile_of(curve: Curve) -> ModelProfile:
    """A model of one layer that takes as long."""
    times = LayerTimes(tuple(s / 3 for s in curve.seconds), tuple(s * 2 / 3 for s in curve.seconds))
    kinds = {EMULATED: KindProfile("measured", curve.sizes, (times,))}
    return ModelProfile(curve.name, 1, "float32", (LayerProfile("all", 1.0, 0.0, 1.0),), kinds)


def drawn(curve: Curve, method: Method | None) -> Curve:
    """The curve as if the knots alone had been measured: these, or all sizes between them by a method."""
    knots, seconds, _ = curve.split(KNOTS)
    if method is None:
        return Curve(curve.name, tuple(knots), tuple(seconds))
    sizes = tuple(size for size in curve.sizes if size <= knots[-1])
    return Curve(curve.name, sizes, tuple(max(0.0, method(knots, seconds, size)) for size in sizes))


def step_s(planned_by: ModelProfile, profile: ModelProfile, batch: int) -> float:
    """Seconds, by the second profile, of the step that `poplar-2` plans by the first on unlike devices."""
    devices = (Device(f"n/{i}", "n", EMULATED, 1e12, speed=speed) for i, speed in enumerate(SPEEDS))
    cluster = Cluster("n", Link(0.0, 1e12), (Node("n", tuple(devices)),))
    problem = problem_of(planned_by, cluster, batch)
    plan = BASELINES["poplar-2"](problem, evaluator(planned_by, cluster))
    return simulate_plan(plan, profile, cluster).makespan_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--latencies", type=Path, help="Cephalo's file of layer latencies")
    parser.add_argument("--models", nargs="*", default=["bert-tiny", "gpt2-tiny"], help="timed here")
    parser.add_argument("--rounds", type=int, default=25)
    options = parser.parse_args()
    sets = {f"{name}, one core": [of_model(name, options.rounds)] for name in options.models}
    if options.latencies is not None:
        sets["blocks on GPUs"] = [c for c in of_latencies(options.latencies) if len(c.sizes) >= 8]
    print("| what | curves | sizes | curve | median | mean | 9 of 10 | worst | falls |")
    print("|---|---|---|---|---|---|---|---|---|")
    for what, curves in sets.items():
        print("\n".join(rows(what, curves)), flush=True)
    print("\n".join(rows("blocks on GPUs, leave one out", list(of_blocks()), leave_one_out=True)))
    print("\n| what | planned by | longer, mean | longer, worst |\n|---|---|---|---|")
    for what, curves in sets.items():
        print("\n".join(planned(what, [curve for curve in curves if len(curve.sizes) >= 16])), flush=True)


if __name__ == "__main__":
    main()
