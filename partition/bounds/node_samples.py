"""The most samples that devices of one node pass through a run of layers in a step.

A run is what consecutive stages of a pipeline, all on the node, hold; its pipeline comes from another node in
front of it. Whatever is not known of the pipeline is left out, so that no run of a plan does more.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from partition.estimates.arrays import Bools, Floats, Places
from partition.estimates.stage_tables import Amount, ProblemTables

GROWTH = 1.04  # of the amounts of samples that are looked at
SLACK = 1 + 1e-9  # of a step, for rounding


@dataclass(frozen=True, slots=True)
class _LayerTimes:
    """Seconds of each layer on the devices of a node, in microbatches of one size; fits: by [start, stop].

    busy_s: the least of a sample, forward and backward. last_s: the most that the backward of the last
    microbatch takes. before_s, behind_s, optimizer_s: of all layers in front of a place, the least of the
    first forward, of the last backward, both on any device, and of the optimizer step on these. fewest:
    samples from which on a stage's work outweighs what a stage behind it waits longer.
    """

    busy_s: Floats
    last_s: Floats
    before_s: Floats
    behind_s: Floats
    optimizer_s: Floats
    fits: Bools
    fewest: float


def most_samples(
    tables: ProblemTables, classes: tuple[int, ...], width: int, step_s: float, sums_s: Floats
) -> Floats:
    """Return the most samples that so many devices pass through layers [start, stop): [devices, start, stop].

    classes: that the devices of the node may have. sums_s: for which the sums of layers [start, stop) hold
    the node's card, by [start, stop], 0 where they are not counted. Such a sum begins when the last backward
    of its layer is over on every device of the run, at the earliest: behind the first of the stages no
    others come, so that the card has all of the sums from the run's first layer on still to do when a stage
    is done, but for those of its own layers that its last backward has passed by.
    """
    num_layers, batch = tables.num_layers, tables.problem.global_batch_size
    amounts = _amounts(batch)
    most = np.zeros((width + 1, num_layers + 1, num_layers + 1))
    beyond = np.append(amounts[1:], batch)  # what fits one amount may be no less than the next
    ends = np.arange(num_layers + 1)
    for times in _layer_times(tables, classes):
        for start in range(num_layers):
            reached = _reached(times, start, width, amounts, step_s * SLACK, sums_s[start])
            for count, stops in enumerate(reached, 1):
                falling = np.maximum.accumulate(stops[::-1])[::-1]
                fitting = np.searchsorted(-falling, -ends, side="right")  # amounts that reach each end
                found = np.where((fitting > 0) & (ends > start), beyond[np.maximum(fitting, 1) - 1], 0.0)
                np.maximum(most[count, start], found, out=most[count, start])
    return most


def _amounts(batch: int) -> Floats:
    found = [1.0]
    while found[-1] * GROWTH < batch:
        found.append(found[-1] * GROWTH)
    return np.array([*found, float(batch)]) if batch > 1 else np.array([1.0])


def _reached(
    times: _LayerTimes, start: int, width: int, amounts: Floats, step_s: float, sums_s: Floats
) -> Iterator[Places]:
    """Yield for 1, 2, ... devices the layer up to which they get from a start, by amount."""
    busy_s, last_s = _summed(times.busy_s), _summed(times.last_s)
    ends, whole = np.arange(len(busy_s)), (amounts >= times.fewest)[:, None]
    at = np.full(len(amounts), start)
    for _ in range(width):
        place = at[:, None]
        work_s = amounts[:, None] * (busy_s - busy_s[place])
        work_s = work_s + times.optimizer_s - times.optimizer_s[place]
        # sums of [start, end) less the backward of what of it is in the stage, for the end that counts most
        left_s = np.where(ends >= place, sums_s - (last_s - last_s[place]), 0.0)
        left_s = np.maximum(np.maximum.accumulate(left_s, axis=1), times.behind_s[place])
        taken_s = work_s + np.where(whole, times.before_s[place] + left_s, 0.0)
        fits = (taken_s <= step_s) & (ends > place) & times.fits[np.minimum(place, len(ends) - 1), ends]
        at = np.where(fits.any(axis=1), len(ends) - 1 - fits[:, ::-1].argmax(axis=1), at)
        yield at
        if (at == start).all():
            return


def _layer_times(tables: ProblemTables, classes: tuple[int, ...]) -> Iterator[_LayerTimes]:
    """Yield the times for each microbatch size, without recompute and, where memory asks for it, with."""
    some, layers, batch = list(classes), np.arange(tables.num_layers), tables.problem.global_batch_size
    optimizer_s = tables.optimizer_s[some][:, layers, layers + 1].min(axis=0)
    if optimizer_s.sum() > tables.optimizer_s[some, 0, -1].min() * SLACK:  # tied layers step once
        optimizer_s = np.zeros_like(optimizer_s)
    trained = layers >= tables.prices.first_trained  # below it nothing is run again
    sizes = sorted(tables.problem.microbatch_sizes)
    above = [size for size in sizes if size > batch][:1]  # single microbatches may be as large as the batch
    for size in dict.fromkeys([*(one for one in sizes if one <= batch), *(batch for _ in above)]):
        parts = [tables.at(part) for part in range(1, size + 1)]
        forward_s = np.array([part.forward_s[:, layers, layers + 1] for part in parts])
        backward_s = np.array([part.backward_s[:, layers, layers + 1] for part in parts])
        before_s, behind_s = forward_s[-1].min(axis=0), backward_s.min(axis=(0, 1))
        for again in (0, 1):
            each_s = forward_s[:, some] * (1 + again * trained) + backward_s[:, some]
            busy_s = (each_s / np.arange(1, size + 1)[:, None, None]).min(axis=(0, 1))
            last_s = (backward_s + again * forward_s)[:, some].max(axis=(0, 1))
            fits = _fits(tables, some, size, recompute=bool(again))
            with np.errstate(divide="ignore", invalid="ignore"):
                fewest = np.nan_to_num((before_s + np.maximum(behind_s, last_s)) / busy_s, nan=0.0)
            yield _LayerTimes(
                busy_s,
                last_s,
                _summed(before_s),
                _summed(behind_s),
                _summed(optimizer_s),
                fits,
                max(float(size), float(fewest.max()) * SLACK),
            )
            if fits[tables.stages].all():
                break


def _summed(per_layer: Floats) -> Floats:
    return np.concatenate([[0.0], np.cumsum(per_layer)])


def _fits(tables: ProblemTables, classes: list[int], size: int, *, recompute: bool) -> Bools:
    """Return which layers [start, stop) memory takes on some device, or as part of more that it takes."""
    caps = [
        tables.at(part).most_in_flight(Amount.whole(1, part), recompute=recompute)[classes].max(axis=0)
        for part in range(1, size + 1)
    ]
    fits = np.max(caps, axis=0) >= 1
    fits = np.logical_or.accumulate(fits, axis=0)
    return np.asarray(np.logical_or.accumulate(fits[:, ::-1], axis=1)[:, ::-1])
