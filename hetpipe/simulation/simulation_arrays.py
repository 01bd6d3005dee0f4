"""The computations and messages of a plan as numbers, for the fast simulator."""

from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate

from cost_model.cluster import Link
from cost_model.network import Route
from hetpipe.program.costs import ProgramCosts
from hetpipe.program.instructions import Bucket, Compute, Direction, Pass, Transfer
from hetpipe.program.schedules import one_f_one_b
from hetpipe.program.sync_starts import layers_reached
from hetpipe.simulation.fast_kernel import NONE, SimulationArrays

NO_BACKWARD = 0  # in the place of in_flight
KEPT_ORDERS = 256
"""Orders of computations that are kept: the plans of a search have few."""
SimulationLists = SimulationArrays[list[int], list[float]]


def simulation_lists(costs: ProgramCosts) -> SimulationLists:
    """Return the numbers of a plan whose devices serve one stage each, at the begin of its step."""
    pipelines = costs.program.plan.pipelines
    places = [places[0] for places in costs.program.plan.places.values()]
    work = _empty()
    orders: dict[tuple[int, int], tuple[int, int]] = {}
    for index, stage in places:
        pipeline = pipelines[index]
        in_flight = pipeline.in_flight(stage) if stage >= costs.program.first_backward[index] else NO_BACKWARD
        order = (pipeline.num_microbatches, in_flight)
        if order not in orders:
            begin = len(work.computations)
            work.computations.extend(_one_f_one_b(*order))
            orders[order] = begin, len(work.computations)
        begin, end = orders[order]
        work.next_place.append(begin)
        work.end_place.append(end)
        work.last_microbatch.append(pipeline.num_microbatches - 1)
        work.clock_s.append(0.0)
        work.busy_s.append(0.0)
    _add_tasks(work, costs, places)
    _add_pauses(work, costs, places)
    work.is_shared.extend(_shared(work, costs))
    return work


def _shared(work: SimulationLists, costs: ProgramCosts) -> Iterator[bool]:
    """Give for each route whether another route, or a sum of gradients, has a resource of it."""
    users = Counter(work.resources)
    users.update(costs.summed_resources())
    for begin, end in zip(work.resources_begin, work.resources_end, strict=True):
        yield any(users[resource] > 1 for resource in work.resources[begin:end])


def _add_pauses(work: SimulationLists, costs: ProgramCosts, places: list[tuple[int, int]]) -> None:
    """Add where sums begin inside the last backward of a rank: of one that sends no gradient after it."""
    pipelines, buckets = costs.program.plan.pipelines, costs.program.buckets
    buckets_of: list[list[Bucket]] = [[] for _ in places]
    for bucket in buckets:
        for rank in bucket.ranks:
            buckets_of[rank].append(bucket)
    for rank, (index, stage) in enumerate(places):
        work.next_pause.append(len(work.pause_s))
        held, last = pipelines[index].stages[stage], pipelines[index].num_microbatches - 1
        if stage == costs.program.first_backward[index]:
            compute = Compute(Pass.BACKWARD, index, stage, last)
            inner = (layer for layer in layers_reached(held, buckets_of[rank]) if layer > held.start)
            work.pause_s.extend(costs.after_layer_s(rank, compute, layer) for layer in inner)
        work.end_pause.append(len(work.pause_s))


def _empty() -> SimulationLists:
    return SimulationArrays(*([] for _ in SimulationArrays._fields))


@lru_cache(maxsize=KEPT_ORDERS)
def _one_f_one_b(num_microbatches: int, in_flight: int) -> tuple[int, ...]:
    order = one_f_one_b(range(num_microbatches), in_flight, backward=in_flight != NO_BACKWARD)
    return tuple(microbatch if op is Pass.FORWARD else ~microbatch for op, microbatch in order)


def _add_tasks(work: SimulationLists, costs: ProgramCosts, places: list[tuple[int, int]]) -> None:
    """Add what each rank does forwards and backwards, and the routes of the results."""
    pipelines = costs.program.plan.pipelines
    ranks = {place: rank for rank, place in enumerate(places)}
    boundaries = [
        (op, index, boundary)
        for index, pipeline in enumerate(pipelines)
        for boundary in range(1, len(pipeline.stages))
        for op in Pass
        if op is Pass.FORWARD or boundary > costs.program.first_backward[index]
    ]
    counts = [pipelines[index].num_microbatches for _, index, _ in boundaries]
    slots = dict(zip(boundaries, accumulate(counts, initial=0), strict=False))
    work.arrived_s.extend([float("inf")] * sum(counts))
    computed: dict[object, tuple[float, ...]] = {}  # copies of a pipeline take as long
    sent: dict[object, tuple[float, float]] = {}
    for rank, (index, stage) in enumerate(places):
        pipeline, device = pipelines[index], costs.devices[rank]
        held, amount = pipeline.stages[stage], (pipeline.microbatch_size, pipeline.num_samples)
        key = (device.kind, device.speed, held.layers, held.recompute, amount)
        if key not in computed:
            computed[key] = _computed_s(costs, rank, index, stage)
        forward_s, last_forward_s, backward_s, last_backward_s = computed[key]
        work.compute_s.extend((forward_s, backward_s))
        work.last_compute_s.extend((last_forward_s, last_backward_s))
        for op, before, after in (
            (Pass.FORWARD, stage, stage + 1),
            (Pass.BACKWARD, stage + 1, stage),
        ):
            work.input_slot.append(slots.get((op, index, before), NONE))
            slot = slots.get((op, index, after), NONE)
            if slot == NONE:
                work.route_of.append(NONE)
                continue
            peer = stage + 1 if op is Pass.FORWARD else stage - 1
            route = costs.network.route(held.device, pipeline.stages[peer].device)
            message = (route.link, pipeline.stages[after].start, amount)
            if message not in sent:
                sent[message] = _sent_s(costs, route.link, op, index, stage)
            work.route_of.append(len(work.receiver))
            work.arrival_slot.append(slot)
            work.receiver.append(ranks[index, peer])
            _add_route(work, route, *sent[message])


def _computed_s(costs: ProgramCosts, rank: int, index: int, stage: int) -> tuple[float, ...]:
    """Return the seconds of a rank's first and last forward, and of its first and last backward."""
    microbatches = (0, costs.program.plan.pipelines[index].num_microbatches - 1)
    return tuple(
        costs.compute_s(rank, Compute(op, index, stage, microbatch))
        for op in (Pass.FORWARD, Pass.BACKWARD)
        for microbatch in microbatches
    )


def _sent_s(costs: ProgramCosts, link: Link, op: Pass, index: int, stage: int) -> tuple[float, float]:
    """Return the seconds for which the first and the last message of a stage occupy a link."""
    last = costs.program.plan.pipelines[index].num_microbatches - 1
    sends = (Transfer(Direction.SEND, op, index, stage, microbatch) for microbatch in (0, last))
    first_s, last_s = (link.occupancy_s(costs.transfer_bytes(send)) for send in sends)
    return first_s, last_s


def _add_route(work: SimulationLists, route: Route, occupied_s: float, last_occupied_s: float) -> None:
    """Add the resources and seconds of a route. Seconds: of its first and last message."""
    work.resources_begin.append(len(work.resources))
    work.resources.extend(route.resources)
    work.resources_end.append(len(work.resources))
    work.occupied_s.append(occupied_s)
    work.last_occupied_s.append(last_occupied_s)
    work.latency_s.append(route.link.latency_s)
