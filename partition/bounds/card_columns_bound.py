"""The largest steps that `card_columns` rules out: with cards and sums in its two cases, and without them."""

import math
import time
from collections.abc import Callable

from partition.bounds.card_bound import node_shapes
from partition.bounds.card_columns import CardColumns
from partition.estimates.stage_tables import ProblemTables

STEPS = 8  # of the search for the largest step
CLOSE = 0.006  # relative: of the step searched for


def card_columns_bound_s(
    tables: ProblemTables, known_s: tuple[float, float], high_s: float, whole_s: float, end_s: float
) -> float:
    """Return a step that no plan undercuts, high_s at the most.

    known_s: for plans of which every layer is on two nodes or more, and for the others. whole_s: for those
    others of which some pipeline is on one node alone. end_s: on the monotonic clock.
    """
    low_s, shapes = min(known_s), node_shapes(tables)
    if min(shape.s_per_byte for shape in shapes) <= 0:
        return low_s
    cases = [(known_s[0], CardColumns(tables))]
    cases += [(known_s[1], CardColumns(tables, home)) for home in range(len(shapes))]

    def rules_out(step_s: float) -> bool:
        return all(step_s <= case_s or case.rules_out(step_s, end_s) for case_s, case in cases)

    return _largest_s(low_s, min(high_s, max(known_s[1], whole_s)), rules_out, end_s)


def device_columns_bound_s(tables: ProblemTables, low_s: float, high_s: float, end_s: float) -> float:
    """Return a step that no plan of pipelines undercuts, sums and messages left out, high_s at the most.

    low_s: known. end_s: on the monotonic clock.
    """
    columns = CardColumns(tables, cards=False)
    return _largest_s(low_s, high_s, lambda step_s: columns.rules_out(step_s, end_s), end_s)


def _largest_s(low: float, high: float, rules_out: Callable[[float], bool], end_s: float) -> float:
    """Return the largest step found that is ruled out, low if none is."""
    for _ in range(STEPS):
        if high <= low * (1 + CLOSE) or time.monotonic() > end_s:
            break
        trial = math.sqrt(low * high)
        low, high = (trial, high) if rules_out(trial) else (low, trial)
    return low
