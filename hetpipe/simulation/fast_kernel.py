"""The inner loop of the planner's clock, interpreted on lists or compiled on arrays: results are the same."""

import math
from collections.abc import Iterator
from heapq import heappop, heappush
from typing import Any, NamedTuple

NONE = -1


class SimulationArrays(NamedTuple):
    """The lists of all ranks as numbers: of each field a list, or of all of them an array.

    By rank: `codes` from `position` to `end` are its computations, a microbatch's forward or ~ of it for
    its backward; `final` is its last microbatch; `clock_s` and `busy_s` are its time and for how long it
    computed. By 2 rank for forwards and 2 rank + 1 for backwards: seconds of a full and of the last
    microbatch, where in `arrived_s` the inputs of the first microbatch are, and the message that its
    result is; or NONE. By message: the first and the end of its resources in `ways`, seconds there of a full
    and of the last microbatch, latency, where it arrives in `arrived_s`, at which rank, and whether it
    queues with others. What ends in _s are seconds, all else are whole numbers.
    """

    codes: Any
    position: Any
    end: Any
    final: Any
    clock_s: Any
    busy_s: Any
    full_s: Any
    last_s: Any
    inputs: Any
    sent: Any
    way_begin: Any
    way_end: Any
    ways: Any
    there_s: Any
    last_there_s: Any
    latency_s: Any
    into: Any
    peer: Any
    queues: Any
    arrived_s: Any


def computed(work: SimulationArrays, free_at: Any) -> Iterator[int]:
    """Runs all computations; gives each rank once it has done its own, in the order of their times.

    free_at: from when on each resource is free, which whoever asks may change meanwhile. Of equal times the
    lower rank is first. A rank is in the queue with the time from which it may send what it has made, or
    awaits a message; what only one rank ever occupies needs no queue.
    """
    codes, position, end, final = work.codes, work.position, work.end, work.final
    clock, busy, arrived_s = work.clock_s, work.busy_s, work.arrived_s
    full_s, last_s, inputs, sent = work.full_s, work.last_s, work.inputs, work.sent
    way_begin, way_end, ways = work.way_begin, work.way_end, work.ways
    there_s, last_there_s, latency_s = work.there_s, work.last_there_s, work.latency_s
    into, peer, queues = work.into, work.peer, work.queues
    num_ranks = len(final)
    awaited, made = [NONE] * num_ranks, [NONE] * num_ranks
    todo = list(range(num_ranks))
    queue = [(0.0, 0)]
    queue.pop()
    while len(todo) > 0 or len(queue) > 0:
        if len(todo) > 0:
            rank = todo.pop()
            now, send = clock[rank], NONE
        else:
            now, rank = heappop(queue)
            send = made[rank]
            if send == NONE:
                yield rank
                continue
        at, stop, last, spent = position[rank], end[rank], final[rank], busy[rank]
        microbatch = codes[at - 1]
        if microbatch < 0:
            microbatch = ~microbatch
        while True:
            if send != NONE:
                free, begin, over = now, way_begin[send], way_end[send]
                for place in range(begin, over):
                    if free_at[ways[place]] > free:
                        free = free_at[ways[place]]
                free += last_there_s[send] if microbatch == last else there_s[send]
                for place in range(begin, over):
                    free_at[ways[place]] = free
                arrival, other = into[send] + microbatch, peer[send]
                arrived_s[arrival] = free + latency_s[send]
                if awaited[other] == arrival:
                    awaited[other] = NONE
                    todo.append(other)
            if at == stop:
                made[rank] = NONE
                heappush(queue, (now, rank))
                break
            microbatch, task = codes[at], 2 * rank
            if microbatch < 0:
                microbatch, task = ~microbatch, task + 1
            starts = now
            if inputs[task] != NONE:
                due = arrived_s[inputs[task] + microbatch]
                if due == math.inf:
                    awaited[rank] = inputs[task] + microbatch
                    break
                if due > now:
                    starts = due
            now = starts + (last_s[task] if microbatch == last else full_s[task])
            spent += now - starts
            at += 1
            send = sent[task]
            if send != NONE and queues[send]:
                made[rank] = send
                heappush(queue, (now, rank))
                break
        clock[rank], busy[rank], position[rank] = now, spent, at
