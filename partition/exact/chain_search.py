"""Candidate plans of one pipeline over any ordered subset of the devices, best estimates first."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

from partition.estimates.closed_forms import cap_in_flight
from partition.estimates.device_classes import ClassOrder, DeviceClasses
from partition.estimates.pipeline_costs import Layout, PipelineCosts
from partition.estimates.ranking import rank
from partition.exact.chain_dp import FOREVER_S, ChainProgramme, Root
from partition.plan import Plan
from partition.problem import Problem

AUTO = "auto"
MAX_ORDERS = 2000
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
    exhaustive: all orders of all subsets of devices were tried.
    """

    plans: tuple[Plan, ...]
    estimates_s: tuple[float, ...]
    exhaustive: bool


def search_chains(problem: Problem, *, max_labels: int | None = MAX_LABELS) -> Candidates:
    """Candidates over all microbatch sizes and a grid of periods; none where no pipeline fits.

    First with one microbatch in flight, which shows how fast an order can be at best; then, for the orders
    near the best estimate, over periods from the least conceivable one up to that estimate.
    """
    costs = PipelineCosts(problem)
    classes = DeviceClasses.of(problem.cluster.devices)
    orders, exhaustive = class_orders(classes, costs)
    programmes = [ChainProgramme(costs, classes, size) for size in problem.microbatch_sizes]
    found: Found = {}
    first = [tuple(programme.roots(orders, [FOREVER_S], 1)) for programme in programmes]
    for programme, roots in zip(programmes, first, strict=True):
        _collect(found, programme, roots)
    for programme, roots in zip(programmes, first, strict=True):
        ceiling_s = SLACK * min((estimate for estimate, _ in found.values()), default=math.inf)
        near = [root.order for root in roots if root.objective_s <= ceiling_s]
        if near:
            _collect(found, programme, programme.roots(near, _periods(programme, ceiling_s), max_labels))
    ranked = sorted(found.values(), key=lambda entry: (entry[0], rank(entry[1])))[:NUM_PLANS]
    return Candidates(tuple(plan for _, plan in ranked), tuple(value for value, _ in ranked), exhaustive)


def _collect(found: Found, programme: ChainProgramme, roots: Iterable[Root]) -> None:
    """Add the plans of roots, each with the in_flight for its own period."""
    costs, samples = programme.costs, programme.samples
    for root in roots:
        key = (samples, root.layout)
        if key in found:
            continue
        flights, caps = costs.windows(root.layout, samples), costs.caps(root.layout, samples)
        if min(flights) >= 1:
            estimate_s = costs.makespan_s(root.layout, samples, cap_in_flight(caps, caps))
            found[key] = (estimate_s, costs.plan(AUTO, root.layout, samples, flights))


def _periods(programme: ChainProgramme, step_s: float) -> list[float]:
    """A geometric grid from the period of perfect balance up to that of a step of step_s seconds."""
    classes, layers = programme.classes, range(programme.num_layers)
    whole_s = [float(table[-1, 0]) for table in programme.busy_s]
    longest_s = max(min(float(table[layer + 1, layer]) for table in programme.busy_s) for layer in layers)
    most = step_s / programme.costs.num_microbatches(programme.samples)
    if min(whole_s) <= 0 or most <= 0:
        return [most] if most > 0 else [FOREVER_S]
    together = sum(count / seconds for count, seconds in zip(classes.counts, whole_s, strict=True))
    least = min(max(longest_s, 1 / together), most)
    return [least * (most / least) ** (step / (NUM_PERIODS - 1)) for step in range(NUM_PERIODS)]


def class_orders(classes: DeviceClasses, costs: PipelineCosts) -> tuple[list[ClassOrder], bool]:
    """All orders of classes that a pipeline can have, or, beyond MAX_ORDERS, the sorted ones; and which.

    No pipeline has more stages than layers.
    """
    most = min(sum(classes.counts), costs.problem.profile.num_layers)
    orders: list[ClassOrder] = []
    level: list[ClassOrder] = [()]
    for _ in range(most):
        level = [
            (*order, entry)
            for order in level
            for entry, count in enumerate(classes.counts)
            if order.count(entry) < count
        ]
        orders += level
        if len(orders) > MAX_ORDERS:
            return _sorted_orders(classes, costs, most), False
    return orders, True


def _sorted_orders(classes: DeviceClasses, costs: PipelineCosts, most: int) -> list[ClassOrder]:
    """Subsets of the devices in orders that tend to be good, when all orders are too many.

    Sorted by memory (1F1B keeps most in flight at the front), by speed, both ways, and as in the cluster
    (neighbours share a node); as subsets all counts of each class, or if these are too many the largest
    and the fastest k devices, k growing by a quarter.
    """
    samples = costs.problem.microbatch_sizes[0]
    layers = costs.problem.profile.num_layers
    memory = [group[0].usable_bytes for group in classes.members]
    whole_s = [costs.busy_s(group[0], 0, layers, samples) for group in classes.members]
    entries = range(len(classes.members))
    by_memory, by_speed = sorted(entries, key=lambda e: -memory[e]), sorted(entries, key=whole_s.__getitem__)
    arrangements = (by_memory, by_speed, list(entries), by_memory[::-1], by_speed[::-1])
    budget = MAX_ORDERS // len(arrangements)
    if math.prod(count + 1 for count in classes.counts) <= budget:
        subsets = set(product(*(range(count + 1) for count in classes.counts)))
    else:
        subsets = {
            _first(classes.counts, ranking, size)
            for ranking in (by_memory, by_speed)
            for size in _sizes(most)
        }
    subsets = {subset for subset in subsets if 0 < sum(subset) <= most}
    orders = {
        tuple(entry for entry in arrangement for _ in range(subset[entry]))
        for arrangement in arrangements
        for subset in subsets
    }
    return sorted(orders, key=lambda order: (len(order), order))


def _first(counts: tuple[int, ...], ranking: list[int], size: int) -> tuple[int, ...]:
    """How many of each class are among the first `size` devices of a ranking of classes."""
    taken = [0] * len(counts)
    for entry in ranking:
        taken[entry] = min(counts[entry], size - sum(taken))
    return tuple(taken)


def _sizes(most: int) -> list[int]:
    sizes = [1]
    while sizes[-1] < most:
        sizes.append(min(most, max(sizes[-1] + 1, sizes[-1] * 5 // 4)))
    return sizes
