"""How long a step of a plan takes, without its instruction lists: for the planner, which asks it of many.

Of plans whose devices serve one stage each. The rules are those of `simulator`, and so are the results, to
the last bit.
"""

import math
from collections import Counter
from dataclasses import dataclass
from functools import cache
from heapq import heappop, heappush

from cost_model.communication import idle
from hetpipe.costs import ProgramCosts
from hetpipe.instructions import Compute, Direction, Pass, Transfer
from hetpipe.schedules import one_f_one_b
from partition.plan import Plan

_NEVER = math.inf
_Send = tuple[tuple[int, ...], float, float, float, list[float], int]
"""Resources, seconds there of a full and of the last microbatch, latency, arrivals at the peer, the peer."""
_Task = tuple[list[float] | None, float, float, _Send | None]
"""Arrivals that it waits for, seconds of a full and of the last microbatch, what it sends."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of a step, and for which each rank computes in it."""

    step_s: float
    busy_s: tuple[float, ...]

    @property
    def bubble(self) -> float:
        """Idle share of the step over all devices, in [0, 1]."""
        return 1 - sum(self.busy_s) / (len(self.busy_s) * self.step_s) if self.step_s else 0.0


def has_clock(plan: Plan) -> bool:
    """Whether `step_times` knows the rules of a plan: each device serves one stage and has its own states."""
    return not plan.zero and all(len(places) == 1 for places in plan.places.values())


def step_times(costs: ProgramCosts) -> StepTimes:
    """What `simulate` would find for the program of these costs; its lists need not be there."""
    return _StepClock(costs).run()


class _StepClock:
    """Owns the virtual clock of one step; see `hetpipe.simulator` for the rules.

    The computations of a rank are numbers: a microbatch's forward, or ~ of it for its backward.
    """

    def __init__(self, costs: ProgramCosts) -> None:
        self._costs, plan = costs, costs.program.plan
        pipelines = plan.pipelines
        places = [places[0] for places in plan.places.values()]
        ranks = {place: rank for rank, place in enumerate(places)}
        self._final = [pipelines[pipeline].num_microbatches - 1 for pipeline, _ in places]
        codes = cache(_codes)
        self._codes = [codes(pipelines[p].num_microbatches, pipelines[p].in_flight(s)) for p, s in places]
        arrivals = {
            (op, pipeline, boundary): [_NEVER] * entry.num_microbatches
            for pipeline, entry in enumerate(pipelines)
            for boundary in range(1, len(entry.stages))
            for op in Pass
        }

        def task(op: Pass, rank: int) -> _Task:
            pipeline, stage = places[rank]
            forward, final = op is Pass.FORWARD, self._final[rank]
            full, last = (costs.compute_s(rank, Compute(op, pipeline, stage, at)) for at in (0, final))
            waits = arrivals.get((op, pipeline, stage if forward else stage + 1))
            peer_stage, boundary = (stage + 1, stage + 1) if forward else (stage - 1, stage)
            into = arrivals.get((op, pipeline, boundary))
            if into is None:
                return waits, full, last, None
            send = Transfer(Direction.SEND, op, pipeline, stage, 0)
            link = costs.route(send).link
            there, last_there = (
                link.occupancy_s(costs.transfer_bytes(Transfer(Direction.SEND, op, pipeline, stage, at)))
                for at in (0, final)
            )
            resources, peer = costs.route(send).resources, ranks[pipeline, peer_stage]
            return waits, full, last, (resources, there, last_there, link.latency_s, into, peer)

        self._ahead = [task(Pass.FORWARD, rank) for rank in range(len(places))]
        self._behind = [task(Pass.BACKWARD, rank) for rank in range(len(places))]
        self._free_at = idle()
        self._clock, self._busy, self._at = [0.0] * len(places), [0.0] * len(places), [0] * len(places)
        self._awaited: list[list[float] | None] = [None] * len(places)
        self._wanted = [0] * len(places)
        self._buckets_of: list[list[int]] = [[] for _ in places]
        for index, bucket in enumerate(costs.program.buckets):
            for rank in bucket.ranks:
                self._buckets_of[rank].append(index)
        self._ready: list[dict[int, float]] = [{} for _ in costs.program.buckets]
        self._summed: list[dict[int, float]] = [{} for _ in costs.program.buckets]

    def run(self) -> StepTimes:
        clock, busy = self._computed()
        ready = {
            rank: max([now, *(self._summed[index][rank] for index in self._buckets_of[rank])])
            for rank, now in enumerate(clock)
        }
        due = self._costs.norm_due(self._free_at, ready)
        ends = []
        for rank in ready:
            start = ready[rank] + (due[rank] - ready[rank])
            ends.append(start + self._costs.step_s(rank))
            busy[rank] += ends[-1] - start
        return StepTimes(max(ends), tuple(busy))

    def _computed(self) -> tuple[list[float], list[float]]:
        """When each rank has done its list but NORM and STEP, and for how long it was busy.

        A rank is in the queue with the time from which it may send what it has made, or awaits a message.
        What only one rank ever occupies needs no queue.
        """
        free_at, final, all_codes, awaited = self._free_at, self._final, self._codes, self._awaited
        ahead, behind, clock, busy, position = self._ahead, self._behind, self._clock, self._busy, self._at
        alone = self._alone()
        made: list[_Send | None] = [None] * len(final)
        todo, queue = list(range(len(final))), list[tuple[float, int]]()
        while todo or queue:
            if todo:
                rank = todo.pop()
                now, send = clock[rank], None
            else:
                now, rank = heappop(queue)
                send = made[rank]
                if send is None:
                    self._sync(rank, now)
                    continue
            codes, at, last, spent = all_codes[rank], position[rank], final[rank], busy[rank]
            end = len(codes)
            microbatch = codes[at - 1]
            if microbatch < 0:
                microbatch = ~microbatch
            while True:
                if send is not None:
                    resources, full_s, last_s, latency_s, into, peer = send
                    free = now
                    for resource in resources:
                        if free_at[resource] > free:
                            free = free_at[resource]
                    free += last_s if microbatch == last else full_s
                    for resource in resources:
                        free_at[resource] = free
                    into[microbatch] = free + latency_s
                    if awaited[peer] is into and self._wanted[peer] == microbatch:
                        awaited[peer] = None
                        todo.append(peer)
                if at == end:
                    made[rank] = None
                    heappush(queue, (now, rank))
                    break
                microbatch = codes[at]
                if microbatch >= 0:
                    inputs, full_s, last_s, send = ahead[rank]
                else:
                    inputs, full_s, last_s, send = behind[rank]
                    microbatch = ~microbatch
                begin = now
                if inputs is not None:
                    due = inputs[microbatch]
                    if due == _NEVER:
                        awaited[rank], self._wanted[rank] = inputs, microbatch
                        break
                    if due > now:
                        begin = due
                now = begin + (last_s if microbatch == last else full_s)
                spent += now - begin
                at += 1
                if send is not None and send[0] not in alone:
                    made[rank] = send
                    heappush(queue, (now, rank))
                    break
            clock[rank], busy[rank], position[rank] = now, spent, at
        assert all(map(int.__eq__, position, map(len, all_codes))), "1F1B does not deadlock"
        return clock, busy

    def _alone(self) -> set[tuple[int, ...]]:
        """The ways whose resources no other messages take: their order among others is all one."""
        sends = [task[3] for task in (*self._ahead, *self._behind)]
        ways = [send[0] for send in sends if send is not None]
        users = Counter(resource for way in ways for resource in way)
        return {way for way in ways if all(users[resource] == 1 for resource in way)}

    def _sync(self, rank: int, now: float) -> None:
        """The SYNCs of a rank, all after its last backward; the last owner's starts the sum."""
        for index in self._buckets_of[rank]:
            ready = self._ready[index]
            ready[rank] = now
            if len(ready) == len(self._costs.program.buckets[index].ranks):
                self._summed[index] = self._costs.sync_due(self._free_at, index, ready)


def _codes(num_microbatches: int, in_flight: int) -> list[int]:
    order = one_f_one_b(range(num_microbatches), in_flight)
    return [microbatch if op is Pass.FORWARD else ~microbatch for op, microbatch in order]
