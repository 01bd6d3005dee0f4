"""Interleaved pipelines over a few equal devices, for few microbatches where memory or links are scarce."""

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise, product

from partition.estimates.device_classes import equal_devices
from partition.estimates.optimizer_sharding import fits
from partition.estimates.pipeline_costs import PipelineCosts
from partition.estimates.step_estimate import StepEstimate, busy_s
from partition.plan import Plan
from partition.problem import Problem

MOST_DEVICES = 8
NUM_CHUNKS = 2


def interleaved_plans(problem: Problem, costs: PipelineCosts, ceiling_s: float = math.inf) -> list[Plan]:
    """Return plans of one pipeline that visits equal devices NUM_CHUNKS times, and that memory takes.

    The bubble is that of a pipeline divided by the number of chunks, for so many more messages (Narayanan et
    al., SC 2021, section 2.2). One for each class of devices and microbatch size, in_flight as that order has
    it; least possible step first, none that cannot be below ceiling_s. None in a cluster of more than
    MOST_DEVICES.
    """
    if len(problem.cluster.devices) > MOST_DEVICES:
        return []
    num_layers = problem.profile.num_layers
    found: list[tuple[float, Plan]] = []
    for group, samples in product(equal_devices(problem.cluster).members, problem.microbatch_sizes):
        num_stages = NUM_CHUNKS * len(group)
        if len(group) < 2 or num_stages > num_layers or costs.num_microbatches(samples) < 2:
            continue
        seconds = [costs.busy_s(group[0], layer, layer + 1, samples) for layer in range(num_layers)]
        cuts = even_cuts(seconds, num_stages)
        layout = tuple((group[index % len(group)], *cut) for index, cut in enumerate(pairwise(cuts)))
        plan = costs.plan("auto", layout, samples, range(num_stages, 0, -1))
        least_s = _least_s(costs, plan)
        if least_s < ceiling_s and fits(plan, problem.profile, problem.cluster):
            found.append((least_s, plan))
    return [plan for _, plan in sorted(found, key=lambda pair: pair[0])]


def _least_s(costs: PipelineCosts, plan: Plan) -> float:
    """Return seconds below which no order gets, the optimizer not counted.

    A device computes all its chunks between the first forward and the last backward of the first chunks of
    the devices before it.
    """
    estimate = StepEstimate(costs)
    timed = estimate.timed(plan)
    ((pipeline, _),), spent_s = timed, busy_s(timed)
    hops = zip(pipeline.timing.busy_s, pipeline.timing.round_trips_s, strict=False)
    before_s = accumulate((sum(pair) for pair in hops), initial=0.0)
    first = zip(before_s, pipeline.devices[: len(spent_s)], strict=False)
    return max(ahead_s + spent_s[device.name] for ahead_s, device in first)


def even_cuts(weights: Sequence[float], count: int) -> tuple[int, ...]:
    """Return the edges of `count` runs of the weights, none empty, whose sums have the least squares.

    A dynamic programme. State: (number of runs, where they end); label: the least sum of squares, then the
    least edges; transition: one run more. The linear partition programme (Skiena, The Algorithm Design
    Manual, 2nd edition, section 8.5) with squares for the largest sum; O(count * weights^2).

    >>> even_cuts([1.0] * 7, 3)
    (0, 2, 4, 7)
    """
    sums, stop = (0.0, *accumulate(weights)), len(weights)
    rows: dict[int, tuple[float, tuple[int, ...]]] = {
        edge: (sums[edge] ** 2, (0, edge)) for edge in range(1, stop + 1)
    }
    for least in range(2, count + 1):
        rows = {
            edge: min(
                (rows[start][0] + (sums[edge] - sums[start]) ** 2, (*rows[start][1], edge))
                for start in range(least - 1, edge)
            )
            for edge in range(least, stop + 1)
        }
    return rows[stop][1]
