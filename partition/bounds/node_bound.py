"""A bound from what nodes can do in a step: activations and sums share each node's card.

Its space: all plans whose pipelines share no device and whose states are not sharded, whatever way sums are
made, and whenever they begin behind the last backward of their layer.

The whole batch passes every layer. For prices of the layers that add up to one, and of a byte that sums move,
no nodes do the batch in a step if what all are worth together, and what sums need not move, come to less
than one (`node_values`, weak duality). Any prices make a bound; shares of the layers' work and bytes make
good ones.

Two cases are asked:

summed      every layer is on two nodes or more: each node pays for the sums of all that it holds.
spanning    some layer is on one node only, and each pipeline is on two nodes or more. The whole batch passes
            every node that has a layer for itself. Where a card takes less than two messages a sample
            for the batch, such a node is the first or the last of some pipelines, and there is one of
            either kind at the most. Others pay for their sums, and no run is the whole model.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from partition.bounds.card_bound import (
    SAFETY,
    NodeShape,
    card_bytes,
    gradient_bytes,
    node_shapes,
    work_shares,
)
from partition.bounds.node_samples import RunSums, most_samples
from partition.bounds.node_values import NodeRuns, RunTimes
from partition.bounds.sync_tables import own_bytes, ring_bytes, summed_bytes
from partition.estimates.arrays import Floats
from partition.estimates.stage_tables import ProblemTables

BYTE_SHARES = (0.5, 0.0, 1.0)  # of the bytes in a layer's price, beside its work
SUM_PRICES = (0.0, 0.1, 0.2, 0.4, 0.8, 1.2, 1.6, 2.2)  # of all cards in a step, over the batch
HOLDER_PRICES = (-0.5, -1.0, -2.0, -4.0, -8.0, -16.0)  # of what two nodes and more hold, sum prices below 0
FAR = 1.1  # worth with good prices for sums, from which on other layers' prices help no more
MOST_LONE = 2  # nodes with a layer for themselves where cards are slow
SHARES = 16  # of what sums move between the least and twice their bytes
STEPS = 10  # of the search for the largest step
CLOSE = 0.004  # relative: of the step searched for


@dataclass(frozen=True, slots=True)
class _Kind:
    """Equal nodes in a step: their runs with sums and, where they may have a layer for themselves, without.

    slow: the card takes less than two messages a sample for the batch.
    """

    shape: NodeShape
    runs: NodeRuns
    lone: NodeRuns | None = None
    slow: bool = True


@dataclass(slots=True)
class NodeBound:
    """Owns the prices; those that were good for a step are tried first for the next."""

    tables: ProblemTables
    shapes: list[NodeShape] = field(init=False)
    own: Floats = field(init=False)  # bytes that each layer sums in rings (`ring_bytes`)
    layers: list[Floats] = field(init=False)  # prices
    good: dict[bool, tuple[Floats, float]] = field(init=False)

    def __post_init__(self) -> None:
        problem = self.tables.problem
        self.shapes = node_shapes(self.tables)
        self.own = ring_bytes(problem, self.tables.network)
        own = own_bytes(problem)
        work, held = work_shares(self.tables), own / max(float(own.sum()), 1e-300)
        layers = [(1 - share) * work + share * held for share in BYTE_SHARES]
        self.layers = [each / each.sum() for each in layers if each.sum() > 0]
        self.good = dict.fromkeys((False, True), (self.layers[0], 0.0))

    def bound_s(self, summed_s: float, lone_s: float, high_s: float, whole_s: float, end_s: float) -> float:
        """Return a step that no plan undercuts, high_s at the most.

        summed_s, lone_s: known for plans of which every layer is on two nodes or more, and for the others.
        whole_s: for those others of which some pipeline is on one node alone. end_s: in CPU seconds.
        """
        low = min(summed_s, lone_s)
        high = min(high_s, max(lone_s, whole_s))
        if min(shape.s_per_byte for shape in self.shapes) <= 0:
            return low
        trial = high
        for _ in range(STEPS):
            begin_s = time.process_time()
            if high <= low * (1 + CLOSE) or begin_s > end_s:
                break
            proven = trial <= summed_s or self.rules_out(trial, spanning=False, end_s=end_s)
            proven = proven and (trial <= lone_s or self.rules_out(trial, spanning=True, end_s=end_s))
            low, high = (trial, high) if proven else (low, trial)
            trial = math.sqrt(low * high)
            if 2 * time.process_time() - begin_s > end_s:
                break
        return low

    def rules_out(self, step_s: float, *, spanning: bool, end_s: float = math.inf) -> bool:
        """Return whether some prices prove that no nodes do the batch in a step, in one of the two cases.

        end_s: on the clock of CPU seconds, from when on it gives up.
        """
        kinds = list(self._kinds(step_s * (1 + SAFETY), end_s, spanning=spanning))
        if len(kinds) < len(self.shapes):
            return False
        if spanning and not any(kind.lone for kind in kinds):
            return True
        cards_s = len(self.tables.problem.cluster.nodes) * step_s
        least = math.inf
        sum_prices = SUM_PRICES if spanning else SUM_PRICES + HOLDER_PRICES
        for turn, layers in enumerate([self.good[spanning][0], *self.layers]):
            for price in sum_prices if turn else self.good[spanning][1:]:
                worth = self._worth(kinds, layers, price / cards_s)
                if worth < 1 - SAFETY:
                    self.good[spanning] = layers, price
                    return True
                least = min(least, worth)
            if turn and least > FAR:
                break
        return False

    def _kinds(self, step_s: float, end_s: float, *, spanning: bool) -> Iterator[_Kind]:
        """Yield the nodes in a step; none has a layer for itself where its card does not take the batch."""
        batch, passing = self.tables.problem.global_batch_size, card_bytes(self.tables)
        summed = np.maximum(summed_bytes(self.tables.problem), 0.0)
        least = float(gradient_bytes(self.tables)[1:-1].min(initial=np.inf))
        for shape in self.shapes:
            if time.process_time() > end_s:
                return
            card_s = batch * shape.s_per_byte * passing
            sums_s = shape.s_per_byte * summed
            kind = _Kind(shape, self._runs(shape, card_s, step_s, sums_s, whole=not spanning))
            least_s = batch * shape.s_per_byte * least
            if spanning and shape.passed_by_all and step_s >= least_s:
                lone = self._runs(shape, card_s, step_s, 0 * sums_s, whole=False)
                kind = _Kind(shape, kind.runs, lone, step_s < 2 * least_s)
            yield kind

    def _runs(
        self, shape: NodeShape, card_s: Floats, step_s: float, sums_s: Floats, *, whole: bool
    ) -> NodeRuns:
        """Return the runs of a node; sums_s: all 0 of one that may have layers for itself."""
        own_s = shape.s_per_byte * self.own
        shares = np.linspace(float(sums_s.any()), 2.0, SHARES + 1)
        most = most_samples(
            self.tables, shape.classes, shape.width, step_s, RunSums(sums_s, own_s, shares[:-1])
        )
        most = most / self.tables.problem.global_batch_size
        return NodeRuns(most, RunTimes(card_s, sums_s, own_s, shares, step_s), whole=whole)

    def _worth(self, kinds: list[_Kind], layers: Floats, sum_price: float) -> float:
        """Return what all nodes, and sums that need not move, come to at the most.

        sum_price: of a second of sums on the card of least seconds a byte.
        """
        least_s = min(kind.shape.s_per_byte for kind in kinds)
        total, gains = 2 * sum_price * least_s * float(self.own.sum()), []
        for kind in kinds:
            shape = kind.shape
            price = sum_price * least_s / shape.s_per_byte
            value = kind.runs.value(layers, price)
            total += shape.count * value
            if kind.lone is not None:
                gain = max(0.0, kind.lone.value(layers, price) - value)
                if kind.slow:
                    gains += [gain] * min(MOST_LONE, shape.count)
                else:
                    total += shape.count * gain
        return total + sum(sorted(gains)[-MOST_LONE:])
