"""The largest steps that `card_columns` rules out: with cards and sums in its cases, and without them."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from partition.bounds.card_bound import node_shapes
from partition.bounds.card_columns import CardColumns
from partition.estimates.stage_tables import ProblemTables

STEPS = 40  # tried in all
CLOSE = 0.002  # relative: of the step searched for


@dataclass(slots=True)
class _Case:
    """Plans of which none is faster than low_s; whether all are slower than high_s is not known."""

    columns: CardColumns
    low_s: float
    high_s: float

    @property
    def closed(self) -> bool:
        return self.high_s <= self.low_s * (1 + CLOSE)

    def narrow(self, end_s: float) -> None:
        """Try a step between both."""
        trial_s = math.sqrt(self.low_s * self.high_s)
        if self.columns.rules_out(trial_s, end_s):
            self.low_s = trial_s
        else:
            self.high_s = trial_s


def card_columns_bound_s(
    tables: ProblemTables, known_s: tuple[float, float], high_s: float, whole_s: float, end_s: float
) -> float:
    """Return a step that no plan undercuts, high_s at the most.

    known_s: for plans of which every layer is on two nodes or more, and for the others. whole_s: for those
    others of which a node has all layers. end_s: on the clock of CPU seconds.
    """
    shapes = node_shapes(tables)
    if min(shape.s_per_byte for shape in shapes) <= 0:
        return min(known_s)
    homes = [home for home, shape in enumerate(shapes) if shape.passed_by_all]
    cases = [_Case(CardColumns(tables), known_s[0], high_s)]
    cases += [_Case(CardColumns(tables, home), known_s[1], high_s) for home in homes]
    cases += [
        _Case(CardColumns(tables, home, whole=True), max(known_s[1], whole_s), high_s)
        for home in homes
        if shapes[home].holds_model
    ]
    return min(high_s, _least_s(cases, end_s))


def device_columns_bound_s(tables: ProblemTables, low_s: float, high_s: float, end_s: float) -> float:
    """Return a step that no plan of pipelines undercuts, sums and messages left out, high_s at the most.

    low_s: known. end_s: on the clock of CPU seconds.
    """
    return _least_s([_Case(CardColumns(tables, cards=False), low_s, max(low_s, high_s))], end_s)


def _least_s(cases: Sequence[_Case], end_s: float) -> float:
    """Return what no plan of any case undercuts: the case of which least is known is looked at first."""
    for _ in range(STEPS):
        case = min(cases, key=lambda one: one.low_s)
        if case.closed or time.process_time() > end_s:
            break
        case.narrow(end_s)
    return min(case.low_s for case in cases)
