"""Flows in a network that they share: by hand, and beside each flow followed for itself."""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest

from hetpipe.simulation.fair_shares import FairShares, Lane


@dataclass(frozen=True, eq=False)
class Flow:
    """What begins at begin_s: its seconds alone, its weight, and of each resource the part that it uses."""

    begin_s: float
    alone_s: float
    weight: float
    parts: Mapping[int, float]
    message: bool = True


def message(alone_s: float, *resources: int, weight: float = 1.0, begin_s: float = 0.0) -> Flow:
    return Flow(begin_s, alone_s, weight, dict.fromkeys(resources, 1.0))


def ends_s(flows: Sequence[Flow]) -> dict[Flow, float]:
    """Return when each ends."""
    network, now_s, found = FairShares(), 0.0, dict[Flow, float]()
    waiting = sorted(flows, key=lambda flow: flow.begin_s)

    def start(flow: Flow) -> None:
        lane = network.lane(tuple(flow.parts)) if flow.message else Lane(flow.parts)
        network.start(lane, flow.alone_s, flow.weight, now_s, lambda: found.update({flow: now_s}))

    while waiting or network.next_end_s() < math.inf:
        if waiting and waiting[0].begin_s <= network.next_end_s():
            now_s = waiting[0].begin_s
            start(waiting.pop(0))
        else:
            now_s = network.next_end_s()
            network.end_next()()
    return found


def rates(flows: Sequence[Flow]) -> dict[Flow, float]:
    """Return the max-min fair rates of flows: all rise by weight until what they use is full."""
    found = dict.fromkeys(flows, 0.0)
    resources = {key for flow in flows for key in flow.parts}
    rising = list(flows)

    def free(resource: int) -> float:
        return 1 - sum(found[flow] * flow.parts.get(resource, 0.0) for flow in flows)

    while rising:
        rises = [(1 - found[flow]) / flow.weight for flow in rising]
        for resource in resources:
            if load := sum(flow.weight * flow.parts.get(resource, 0.0) for flow in rising):
                rises.append(free(resource) / load)
        for flow in rising:
            found[flow] += min(rises) * flow.weight
        full = {resource for resource in resources if free(resource) < 1e-9}
        rising = [flow for flow in rising if found[flow] < 1 - 1e-9 and not full & flow.parts.keys()]
    return found


def ends_each_for_itself_s(flows: Sequence[Flow]) -> dict[Flow, float]:
    """Return when each ends, all rates anew wherever one begins or ends."""
    left, found, now_s = {flow: flow.alone_s for flow in flows}, dict[Flow, float](), 0.0
    while left:
        under_way = [flow for flow in left if flow.begin_s <= now_s]
        rate = rates(under_way)
        begins_s = [flow.begin_s for flow in left if flow.begin_s > now_s]
        next_s = min([*begins_s, *(now_s + left[flow] / rate[flow] for flow in under_way)])
        for flow in under_way:
            left[flow] -= rate[flow] * (next_s - now_s)
            if left[flow] <= 1e-12:
                del left[flow]
                found[flow] = next_s
        now_s = next_s
    return found


def test_the_least_share_is_given_out_first():
    # three pass card 0, a third each; one of these also card 1, of which another flow has the rest
    third, both, other = message(2.0, 0), message(1.0, 0, 1), message(4.0, 1)
    found = ends_s([third, message(2.0, 0), both, other])
    # the short one ends at 3 s, when the others of card 0 have done one second of two, and that of card 1 two
    assert found == pytest.approx({both: 3.0, other: 5.0} | {flow: 5.0 for flow in found if flow is not both})


def test_shares_go_by_weight_and_none_is_faster_than_alone():
    heavy, light = message(3.0, 0, weight=3.0), message(3.0, 0)
    assert ends_s([heavy, light]) == pytest.approx({heavy: 4.0, light: 6.0})
    half = Flow(0.0, 2.0, 5.0, {0: 0.5}, message=False)  # it uses half of the card at its fastest
    light = message(2.0, 0)
    assert ends_s([half, light]) == pytest.approx({half: 2.0, light: 3.0})


def test_what_passes_other_resources_waits_for_nobody():
    first, second, apart = message(1.0, 0, 1), message(1.0, 1, 2, begin_s=0.5), message(7.0, 5, 6)
    assert ends_s([first, second, apart]) == pytest.approx({first: 1.5, second: 2.0, apart: 7.0})


@pytest.mark.parametrize("seed", range(100))
def test_every_flow_ends_as_if_it_were_followed_for_itself(seed: int):
    draw = random.Random(seed)
    routes = [draw.sample(range(6), draw.randint(0, 3)) for _ in range(draw.randint(1, 6))]
    flows = []
    for _ in range(draw.randint(2, 30)):
        begin_s, alone_s, weight = draw.uniform(0, 8), draw.uniform(0.1, 3), draw.uniform(1, 3)
        if draw.random() < 0.2:
            parts = {resource: draw.uniform(0.1, 1) for resource in draw.sample(range(6), draw.randint(1, 4))}
            flows.append(Flow(begin_s, alone_s, weight, parts, message=False))
        elif route := draw.choice(routes):
            flows.append(message(alone_s, *route, weight=weight, begin_s=begin_s))
    assert ends_s(flows) == pytest.approx(ends_each_for_itself_s(flows), rel=1e-6)
