"""The most samples that devices of one node pass through a run of layers in a step.

A run is what consecutive stages of a pipeline, all on the node, hold; its pipeline comes from another node in
front of it. Whatever is not known of the pipeline is left out, so that no run of a plan does more.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from partition.estimates.amounts import Amount
from partition.estimates.arrays import Bools, Floats
from partition.estimates.layer_bytes import between
from partition.estimates.stage_tables import ALL, ProblemTables

FEW, GROWTH = 64, 1.02  # amounts of samples that are looked at: all up to the first, then ever further apart
SLACK = 1 + 1e-9  # of a step, for rounding


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """Seconds of layers on the devices of a node, in microbatches of one size.

    rows: by [what, place], of all layers in front of a place: last, the most that the backward of the last
    microbatch takes; the least of the first forward and of the last backward, first on any device, then on
    these; the optimizer step, the least, on these. each_s: the least of a sample in a stage, forward and
    backward, by [start, stop], with recompute where memory asks for it; inf where memory takes no such
    stage. fewest: samples from which on a stage's work outweighs what a stage behind it waits longer.
    options_s: the same without recompute and with it, by [recompute, start, stop]; caps: full microbatches in
    flight that memory takes of it; backs_s: the most that the backward of one takes. forward_s: the least of
    a sample's forward, by [start, stop]. after_s: the least round trip of a full one from each layer to the
    end; ends_s: of the last one, its forward up to each place, and its round trip from there.
    """

    rows: Floats
    each_s: Floats
    fewest: float
    options_s: Floats
    caps: Floats
    backs_s: Floats
    forward_s: Floats
    after_s: Floats
    ends_s: Floats

    def stage_seconds(self, samples: int, size: int) -> tuple[Floats, Floats]:
        """Return the least seconds of stages, by [start, stop]: to their last backward, their last forward.

        From a first forward to a last backward: their work, and by Little's law what the round trips of full
        microbatches take if memory takes so many at once (`stage_tables.SizeTables.most_in_flight` says where
        it may be one more). To the end of the last forward: then no more microbatches wait for their backward
        than memory takes at once; of all others the stage has done the backward.
        """
        from partition.bounds.run_kernel import stage_seconds  # loads a compiler

        times = (self.options_s, self.caps, self.backs_s, self.forward_s)
        found: tuple[Floats, Floats] = stage_seconds(times, self.after_s, samples, size)
        return found


@dataclass(frozen=True, slots=True)
class RunSums:
    """What the sums of runs take of a card: sums_s, by [start, stop], at the least, 0 where they need not be.

    own_s: of each layer, without what is tied, one way over the card. shares: how many times the own_s of a
    run its sums hold the card, rising from the least.
    """

    sums_s: Floats
    own_s: Floats
    shares: Floats


def most_samples(
    tables: ProblemTables, classes: tuple[int, ...], width: int, step_s: float, sums: RunSums
) -> Floats:
    """Return the most samples that so many devices pass through a run: [share, devices, start, stop].

    classes: that the devices of the node may have.

    A sum begins when the last backward of its layer is over on every device of the run, at the earliest:
    behind the first of the stages no others come, so that the card has all of the sums from the run's first
    layer on still to do when the last backward has passed the last layer of a stage. What its sums move is
    known for the whole run, and asked for behind its last stage. The forwards in front of a stage are those
    of the run on its devices, and those in front of the run on any, and so are the backwards behind it.
    """
    from partition.bounds.node_kernel import fill_most  # loads a compiler

    num_layers, batch = tables.num_layers, tables.problem.global_batch_size
    amounts = _amounts(batch)
    beyond = np.append(amounts[1:] - 1, batch)  # what does one amount may do all up to the next
    most = np.zeros((len(sums.shares), width + 1, num_layers + 1, num_layers + 1))
    held = _summed(sums.own_s)
    for times in _all_times(tables, classes):
        rows = np.vstack([times.rows, held])
        limits = (step_s * SLACK, times.fewest)
        fill_most(most, amounts, beyond, rows, times.each_s, sums.sums_s, sums.shares, limits)
    return np.asarray(np.maximum.accumulate(most[::-1])[::-1])


def _amounts(batch: int) -> Floats:
    found = [1.0]
    while (following := math.ceil(max(found[-1] + 1, found[-1] * GROWTH * (found[-1] > FEW)))) < batch:
        found.append(float(following))
    return np.array([*found, float(batch)]) if batch > 1 else np.array([1.0])


def _all_times(tables: ProblemTables, classes: tuple[int, ...]) -> Iterator[LayerTimes]:
    """Yield the times for each microbatch size; single microbatches may be as large as the batch."""
    batch, sizes = tables.problem.global_batch_size, sorted(tables.problem.microbatch_sizes)
    above = [batch for size in sizes if size > batch][:1]
    for size in dict.fromkeys([*(one for one in sizes if one <= batch), *above]):
        yield layer_times(tables, classes, size, range(1, size + 1))


def layer_times(
    tables: ProblemTables, classes: tuple[int, ...], size: int, lasts: Sequence[int]
) -> LayerTimes:
    """Return the times of microbatches of a size, of which the last one has any of some."""
    some, layers = list(classes), np.arange(tables.num_layers)
    optimizer_s = tables.optimizer_s[some][:, layers, layers + 1].min(axis=0)
    if optimizer_s.sum() > tables.optimizer_s[some, 0, -1].min() * SLACK:  # tied layers step once
        optimizer_s = np.zeros_like(optimizer_s)
    trained = layers >= tables.prices.first_trained  # below it nothing is run again
    parts = [*lasts, size]
    forward_s = np.array([tables.at(part).forward_s[:, layers, layers + 1] for part in parts])
    backward_s = np.array([tables.at(part).backward_s[:, layers, layers + 1] for part in parts])
    before_s, behind_s = forward_s[-1].min(axis=0), backward_s[:-1].min(axis=(0, 1))
    first_s, way_s = forward_s[-1, some].min(axis=0), backward_s[:-1, some].min(axis=(0, 1))
    plain, again = (_fits(tables, some, parts, recompute=flag) for flag in (False, True))
    count = np.array(parts)[:, None, None]
    busy_s, again_s = (
        ((forward_s[:, some] * (1 + flag * trained) + backward_s[:, some]) / count).min(axis=(0, 1))
        for flag in (0, 1)
    )
    options_s = np.array(
        [np.where(fits, between(each), np.inf) for fits, each in ((plain, busy_s), (again, again_s))]
    )
    each_s = np.where(plain, options_s[0], options_s[1])
    caps = np.array([tables.at(size).caps(recompute=flag)[some].max(axis=0) for flag in (False, True)])
    caps = np.where(tables.without_backward, ALL, caps)
    pass_s = np.append(forward_s[-1].min(axis=0) + backward_s[-1].min(axis=0), 0.0)
    last_s = (backward_s + (not plain[tables.stages].all()) * forward_s)[:-1, some].max(axis=(0, 1))
    with np.errstate(divide="ignore", invalid="ignore"):
        fewest = np.nan_to_num((first_s + np.maximum(way_s, last_s)) / busy_s, nan=0.0)
    rows = (last_s, before_s, behind_s, first_s, way_s, optimizer_s)
    most = max(float(size), float(fewest.max()) * SLACK)
    after_s = np.cumsum(pass_s[::-1])[::-1]
    made = np.array([_summed(row) for row in rows])
    backs_s = np.array(
        [
            between((backward_s[:, some] + flag * trained * forward_s[:, some]).max(axis=(0, 1)))
            for flag in (0, 1)
        ]
    )
    least_s = between((forward_s[:, some] / count).min(axis=(0, 1)))
    last_s = forward_s[:-1].min(axis=(0, 1)) + behind_s
    ends_s = np.array([_summed(forward_s[:-1, some].min(axis=(0, 1))), np.cumsum([0.0, *last_s[::-1]])[::-1]])
    return LayerTimes(made, each_s, most, options_s, caps, backs_s, least_s, after_s, ends_s)


def _summed(per_layer: Floats) -> Floats:
    return np.concatenate([[0.0], np.cumsum(per_layer)])


def _fits(tables: ProblemTables, classes: list[int], parts: Sequence[int], *, recompute: bool) -> Bools:
    """Return which layers [start, stop) memory takes on some device, or as part of more that it takes."""
    caps = [
        tables.at(part).most_in_flight(Amount.whole(1, part), recompute=recompute)[classes].max(axis=0)
        for part in parts
    ]
    fits = np.max(caps, axis=0) >= 1
    fits = np.logical_or.accumulate(fits, axis=0)
    return np.asarray(np.logical_or.accumulate(fits[:, ::-1], axis=1)[:, ::-1])
