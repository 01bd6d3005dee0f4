"""The computations and messages of a plan as numbers, for the planner's clock."""

from collections import Counter
from itertools import accumulate

from hetpipe.program.costs import ProgramCosts
from hetpipe.program.instructions import Compute, Direction, Pass, Transfer
from hetpipe.program.schedules import one_f_one_b
from hetpipe.simulation.fast_kernel import NONE, SimulationArrays


def clockwork(costs: ProgramCosts) -> SimulationArrays:
    """Of a plan whose devices serve one stage each, at the begin of its step."""
    pipelines = costs.program.plan.pipelines
    places = [places[0] for places in costs.program.plan.places.values()]
    work = SimulationArrays(*([] for _ in SimulationArrays._fields))
    orders: dict[tuple[int, int], int] = {}
    for pipeline, stage in places:
        entry = pipelines[pipeline]
        order = (entry.num_microbatches, entry.in_flight(stage))
        if order not in orders:
            orders[order] = len(work.codes)
            work.codes.extend(_codes(*order))
        work.position.append(orders[order])
        work.end.append(orders[order] + 2 * entry.num_microbatches)
        work.final.append(entry.num_microbatches - 1)
        work.clock_s.append(0.0)
        work.busy_s.append(0.0)
    _add_tasks(work, costs, places)
    users = Counter(work.ways)
    for begin, end in zip(work.way_begin, work.way_end, strict=True):
        work.queues.append(any(users[resource] > 1 for resource in work.ways[begin:end]))
    return work


def _codes(num_microbatches: int, in_flight: int) -> list[int]:
    order = one_f_one_b(range(num_microbatches), in_flight)
    return [microbatch if op is Pass.FORWARD else ~microbatch for op, microbatch in order]


def _add_tasks(work: SimulationArrays, costs: ProgramCosts, places: list[tuple[int, int]]) -> None:
    """What each rank does forwards and backwards, and the messages with the results."""
    pipelines = costs.program.plan.pipelines
    ranks = {place: rank for rank, place in enumerate(places)}
    boundaries = [
        (op, pipeline, boundary)
        for pipeline, entry in enumerate(pipelines)
        for boundary in range(1, len(entry.stages))
        for op in Pass
    ]
    sizes = [pipelines[pipeline].num_microbatches for _, pipeline, _ in boundaries]
    arrivals = dict(zip(boundaries, accumulate(sizes, initial=0), strict=False))
    work.arrived_s.extend([float("inf")] * sum(sizes))
    for rank, (pipeline, stage) in enumerate(places):
        final = pipelines[pipeline].num_microbatches - 1
        for op in (Pass.FORWARD, Pass.BACKWARD):
            before, after = (stage, stage + 1) if op is Pass.FORWARD else (stage + 1, stage)
            work.full_s.append(costs.compute_s(rank, Compute(op, pipeline, stage, 0)))
            work.last_s.append(costs.compute_s(rank, Compute(op, pipeline, stage, final)))
            work.inputs.append(arrivals.get((op, pipeline, before), NONE))
            into = arrivals.get((op, pipeline, after), NONE)
            if into == NONE:
                work.sent.append(NONE)
                continue
            work.sent.append(len(work.peer))
            send = Transfer(Direction.SEND, op, pipeline, stage, 0)
            route, size = costs.route(send), costs.transfer_bytes(send)
            last_size = costs.transfer_bytes(Transfer(Direction.SEND, op, pipeline, stage, final))
            work.way_begin.append(len(work.ways))
            work.ways.extend(route.resources)
            work.way_end.append(len(work.ways))
            work.there_s.append(route.link.occupancy_s(size))
            work.last_there_s.append(route.link.occupancy_s(last_size))
            work.latency_s.append(route.link.latency_s)
            work.into.append(into)
            work.peer.append(ranks[pipeline, send.peer_stage])
