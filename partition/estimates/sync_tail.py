"""When the sums of a step are over: last backwards on their way to the first stages, and sums beside them.

A sum holds the network cards of all its nodes until it is over: sums that share a card come one after
another, and what a stage sends back while a card of its own or of its receiver's node is held waits, so that
the sums of earlier stages begin later. All pipelines are taken to end at one time without sums.

Legend, arrays by [row, pipeline]; a row is the layers between two neighbouring cuts of any of the pipelines:
    node     node of the stage that holds the row
    onward   node of the stage in front of that one, to which it sends back
    begins   whether the row is the last one of its stage
    enters   seconds from the end of the later stage's backward to the begin of the own one's: a message; 0
             where the row is of the same stage as the one behind it
    back     seconds of the stage's last backward
    ahead    of a first stage, seconds of that backward that come after the row's; 0 of other stages
    hides    of a first stage, seconds of it that the sum of the row may begin before that; 0 of others
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cost_model.collective_choice import BUCKET_BYTES, MOST_PARTS
from partition.estimates.arrays import Bools, Floats
from partition.estimates.pipeline_clock import Seconds

_WholeNumbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Copies:
    """Pipelines with the same cuts and seconds. nodes: by [copy, stage]; stops: last layers, by stage."""

    nodes: _WholeNumbers
    stops: tuple[int, ...]
    full: Seconds


@dataclass(frozen=True, slots=True)
class Tail:
    """The last backwards of some pipelines: see the legend."""

    node: _WholeNumbers
    onward: _WholeNumbers
    begins: Bools
    enters: Floats
    back: Floats
    ahead: Floats
    hides: Floats

    @classmethod
    def of(cls, groups: Sequence[Copies], cuts: Sequence[int]) -> "Tail":
        """Return the tail of pipelines. cuts: where any of their stages begins or ends, rising."""
        count = sum(len(group.nodes) for group in groups)
        shape, place = (len(cuts) - 1, count), {cut: index for index, cut in enumerate(cuts)}
        node, onward = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        begins = np.zeros(shape, bool)
        enters, back, ahead, hides = (np.zeros(shape) for _ in range(4))
        lengths, starts, left = lengths_of(cuts)[:, None], np.array(cuts[:-1])[:, None], 0
        for group in groups:
            full, columns = group.full, slice(left, left + len(group.nodes))
            left, start = columns.stop, 0
            for index, stop in enumerate(group.stops):
                rows, last = slice(place[start], place[stop]), place[stop] - 1
                node[rows, columns] = group.nodes[:, index]
                onward[rows, columns] = group.nodes[:, max(0, index - 1)]
                back[rows, columns], begins[last, columns] = full.backward_s[index], True
                if index + 1 < len(group.stops):
                    enters[last, columns] = full.link_s[index][1] + full.link_s[index][3]
                start = stop
            first = slice(0, place[group.stops[0]])
            per_layer_s = full.backward_s[0] / group.stops[0]
            ahead[first, columns] = per_layer_s * starts[first]
            hides[first, columns] = per_layer_s * lengths[first]
        return cls(node, onward, begins, enters, back, ahead, hides)

    def exposed_s(self, sums_s: Floats, num_bytes: Floats, cuts: Sequence[int], num_nodes: int) -> float:
        """Return for how long sums go on after the last backwards would have been over without them.

        sums_s, num_bytes: seconds and bytes of the sum of each row.
        """
        last = 1 / parts_of(lengths_of(cuts), num_bytes)  # of the sum, what begins behind the last backward
        early = self.ahead + self.hides * (1 - last)[:, None]
        begins_early = np.asarray(early.any(axis=1))
        several = np.asarray((self.node != self.node[:, :1]).any(axis=1))
        same_node = self.node == self.onward
        free = np.full(num_nodes, -np.inf)  # [node] when its card is
        begun = np.full(num_nodes, -np.inf)  # [node] when its last sum was ready to begin
        # when the last backward of the stage that has the row is over, and sent on; all are at 0 in the end
        done = -(self.enters.sum(axis=0) + np.where(self.begins, self.back, 0.0).sum(axis=0))
        sent, over_s, takes_s = done, 0.0, self.enters + self.back
        for row in range(len(sums_s) - 1, -1, -1):
            here, there, begins = self.node[row], self.onward[row], self.begins[row]
            done = np.where(begins, sent + takes_s[row], done)
            waits = np.maximum(
                np.where(done >= begun[here], free[here], done),
                np.where(done >= begun[there], free[there], done),
            )
            late = np.where(same_node[row], done, np.maximum(done, waits))
            sent = np.where(begins, late, sent)
            if not sums_s[row]:
                continue
            ready_s = first_s = float(done.max())
            if begins_early[row]:
                ready_s = float((done - self.ahead[row]).max())
                first_s = float((done - early[row]).max())
            held_s = float(free[here].max()) if several[row] else first_s
            end_s = max(max(first_s, held_s) + sums_s[row], ready_s + float(last[row]) * sums_s[row])
            if several[row]:
                free[here], begun[here] = end_s, first_s
            over_s = max(over_s, end_s)
        return max(over_s, float(done.max()))


def lengths_of(cuts: Sequence[int]) -> Floats:
    """Return the layers of each row."""
    return np.diff(np.array(cuts, np.float64))


def parts_of(num_layers: Floats, num_bytes: Floats) -> Floats:
    """Return into how many parts sums may be cut, by the layers and bytes of each."""
    return np.maximum(np.minimum(np.minimum(num_layers, MOST_PARTS), num_bytes // BUCKET_BYTES), 1)
