"""How long a step of a plan takes, without its instruction lists: for the planner, which asks it of many.

Of plans whose devices serve one stage each. The rules are those of `simulator`, and so are the results, to
the last bit.
"""

import math
from dataclasses import dataclass
from functools import cache
from heapq import heappop, heappush, heappushpop

from cost_model.communication import NORM_BYTES, all_reduce_due, idle
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
    """What `simulate` would find for the program of these costs, whose instruction lists need not be there."""
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
        self._names = costs.device_names
        self._buckets_of: list[list[int]] = [[] for _ in places]
        for index, bucket in enumerate(costs.program.buckets):
            for rank in bucket.ranks:
                self._buckets_of[rank].append(index)
        self._ready: list[dict[str, float]] = [{} for _ in costs.program.buckets]
        self._summed: list[dict[str, float]] = [{} for _ in costs.program.buckets]

    def run(self) -> StepTimes:
        clock, busy = self._computed()
        ready = {
            name: max([clock[rank], *(self._summed[index][name] for index in self._buckets_of[rank])])
            for rank, name in enumerate(self._names)
        }
        due = all_reduce_due(self._free_at, self._costs.network, NORM_BYTES, ready)
        ends = []
        for rank, name in enumerate(self._names):
            start = ready[name] + (due[name] - ready[name])
            ends.append(start + self._costs.step_s(rank))
            busy[rank] += ends[-1] - start
        return StepTimes(max(ends), tuple(busy))

    def _computed(self) -> tuple[list[float], list[float]]:
        """When each rank has done its list but NORM and STEP, and for how long it was busy.

        A rank is in the queue with the time from which it may send what it has made, or awaits a message.
        """
        free_at, final, count = self._free_at, self._final, len(self._final)
        clock, busy, position = [0.0] * count, [0.0] * count, [0] * count
        made: list[_Send | None] = [None] * count
        awaited: list[tuple[list[float], int] | None] = [None] * count
        queue = [(0.0, rank) for rank in range(count)]  # sorted, so a heap
        while queue:
            now, rank = heappop(queue)
            while True:
                codes, at, send, last = self._codes[rank], position[rank], made[rank], final[rank]
                if send is not None:
                    resources, full_s, last_s, latency_s, into, peer = send
                    code = codes[at - 1]
                    microbatch = code if code >= 0 else ~code
                    end = now
                    for resource in resources:
                        if free_at[resource] > end:
                            end = free_at[resource]
                    end += last_s if microbatch == last else full_s
                    for resource in resources:
                        free_at[resource] = end
                    into[microbatch] = end + latency_s
                    waits = awaited[peer]
                    if waits is not None and waits[0] is into and waits[1] == microbatch:
                        awaited[peer] = None
                        heappush(queue, (clock[peer], peer))
                elif at == len(codes):
                    self._sync(rank, now)
                    break
                # computes until there is something to send; nobody else is touched by that
                send, spent, ahead, behind = None, busy[rank], self._ahead[rank], self._behind[rank]
                while send is None and at < len(codes):
                    code = codes[at]
                    inputs, full_s, last_s, send = ahead if code >= 0 else behind
                    microbatch = code if code >= 0 else ~code
                    begin = now
                    if inputs is not None:
                        due = inputs[microbatch]
                        if due == _NEVER:
                            awaited[rank], send = (inputs, microbatch), None
                            break
                        begin = due if due > now else now
                    now = begin + (last_s if microbatch == last else full_s)
                    spent += now - begin
                    at += 1
                clock[rank], busy[rank], position[rank], made[rank] = now, spent, at, send
                if awaited[rank] is not None:
                    break
                now, rank = heappushpop(queue, (now, rank))
        assert all(map(int.__eq__, position, map(len, self._codes))), "1F1B does not deadlock"
        return clock, busy

    def _sync(self, rank: int, now: float) -> None:
        """The SYNCs of a rank, all after its last backward; the last owner's starts the sum."""
        costs, names = self._costs, self._names
        for index in self._buckets_of[rank]:
            bucket, ready = costs.program.buckets[index], self._ready[index]
            ready[names[rank]] = now
            if len(ready) == len(bucket.ranks):
                in_order = {names[member]: ready[names[member]] for member in bucket.ranks}
                self._summed[index] = all_reduce_due(
                    self._free_at, costs.network, costs.sync_bytes(index), in_order, bucket.collective
                )


def _codes(num_microbatches: int, in_flight: int) -> list[int]:
    order = one_f_one_b(range(num_microbatches), in_flight)
    return [microbatch if op is Pass.FORWARD else ~microbatch for op, microbatch in order]
