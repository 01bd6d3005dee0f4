"""Candidate plans of one pipeline over any ordered subset of a few devices, best estimates first.

Five unequal devices have 325 orders, six 1,956. On 24 clusters of up to five devices the best plan takes
0.26 % longer in the mean without these candidates, 3.0 % at most: cuts for several periods differ from those
of the search, and the simulator chooses (examples/benchmarks/planner).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from partition.estimates.device_classes import ClassOrder, DeviceClasses
from partition.estimates.pipeline_costs import Layout, PipelineCosts
from partition.estimates.ranking import rank
from partition.estimates.step_estimate import StepEstimate
from partition.estimates.timed_pipeline import TimedStage
from partition.exact.chain_dp import FOREVER_S, ChainProgramme, Root
from partition.plan import Plan
from partition.problem import Problem

AUTO = "auto"
MAX_LABELS = 2
NUM_PERIODS = 8
NUM_PLANS = 48
SLACK = 1.15  # estimates are lower bounds, within 11 % in nine of ten: keep what is this close to the best

Found = dict[tuple[int, Layout], tuple[float, Plan]]


@dataclass(frozen=True, slots=True)
class Candidates:
    """Plans in rising order of estimates_s (Z + tied sync + norm + longest optimizer step), all different.

    A plan has the in_flight for its own period; the estimate allows it all that memory does, since a short
    pipeline of few microbatches can gain from more.
    """

    plans: tuple[Plan, ...]
    estimates_s: tuple[float, ...]


def search_chains(problem: Problem) -> Candidates:
    """Return candidates over all microbatch sizes and a grid of periods; none where no pipeline fits.

    First with one microbatch in flight, which shows how fast an order can be at best; then, for the orders
    near the best estimate, over periods from the least conceivable one up to that estimate.
    """
    costs = PipelineCosts(problem)
    classes = DeviceClasses.of(problem.cluster.devices)
    orders = class_orders(classes, costs)
    programmes = [ChainProgramme(costs, classes, size) for size in problem.microbatch_sizes]
    found: Found = {}
    first = [tuple(programme.roots(orders, [FOREVER_S], 1)) for programme in programmes]
    for programme, roots in zip(programmes, first, strict=True):
        _collect(found, programme, roots)
    for programme, roots in zip(programmes, first, strict=True):
        ceiling_s = SLACK * min((estimate for estimate, _ in found.values()), default=math.inf)
        near = [root.order for root in roots if root.objective_s <= ceiling_s]
        if near:
            _collect(found, programme, programme.roots(near, _periods(programme, ceiling_s), MAX_LABELS))
    ranked = sorted(found.values(), key=lambda pair: (pair[0], rank(pair[1])))[:NUM_PLANS]
    return Candidates(tuple(plan for _, plan in ranked), tuple(value for value, _ in ranked))


def _collect(found: Found, programme: ChainProgramme, roots: Iterable[Root]) -> None:
    """Add the plans of roots, each with the in_flight for its own period."""
    costs, samples, estimate = programme.costs, programme.samples, StepEstimate(programme.costs)
    count = costs.num_microbatches(samples)
    for root in roots:
        key = (samples, root.layout)
        if key in found:
            continue
        timed = estimate.pipeline([TimedStage(*stage) for stage in root.layout], samples)
        if timed.timing.fits:
            flights = timed.timing.needed_in_flight(count)
            estimate_s = estimate.alone_s(timed, timed.timing.most_in_flight(count))
            found[key] = (estimate_s, costs.plan(AUTO, root.layout, samples, flights))


def _periods(programme: ChainProgramme, step_s: float) -> list[float]:
    """Return a geometric grid from the period of perfect balance up to that of a step of step_s seconds."""
    classes, layers = programme.classes, range(programme.num_layers)
    whole_s = [float(table[-1, 0]) for table in programme.busy_s]
    longest_s = max(min(float(table[layer + 1, layer]) for table in programme.busy_s) for layer in layers)
    most = step_s / programme.costs.num_microbatches(programme.samples)
    if min(whole_s) <= 0 or most <= 0:
        return [most] if most > 0 else [FOREVER_S]
    together = sum(count / seconds for count, seconds in zip(classes.counts, whole_s, strict=True))
    least = min(max(longest_s, 1 / together), most)
    return [least * (most / least) ** (step / (NUM_PERIODS - 1)) for step in range(NUM_PERIODS)]


def class_orders(classes: DeviceClasses, costs: PipelineCosts) -> list[ClassOrder]:
    """Return all orders of classes that a pipeline can have: it has no more stages than layers."""
    orders: list[ClassOrder] = []
    level: list[ClassOrder] = [()]
    for _ in range(min(sum(classes.counts), costs.problem.profile.num_layers)):
        level = [
            (*order, class_index)
            for order in level
            for class_index, count in enumerate(classes.counts)
            if order.count(class_index) < count
        ]
        orders += level
    return orders
