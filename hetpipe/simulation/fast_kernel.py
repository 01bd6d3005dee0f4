"""The inner loop of the fast simulator, interpreted on lists or compiled on arrays: results are the same."""

import math
from collections.abc import Iterator
from heapq import heappop, heappush
from typing import Generic, NamedTuple, Protocol, TypeVar

from cost_model.network import FreeAt

NONE = -1


class WholeNumbers(Protocol):
    """A list or an array of whole numbers."""

    def __getitem__(self, place: int, /) -> int: ...
    def __setitem__(self, place: int, number: int, /) -> None: ...
    def __len__(self) -> int: ...


class Seconds(Protocol):
    """A list or an array of seconds."""

    def __getitem__(self, place: int, /) -> float: ...
    def __setitem__(self, place: int, seconds: float, /) -> None: ...
    def __len__(self) -> int: ...


N = TypeVar("N", bound=WholeNumbers, covariant=True)
S = TypeVar("S", bound=Seconds, covariant=True)


class SimulationArrays(NamedTuple, Generic[N, S]):
    """The computations and messages of all ranks as numbers: lists of them, or arrays.

    A task is all forwards of a rank (2 rank) or all its backwards (2 rank + 1); a route is the way of all
    messages from one task to the same task of the next stage. NONE stands for no route and no slot. Seconds
    end in _s, all else are whole numbers. It stands beside the loop since a change of either makes the kept
    machine code old.
    """

    next_pause: N  # [rank] in pause_s, of what begins next inside the rank's last computation
    end_pause: N  # [rank] in pause_s, behind the rank's last
    pause_s: S  # [place] how long before the end of the rank's last computation sums begin
    computations: N  # [place] a microbatch for its forward, ~ of it for its backward; orders one by one
    next_place: N  # [rank] in computations, of what the rank does next; ranks of equal order share one
    end_place: N  # [rank] in computations, behind the rank's last
    last_microbatch: N  # [rank]
    clock_s: S  # [rank]
    busy_s: S  # [rank] for how long it has computed
    compute_s: S  # [task] of a full microbatch
    last_compute_s: S  # [task] of the last microbatch, which may be smaller
    input_slot: N  # [task] in arrived_s, of its first microbatch's input
    route_of: N  # [task] over which its results go
    resources_begin: N  # [route] in resources
    resources_end: N  # [route] in resources
    resources: N  # [place] numbers of what a message occupies, routes one by one
    occupied_s: S  # [route] of the message of a full microbatch
    last_occupied_s: S  # [route] of the message of the last microbatch
    latency_s: S  # [route]
    arrival_slot: N  # [route] in arrived_s, of its first microbatch's message
    receiver: N  # [route] a rank
    is_shared: N  # [route] whether another route, or a sum of gradients, has a resource of it
    arrived_s: S  # [slot] when a message is at its receiver, inf before it is sent; a slot per microbatch


def ranks_as_they_finish(work: SimulationArrays[N, S], free_at: FreeAt) -> Iterator[int]:
    """Run all computations (R1 to R6 of docs/clock.md); yield each rank once it has done its own.

    A rank with pauses, whose last computation sends nothing, is yielded at each of them before that (R7).

    free_at: from when on each resource is free, which the caller may change between two ranks. Of equal times
    the lower rank is first (R5). A rank is in the queue with the time from which it may send what it has
    made, or awaits a message; a route that shares nothing needs no queue.
    """
    computations, next_place, end_place = work.computations, work.next_place, work.end_place
    last_microbatch, clock_s, busy_s, arrived_s = (
        work.last_microbatch,
        work.clock_s,
        work.busy_s,
        work.arrived_s,
    )
    compute_s, last_compute_s = work.compute_s, work.last_compute_s
    input_slot, route_of, is_shared = work.input_slot, work.route_of, work.is_shared
    resources_begin, resources_end, resources = work.resources_begin, work.resources_end, work.resources
    occupied_s, last_occupied_s, latency_s = work.occupied_s, work.last_occupied_s, work.latency_s
    arrival_slot, receiver = work.arrival_slot, work.receiver
    next_pause, end_pause, pause_s = work.next_pause, work.end_pause, work.pause_s
    num_ranks = len(last_microbatch)
    awaited, made = (
        [NONE] * num_ranks,
        [NONE] * num_ranks,
    )  # [rank] the slot it waits for; the route to send on
    todo = list(range(num_ranks))
    queue = [(0.0, 0)]
    queue.pop()
    while len(todo) > 0 or len(queue) > 0:
        if len(todo) > 0:
            rank = todo.pop()
            now, send = clock_s[rank], NONE
        else:
            now, rank = heappop(queue)
            send = made[rank]
            if send == NONE:
                yield rank
                if next_pause[rank] < end_pause[rank]:
                    pause = next_pause[rank] + 1
                    next_pause[rank] = pause
                    now = clock_s[rank]
                    heappush(queue, (now - pause_s[pause] if pause < end_pause[rank] else now, rank))
                continue
        at, stop, last, spent = next_place[rank], end_place[rank], last_microbatch[rank], busy_s[rank]
        microbatch = computations[at - 1]
        if microbatch < 0:
            microbatch = ~microbatch
        while True:
            if send != NONE:
                free, begin, over = now, resources_begin[send], resources_end[send]
                for place in range(begin, over):  # R2: all resources of the route at once
                    if free_at[resources[place]] > free:
                        free = free_at[resources[place]]
                free += last_occupied_s[send] if microbatch == last else occupied_s[send]
                for place in range(begin, over):
                    free_at[resources[place]] = free
                arrival, other = arrival_slot[send] + microbatch, receiver[send]
                arrived_s[arrival] = free + latency_s[send]  # R3
                if awaited[other] == arrival:
                    awaited[other] = NONE
                    todo.append(other)
            if at == stop:
                made[rank] = NONE
                pause = next_pause[rank]
                heappush(queue, (now - pause_s[pause] if pause < end_pause[rank] else now, rank))
                break
            microbatch, task = computations[at], 2 * rank
            if microbatch < 0:
                microbatch, task = ~microbatch, task + 1
            starts = now
            if input_slot[task] != NONE:
                due = arrived_s[input_slot[task] + microbatch]
                if due == math.inf:
                    awaited[rank] = input_slot[task] + microbatch
                    break
                if due > now:  # R1
                    starts = due
            now = starts + (last_compute_s[task] if microbatch == last else compute_s[task])
            spent += now - starts
            at += 1
            send = route_of[task]
            if send != NONE and is_shared[send]:
                made[rank] = send
                heappush(queue, (now, rank))
                break
        clock_s[rank], busy_s[rank], next_place[rank] = now, spent, at
