"""What is under way in a network gets shares of what it has in common, max-min fair by weights.

(Bertsekas and Gallager, Data Networks, 1992, section 6.5.2.)
"""

import heapq
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Lane:
    """Flows that use the same of each resource, so that they share it by their weights wherever they are.

    parts: of each resource, the part of its time that a flow uses while it is as fast as alone; where there
    may be several flows that is all of it. flows: a heap of (passed at its end, number, weight, what happens
    then). weight: of all flows. level: how many of its seconds alone a flow of weight 1 does in a second.
    passed: what such a flow had done at since_s (virtual time: Parekh and Gallager, IEEE/ACM Transactions on
    Networking, 1993). version: of its next end, so that one that no longer holds is known.
    """

    parts: Mapping[int, float]
    flows: list[tuple[float, int, float, Callable[[], None]]] = field(default_factory=list)
    weight: float = 0.0
    level: float = 0.0
    passed: float = 0.0
    since_s: float = 0.0
    version: int = 0

    def advance(self, now_s: float) -> None:
        """Let flows do what they do until now."""
        self.passed += self.level * (now_s - self.since_s)
        self.since_s = now_s


@dataclass(slots=True)
class FairShares:
    """Owns the flows under way.

    lanes: of messages, by the resources of their route. users: by resource, the lanes that have flows, in
    the order in which they began. ends: a heap of (seconds, number, version, lane).
    """

    lanes: dict[tuple[int, ...], Lane] = field(default_factory=dict)
    users: dict[int, dict[Lane, None]] = field(default_factory=dict)
    ends: list[tuple[float, int, int, Lane]] = field(default_factory=list)
    count: int = 0

    def lane(self, resources: tuple[int, ...]) -> Lane:
        """Return that of messages that use all of these."""
        lane = self.lanes.get(resources)
        if lane is None:
            lane = self.lanes[resources] = Lane(dict.fromkeys(resources, 1.0))
        return lane

    def start(
        self, lane: Lane, alone_s: float, weight: float, now_s: float, then: Callable[[], None]
    ) -> None:
        """Begin a flow that takes so many seconds alone; a lane of other parts than 1 takes one at a time."""
        if lane.flows:
            lane.advance(now_s)
        else:
            lane.since_s, lane.passed, lane.weight, lane.level = now_s, 0.0, 0.0, 0.0
            for resource in lane.parts:
                self.users.setdefault(resource, {})[lane] = None
        self.count += 1
        heapq.heappush(lane.flows, (lane.passed + alone_s / weight, self.count, weight, then))
        lane.weight += weight
        self._share([lane], lane, now_s)

    def next_end_s(self) -> float:
        """Return when the next flow ends, if none begins before; inf if there is none."""
        while self.ends and self.ends[0][2] != self.ends[0][3].version:
            heapq.heappop(self.ends)
        return self.ends[0][0] if self.ends else math.inf

    def end_next(self) -> Callable[[], None]:
        """End the flow that `next_end_s` speaks of, and return what happens then."""
        now_s, _, _, lane = heapq.heappop(self.ends)
        lane.passed, _, weight, then = heapq.heappop(lane.flows)
        lane.since_s = now_s
        lane.version += 1
        lane.weight -= weight
        if lane.flows:
            self._share([lane], lane, now_s)
        else:
            for resource in lane.parts:
                del self.users[resource][lane]
            self._share((other for resource in lane.parts for other in self.users[resource]), None, now_s)
        return then

    def _share(self, lanes: Iterable[Lane], changed: Lane | None, now_s: float) -> None:
        """Give levels to these lanes, and to all that share something with them, or with those that do.

        changed: the one that has other flows than before.
        """
        found = dict.fromkeys(lanes)
        waiting = list(found)
        common: dict[int, dict[Lane, None]] = {}
        for lane in waiting:  # it grows meanwhile
            for resource in lane.parts:
                users = self.users[resource]
                if len(users) > 1 and resource not in common:
                    common[resource] = users
                    fresh = [other for other in users if other not in found]
                    found.update(dict.fromkeys(fresh))
                    waiting.extend(fresh)
        for lane, level in _levels(found, common).items():
            if level != lane.level or lane is changed:
                lane.advance(now_s)
                lane.level = level
                lane.version += 1
                self.count += 1
                end_s = now_s + max(lane.flows[0][0] - lane.passed, 0.0) / level
                heapq.heappush(self.ends, (end_s, self.count, lane.version, lane))


def _levels(lanes: Iterable[Lane], common: Mapping[int, Mapping[Lane, None]]) -> dict[Lane, float]:
    """Return the levels of lanes: what some resource has for them, or all that they can.

    The least that a resource has for each weight is given out first, and so on. common: the resources of
    several lanes, and these.
    """
    if not common:
        return {lane: 1 / lane.weight for lane in lanes}
    levels: dict[Lane, float] = {}
    left = dict.fromkeys(lanes)
    free = dict.fromkeys(common, 1.0)
    loads = {key: sum([lane.weight * lane.parts[key] for lane in users]) for key, users in common.items()}
    while left:
        least, tight = math.inf, None
        for resource, load in loads.items():
            if free[resource] < least * load:
                least, tight = free[resource] / load, resource
        given = [lane for lane in left if least * lane.weight >= 1]
        alone = bool(given)
        if not alone:
            assert tight is not None
            given = [lane for lane in common[tight] if lane in left]
        touched: dict[int, None] = {}
        for lane in given:
            levels[lane] = 1 / lane.weight if alone else least
            del left[lane]
            for resource, part in lane.parts.items():
                if resource in loads:
                    free[resource] = max(free[resource] - levels[lane] * lane.weight * part, 0.0)
                    touched[resource] = None
        for resource in touched:
            loads[resource] = sum(
                [lane.weight * lane.parts[resource] for lane in common[resource] if lane in left]
            )
    return levels
