"""Closed forms of 1F1B: how much must be in flight for a period, and how short a step can be at best.

Stages are given by lists from first to last: busy_s is forward plus backward of one microbatch, link_s (one
less) the link time between neighbours, both ways, latency included.
"""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

TOLERANCE = 1e-9  # of a period: an in_flight that is whole but for rounding is not rounded up


def period_s(busy_s: Sequence[float], link_s: Sequence[float]) -> float:
    """Return the least time between microbatches: the busiest stage, or link in one direction.

    link_s: of one direction, without latency.

    >>> period_s([3.0, 2.0], [0.5])
    3.0
    """
    return max(*busy_s, *link_s) if link_s else max(busy_s)


def in_flight_windows(busy_s: Sequence[float], link_s: Sequence[float], period_s: float) -> tuple[int, ...]:
    """Return the in_flight of each stage with which 1F1B reaches a period, never rising along the pipeline.

    Recursion over windows from the last stage backwards; a window runs from the start of a microbatch's
    forward to the end of its backward, and leaves room for the stage's own pair in each period, which
    Little's law forgets.

    >>> in_flight_windows([3.0] * 4, [0.2] * 3, 3.0)
    (7, 5, 3, 1)
    """
    window, flights = busy_s[-1], [1]
    for busy, link in zip(reversed(busy_s[:-1]), reversed(link_s), strict=True):
        round_trip = busy + link + window
        in_flight = max(1, math.ceil(round_trip / period_s - TOLERANCE))
        window = max(round_trip, (in_flight - 1) * period_s + busy)
        flights.append(max(in_flight, flights[-1]))
    return tuple(reversed(flights))


def cap_in_flight(wanted: Sequence[int], caps: Sequence[int]) -> tuple[int, ...]:
    """Reduce in_flight to a cap per stage; a cap at a stage caps all later ones, else 1F1B deadlocks.

    >>> cap_in_flight([7, 5, 3, 1], [9, 4, 4, 4])
    (7, 4, 3, 1)
    """
    return tuple(accumulate((min(pair) for pair in zip(wanted, caps, strict=True)), min))


def within_waiting(
    in_flight: Sequence[int], waiting: Callable[[int, int], int], needed: Sequence[int]
) -> tuple[int, ...]:
    """Lower in_flight until each stage takes the gradients that wait there for the stage before.

    With one microbatch less the memory of a stage takes many gradients. So what it has beyond its need goes
    first, and stages behind it keep their steps: the round trip between neighbours passes as many
    microbatches as the first has in flight more than the second, and one. Then the stage before is lowered.

    waiting: (stage, its in_flight) -> how many more may be in flight before it. needed: in_flight that the
    pipeline's period needs.

    >>> within_waiting([9, 6, 1], lambda stage, in_flight: 3 if stage == 2 else 2, [9, 6, 1])
    (6, 4, 1)
    >>> within_waiting([9, 4, 3, 1], lambda stage, in_flight: 9 * (stage != 1 or in_flight < 4), [4, 3, 2, 1])
    (9, 3, 2, 1)
    """
    flights = list(in_flight)
    steps = [before - behind for before, behind in pairwise(needed)]
    for stage in range(len(flights) - 1, 0, -1):
        if flights[stage - 1] <= flights[stage]:
            continue
        room = waiting(stage, flights[stage])
        while flights[stage - 1] > flights[stage] + room and flights[stage] > needed[stage]:
            flights[stage] -= 1
            for later in range(stage + 1, len(flights)):
                kept = max(needed[later], flights[later - 1] - steps[later - 1])
                flights[later] = min(flights[later], kept)
            room = waiting(stage, flights[stage])
        flights[stage - 1] = min(flights[stage - 1], flights[stage] + room)
    return tuple(flights)


def spread_in_flight(wanted: Sequence[int], caps: Sequence[int], more: int) -> tuple[int, ...]:
    """Raise in_flight by up to so many as memory takes, the steps between stages kept.

    Under 1F1B the round trip between neighbours passes as many microbatches as the first has in flight more
    than the second, and one: fewer than wanted would be slower, however many there are.

    >>> spread_in_flight([4, 3, 2, 1], [9, 9, 2, 1], 3), spread_in_flight([4, 3, 2, 1], [6, 6, 5, 5], 3)
    ((7, 6, 2, 1), (6, 5, 4, 3))
    """
    least = cap_in_flight(wanted, caps)
    flights = [min(wanted[0] + more, caps[0])]
    for index, cap in enumerate(caps[1:], 1):
        step = wanted[index - 1] - wanted[index]
        flights.append(max(least[index], min(cap, flights[-1] - step)))
    return tuple(flights)


def makespan_bound_s(
    busy_s: Sequence[float],
    link_s: Sequence[float],
    num_microbatches: int,
    *,
    total_s: Sequence[float] | None = None,
    link_rest_s: Sequence[float] | None = None,
    in_flight: Sequence[int] | None = None,
) -> float:
    """Return Z, the makespan that no schedule of the pipeline undercuts, without gradient sync and optimizer.

    Z is a bound where all microbatches are equal; with a smaller last one it is too high by up to its
    missing part.

    Z = max over stages q of (A_q + num_microbatches * busy_q), A_q the busy and link times before q: the
    first forward and the last backward pass them.

    total_s: seconds of all microbatches per stage, where the last one is smaller.
    link_rest_s: seconds in which all microbatches but one pass each link in one direction: the link is a
        resource too, between the first forward and the last backward of the stage before it.
    in_flight: with it a stage also takes its round trip for every in_flight microbatches.

    >>> makespan_bound_s([3.0, 3.0], [0.5], 4), makespan_bound_s([3.0, 3.0], [0.5], 4, in_flight=[1, 1])
    (15.5, 26.0)
    """
    totals = [num_microbatches * busy for busy in busy_s] if total_s is None else total_s
    rests = [0.0] * len(link_s) if link_rest_s is None else link_rest_s
    flights = [num_microbatches] * len(busy_s) if in_flight is None else in_flight
    bound = round_trip = 0.0
    stages = list(zip(busy_s, (*link_s, 0.0), totals, (*rests, 0.0), flights, strict=True))
    for busy, link, total, rest, flight in reversed(stages):
        round_trip += busy + link
        # total / busy microbatches, the smaller last one by its share
        share = total / busy if busy else float(num_microbatches)
        bound = max(total, busy + link + max(bound, rest), share * round_trip / flight)
    return bound
