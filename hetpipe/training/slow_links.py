"""Links between hosts that take longer than planned, found while training.

A message is timed from the last of these: its dispatch, when its receive was posted, when the message before
it between the two ranks had come. It ends when it comes to a receiver that was waiting for it. So neither a
late sender nor a late receiver makes a link slow.
"""

import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from cost_model.units import format_bytes, format_seconds
from hetpipe.program.costs import ProgramCosts
from hetpipe.program.instructions import Direction, Transfer
from hetpipe.program.trace import Trace
from hetpipe.runtime.message_times import MessageTimes
from hetpipe.training.slow_devices import ENDED, KEPT, SLOW, SLOW_IN_MOST, WINDOW, num_last_slow

LEAST_S = 0.003
"""Messages that are late by less in the mean are not looked at: threads wake so late."""
OVER_S = 0.0015
"""Late by less a slow link is slow no more, so that one near `LEAST_S` is not told of again and again."""
MOST = 16
"""Messages from one rank to another that are timed in each step."""


@dataclass(frozen=True, slots=True)
class Edge:
    """The first messages of a step from one rank to another, on another host."""

    source: int
    destination: int
    transfers: tuple[Transfer, ...]


@dataclass(frozen=True, slots=True)
class Taken:
    """Mean seconds of the timed messages of an edge in a step, and what was planned for them."""

    step: int
    seconds: float
    planned_s: float

    @property
    def ratio(self) -> float:
        """How many times as long as planned they took."""
        return self.seconds / self.planned_s


@dataclass(frozen=True, slots=True)
class LinkSpell:
    """A change of what is known of an edge: that it is slow, or, `ended`, that it is not any more.

    since: number of the first slow step. taken_s, planned_s: of a message, medians of num_steps.
    """

    edge: int
    since: int
    taken_s: float
    planned_s: float
    num_steps: int
    ended: bool = False


@dataclass(slots=True)
class SlowLinks:
    """Watches the seconds of messages on each edge against the planned ones.

    An edge is slow that takes `SLOW` times as long as planned in the median of `WINDOW` steps, and
    `SLOW_IN_MOST` times in three of four, by more than `LEAST_S` a message and what the clocks may be off.
    """

    slow: dict[int, LinkSpell] = field(default_factory=dict)
    _seen: dict[int, deque[Taken]] = field(default_factory=dict)

    def see(self, edge: int, taken: Taken, error_s: float) -> LinkSpell | None:
        """Take what messages of an edge took in a step; return what changed.

        error_s: how far clocks may be off.
        """
        seen = self._seen.setdefault(edge, deque(maxlen=KEPT))
        seen.append(taken)
        window = list(seen)[-WINDOW:]
        if len(window) < WINDOW:
            return None
        ratios = sorted(each.ratio for each in window)
        late_s = statistics.median(each.seconds - each.planned_s for each in window) - error_s
        if edge in self.slow:
            if late_s > OVER_S and statistics.median(ratios) >= ENDED:
                return None
            return _spell(edge, window, self.slow.pop(edge).since, ended=True)
        if late_s < LEAST_S or statistics.median(ratios) < SLOW or ratios[WINDOW // 4] < SLOW_IN_MOST:
            return None
        middle = (1 + statistics.median(ratios)) / 2
        last = list(seen)[-num_last_slow([each.ratio for each in seen], middle) :]
        self.slow[edge] = _spell(edge, last, last[0].step)
        return self.slow[edge]

    def ratio(self, edge: int) -> float:
        """Return how many times as long as planned an edge takes now."""
        return statistics.median(each.ratio for each in list(self._seen[edge])[-WINDOW:])


def _spell(edge: int, steps: Sequence[Taken], since: int, *, ended: bool = False) -> LinkSpell:
    return LinkSpell(
        edge,
        since,
        statistics.median(each.seconds for each in steps),
        statistics.median(each.planned_s for each in steps),
        len(steps),
        ended,
    )


@dataclass(slots=True)
class LinkWatch:
    """What one rank notes of the messages between hosts; the rank that reports says what is slow.

    told: all sentences so far.
    """

    costs: ProgramCosts
    rank: int
    edges: tuple[Edge, ...]
    times: MessageTimes
    planned_s: Sequence[Sequence[float]] | None = None  # of each message of each edge
    found: SlowLinks = field(default_factory=SlowLinks)
    told: list[str] = field(default_factory=list)

    @classmethod
    def of(
        cls, costs: ProgramCosts, rank: int, hosts: Sequence[int], predicted: Callable[[], Trace] | None
    ) -> "LinkWatch":
        """Return a watch.

        hosts: by rank, a number that ranks on one host share. predicted: the step, for the rank that reports.
        """
        edges = edges_between(costs, hosts)
        own = [edge for edge in edges if rank in (edge.source, edge.destination)]
        watched = frozenset(transfer.message for edge in own for transfer in edge.transfers)
        made = cls(costs, rank, edges, MessageTimes(watched))
        if predicted is not None and edges:
            seconds = {(event.rank, event.instruction): event.duration_s for event in predicted().events}
            made.planned_s = [
                [max(seconds[edge.source, transfer], 1e-9) for transfer in edge.transfers] for edge in edges
            ]
        return made

    def mine(self, start_s: float) -> list[Any]:
        """Return what this rank knows of its edges, in their order, in seconds since the step's start.

        Of what it sent when; of what it received when that was posted, when it came, and whether the receiver
        had waited; None for what was not noted.
        """
        rows: list[Any] = []
        for edge in self.edges:
            messages = [transfer.message for transfer in edge.transfers]
            if edge.source == self.rank:
                moments = [self.times.sent.get(message) for message in messages]
                rows.append([None if moment is None else _since(start_s, moment) for moment in moments])
            elif edge.destination == self.rank:
                found = [self.times.arrived.get(message) for message in messages]
                rows.append(
                    [
                        None
                        if each is None
                        else (_since(start_s, each.posted_s), _since(start_s, each.came_s), each.waited)
                        for each in found
                    ]
                )
        return rows

    def events(self, step: int, rows: Sequence[Sequence[Any]], error_s: float) -> list[dict[str, Any]]:
        """Return what is to be told after a step; rows: what `mine` gave, by rank."""
        if self.planned_s is None:
            return []
        of_rank = [iter(row) for row in rows]
        changes = []
        for number, (edge, planned_s) in enumerate(zip(self.edges, self.planned_s, strict=True)):
            taken = _taken(step, next(of_rank[edge.source]), next(of_rank[edge.destination]), planned_s)
            changes.append(None if taken is None else self.found.see(number, taken, error_s))
        texts = [self._sentence(change) for change in changes if change is not None]
        self.told += texts
        return [{"event": "told", "text": text} for text in texts]

    def now(self) -> dict[str, Any]:
        """Return what the metrics of a step say: by names, how many times as long as planned a link takes."""
        slow = {self._name(edge): self.found.ratio(edge) for edge in self.found.slow}
        return {"slow_links": slow} if slow else {}

    def _name(self, edge: int) -> str:
        names = self.costs.program.device_names
        return f"{names[self.edges[edge].source]} to {names[self.edges[edge].destination]}"

    def _sentence(self, spell: LinkSpell) -> str:
        planned = format_seconds(spell.planned_s)
        times = f"{spell.taken_s / spell.planned_s:.2f} times its planned {planned}"
        if spell.ended and spell.taken_s >= ENDED * spell.planned_s:  # late by less than is looked at
            return (
                f"the link {self._name(spell.edge)} is not slow any more: {format_seconds(spell.taken_s)} a "
                f"message, planned are {planned}"
            )
        if spell.ended:
            return f"the link {self._name(spell.edge)} is as fast as planned again: {times} a message"
        size = format_bytes(self.costs.transfer_bytes(self.edges[spell.edge].transfers[0]))
        steps = f"median of {spell.num_steps} steps"
        return (
            f"the link {self._name(spell.edge)} takes {times} for a message of {size} since "
            f"step {spell.since} ({steps})"
        )


def edges_between(costs: ProgramCosts, hosts: Sequence[int]) -> tuple[Edge, ...]:
    """Return the first messages of each rank to each rank of another host; none from a GPU to a GPU.

    When a message between GPUs is sent, the host does not know.
    """
    program = costs.program
    found: dict[tuple[int, int], list[Transfer]] = {}
    for source, instructions in enumerate(program.ranks):
        for instruction in instructions:
            if isinstance(instruction, Transfer) and instruction.direction is Direction.SEND:
                destination = program.rank_of(instruction.pipeline, instruction.peer_stage)
                both_gpus = costs.devices[source].is_gpu and costs.devices[destination].is_gpu
                if hosts[source] != hosts[destination] and not both_gpus:
                    found.setdefault((source, destination), []).append(instruction)
    return tuple(Edge(*ends, tuple(transfers[:MOST])) for ends, transfers in found.items())


def _taken(
    step: int, sent: Sequence[Any], arrived: Sequence[Any], planned_s: Sequence[float]
) -> Taken | None:
    """Return the mean seconds of the messages for which a receiver waited, None if there is none."""
    known, last_s = [], float("-inf")
    for sent_s, arrival, planned in zip(sent, arrived, planned_s, strict=True):
        if sent_s is None or arrival is None:
            continue
        posted_s, came_s, waited = arrival
        if waited:
            known.append((max(came_s - max(sent_s, posted_s, last_s), 0.0), planned))
        last_s = came_s
    if not known:
        return None
    seconds, of_plan = zip(*known, strict=True)
    return Taken(step, statistics.fmean(seconds), statistics.fmean(of_plan))


def _since(start_s: float, moment_s: float) -> float:
    return round(moment_s - start_s, 6)
