"""How long sums of gradients take, message by message or as measured: R7, R8 and R10 of docs/clock.md."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import add

from cost_model.collectives import Collective, node_broadcast, node_reduce
from cost_model.network import NORM_BYTES, FreeAt, Network, Route, idle, reserve

LARGE_RING = 64
"""Rings of more members are computed all members at a time (`large_rings`)."""
KEPT_RINGS = 200
"""Large rings whose routes are kept: the same few are asked for again and again, with other bytes."""
KEPT_RING = 17
"""Norms of so many devices are worked out once for all steps: the messages are the square of that."""


def all_reduce_due(
    free_at: FreeAt,
    network: Network,
    num_bytes: float,
    ready_s: Mapping[str, float],
    collective: Collective = Collective.RING,
) -> dict[str, float]:
    """Return when each device has the sum (R7), given when each was ready (both by device name).

    The sum begins when its last member is ready, and a rank sends in a round what it received in the rounds
    before. Where an all-reduce was measured, all have it that long after the ring's resources are free.
    """
    names = list(ready_s)
    if len(names) == 1:
        return dict(ready_s)
    begin = max(ready_s.values())
    start_s = dict.fromkeys(names, begin)
    if collective is Collective.TREE:
        groups = network.by_node(names)
        reduced_s = _tree_reduced_due(free_at, network, num_bytes, groups, start_s)
        return _tree_told_due(free_at, network, num_bytes, groups, reduced_s)
    if collective is Collective.HIERARCHICAL:
        return _hierarchical_due(free_at, network, num_bytes, start_s)
    routes = ring_routes(network, names)
    measured_s = measured_all_reduce_s(network, num_bytes, names)
    if measured_s is not None:
        return dict.fromkeys(names, _held(free_at, routes, begin, measured_s))
    chunk = num_bytes / len(names)
    if len(names) > LARGE_RING:
        due = _large_ring(free_at, routes, chunk, begin)
    elif apart(routes):
        due = _ring_apart(free_at, routes, chunk, begin)
    else:
        due = _ring_queued(free_at, routes, chunk, begin)
    return dict(zip(names, due, strict=True))


def norm_due(free_at: FreeAt, network: Network, ready_s: Mapping[str, float]) -> dict[str, float]:
    """Return when each device has the norm (R8), given when each was ready for it (both by device name).

    The all-reduce of all devices, a small one: on a network that is idle by then it takes as long each time.
    """
    names, begin = tuple(ready_s), max(ready_s.values())
    if len(names) < KEPT_RING:
        return all_reduce_due(free_at, network, NORM_BYTES, ready_s)
    due_s, free_s = _idle_norm(network, names)
    if any(free_at[resource] > begin for resource in free_s):
        return all_reduce_due(free_at, network, NORM_BYTES, ready_s)
    for resource, seconds in free_s.items():
        free_at[resource] = begin + seconds
    return {name: begin + seconds for name, seconds in zip(names, due_s, strict=True)}


def _idle_norm(network: Network, names: tuple[str, ...]) -> tuple[Sequence[float], dict[int, float]]:
    """Return when each device (a name) has the norm on the idle network, and until when resources are used.

    Rings that are the same but for the names of devices and resources are worked out once.
    """
    routes = ring_routes(network, names)
    places: dict[int, int] = {}
    shape: object = tuple(
        (tuple(places.setdefault(entry, len(places)) for entry in route.resources), route.link)
        for route in routes
    )
    if measured_all_reduce_s(network, NORM_BYTES, names) is not None:
        shape = names
    if shape not in network.norms:
        free_s = idle()
        due = all_reduce_due(free_s, network, NORM_BYTES, dict.fromkeys(names, 0.0))
        network.norms[shape] = tuple(due.values()), tuple(free_s[resource] for resource in places)
    due_s, free = network.norms[shape]
    return due_s, dict(zip(places, free, strict=True))


def measured_all_reduce_s(network: Network, num_bytes: float, names: Sequence[str]) -> float | None:
    """Return the seconds of an all-reduce between devices (names) as measured; None where it was not.

    Inside a node that says so, what it says. Between real devices, what was measured for as many of each of
    their kinds, else for the next larger group of these; never less than over the cluster as in the file.
    """
    if network.as_in_file is network and not network.sums_inside:
        return None
    key = (tuple(names), num_bytes)
    if key not in network.known_s:
        group = network.measured_group(names)
        network.known_s[key] = (
            network.inside_s(num_bytes, names)
            if group is None
            else max(group.sum_s(num_bytes), all_reduce_s(network.as_in_file, num_bytes, names))
        )
    return network.known_s[key]


def _hierarchical_due(
    free_at: FreeAt, network: Network, num_bytes: float, start_s: Mapping[str, float]
) -> dict[str, float]:
    """Return when each device has the sum: trees inside nodes, a ring of their first ones, trees back.

    The ring begins when the last node has its sum.
    """
    groups = network.by_node(list(start_s))
    due = _inside_due(free_at, network, num_bytes, groups, start_s, node_reduce)
    due |= all_reduce_due(free_at, network, num_bytes, {group[0]: due[group[0]] for group in groups})
    return _inside_due(free_at, network, num_bytes, groups, due, node_broadcast)


def reduce_due(
    free_at: FreeAt, network: Network, num_bytes: float, ready_s: Mapping[str, float], root: str
) -> dict[str, float]:
    """Return when a reduction by a tree is over for each device: at the root (a name) it has the sum.

    As for `all_reduce_due` it begins when its last member is ready.
    """
    groups = network.by_node(_root_first(ready_s, root))
    start_s = dict.fromkeys(ready_s, max(ready_s.values()))
    return _tree_reduced_due(free_at, network, num_bytes, groups, start_s)


def broadcast_due(
    free_at: FreeAt, network: Network, num_bytes: float, ready_s: Mapping[str, float], root: str
) -> dict[str, float]:
    """Return when each device has what the root (a name) broadcasts by a tree; see `reduce_due`."""
    groups = network.by_node(_root_first(ready_s, root))
    start_s = dict.fromkeys(ready_s, max(ready_s.values()))
    return _tree_told_due(free_at, network, num_bytes, groups, start_s)


_Groups = Sequence[Sequence[str]]
"""Devices (names) by node."""


def _tree_reduced_due(
    free_at: FreeAt, network: Network, num_bytes: float, groups: _Groups, start_s: Mapping[str, float]
) -> dict[str, float]:
    """Return when each device has given what it has to a tree, the first one has the sum."""
    due = _inside_due(free_at, network, num_bytes, groups, start_s, node_reduce)
    return messages_due(free_at, network, node_reduce(num_bytes, [[group[0] for group in groups]]), due)


def _tree_told_due(
    free_at: FreeAt, network: Network, num_bytes: float, groups: _Groups, start_s: Mapping[str, float]
) -> dict[str, float]:
    """Return when each device has what the first one sends through a tree."""
    rounds = node_broadcast(num_bytes, [[group[0] for group in groups]])
    due = messages_due(free_at, network, rounds, start_s)
    return _inside_due(free_at, network, num_bytes, groups, due, node_broadcast)


def _inside_due(
    free_at: FreeAt,
    network: Network,
    num_bytes: float,
    groups: _Groups,
    start_s: Mapping[str, float],
    rounds_of: Callable[[float, _Groups], Sequence[Sequence[tuple[str, str, float]]]],
) -> dict[str, float]:
    """Return when each device is done with a tree over its node.

    Where the node says how long its devices sum, the tree takes as long; nobody measured it alone.
    """
    told = [network.inside_s(num_bytes, group) for group in groups] if network.sums_inside else [None]
    if all(seconds is None for seconds in told):
        return messages_due(free_at, network, rounds_of(num_bytes, groups), start_s)
    others = [group for group, seconds in zip(groups, told, strict=True) if seconds is None]
    due = dict(start_s)
    if others:
        due |= messages_due(free_at, network, rounds_of(num_bytes, others), start_s)
    for group, seconds in zip(groups, told, strict=True):
        if seconds is not None:
            begin = max(start_s[name] for name in group)
            due |= dict.fromkeys(group, _held(free_at, ring_routes(network, group), begin, seconds))
    return due


def _held(free_at: FreeAt, routes: Sequence[Route], begin_s: float, seconds: float) -> float:
    """Hold all resources of some routes for so long, once they are free; return when that ends."""
    used = [resource for route in routes for resource in route.resources]
    end = max(begin_s, *(free_at[resource] for resource in used)) + seconds
    for resource in used:
        free_at[resource] = end
    return end


def _root_first(names: Iterable[str], root: str) -> list[str]:
    return [root, *(name for name in names if name != root)]


def ring_routes(network: Network, names: Sequence[str]) -> Sequence[Route]:
    """Return the routes from each member (a name) of a ring to the next; those of large rings are kept."""
    if len(names) <= LARGE_RING:
        return [network.route(*pair) for pair in zip(names, [*names[1:], names[0]], strict=True)]
    key = tuple(names)
    if key not in network.rings:
        if len(network.rings) == KEPT_RINGS:
            network.rings.clear()
        network.rings[key] = [network.route(*pair) for pair in zip(key, (*key[1:], key[0]), strict=True)]
    return network.rings[key]


def apart(routes: Sequence[Route]) -> bool:
    """Return whether no two messages of a round share a resource."""
    used = [resource for route in routes for resource in route.resources]
    return len(set(used)) == len(used)


def messages_due(
    free_at: FreeAt,
    network: Network,
    rounds: Sequence[Sequence[tuple[str, str, float]]],
    start_s: Mapping[str, float],
) -> dict[str, float]:
    """Return when each device has got its last message, one by one; a round's are sent before any arrives.

    start_s: when each device may send first.
    """
    due = dict(start_s)
    for messages in rounds:
        arrived = [
            (destination, reserve(free_at, network.route(source, destination), due[source], size))
            for source, destination, size in messages
        ]
        for name, arrival in arrived:
            due[name] = max(due[name], arrival)
    return due


def _ring_apart(free_at: FreeAt, routes: Sequence[Route], chunk: float, begin_s: float) -> list[float]:
    """Return when each rank of a ring has the sum, if no two of its messages share a resource.

    The same sums as `reserve` of each message, a round at a time: the resources of a route are then free at
    one time.
    """
    free = [max(free_at[resource] for resource in route.resources) for route in routes]
    seconds = [route.link.occupancy_s(chunk) for route in routes]
    latencies = [route.link.latency_s for route in routes]
    if max(free) <= begin_s and len({*seconds}) == len({*latencies}) == 1:  # all at one time
        free, seconds, latencies = [begin_s], seconds[:1], latencies[:1]
    due = [begin_s] * len(free)
    for _ in range(2 * (len(routes) - 1)):
        free = list(map(add, map(max, due, free), seconds))
        arrived = list(map(add, free, latencies))
        due = list(map(max, due, [arrived[-1], *arrived[:-1]]))
    if len(free) < len(routes):
        free, due = free * len(routes), due * len(routes)
    for route, end in zip(routes, free, strict=True):
        for resource in route.resources:
            free_at[resource] = end
    return due


def _ring_queued(free_at: FreeAt, routes: Sequence[Route], chunk: float, begin_s: float) -> list[float]:
    """Return when each rank of a ring has the sum, message by message.

    The same sums as `reserve` of each message; routes and seconds are asked for once, not in each round.
    """
    free = {resource: free_at[resource] for route in routes for resource in route.resources}
    sent = [(route.resources, route.link.occupancy_s(chunk)) for route in routes]
    latencies = [route.link.latency_s for route in routes]
    due = [begin_s] * len(routes)
    for _ in range(2 * (len(routes) - 1)):
        ends = []
        for (resources, seconds), end in zip(sent, due, strict=True):
            for resource in resources:
                if free[resource] > end:
                    end = free[resource]
            end += seconds
            for resource in resources:
                free[resource] = end
            ends.append(end)
        arrived = list(map(add, ends, latencies))
        due = list(map(max, due, [arrived[-1], *arrived[:-1]]))
    for resource, end in free.items():
        free_at[resource] = end
    return due


def _large_ring(free_at: FreeAt, routes: Sequence[Route], chunk: float, begin_s: float) -> list[float]:
    """Return when each rank of a ring of many has the sum, to rounding; see `ring_ends_s` for estimates."""
    from cost_model.large_rings import ring_ends_s  # NumPy, which small rings do without

    starts = [max(0.0, *(free_at[resource] - begin_s for resource in route.resources)) for route in routes]
    ends = ring_ends_s(
        [route.resources for route in routes],
        [route.link.occupancy_s(chunk) for route in routes],
        [route.link.latency_s for route in routes],
        starts,
        2 * (len(routes) - 1),
    )
    for route, end in zip(routes, ends, strict=True):
        for resource in route.resources:  # its last message is that of the later member
            free_at[resource] = begin_s + end
    arrived = [begin_s + end + route.link.latency_s for route, end in zip(routes, ends, strict=True)]
    return [arrived[-1], *arrived[:-1]]


def all_reduce_s(
    network: Network, num_bytes: float, names: Sequence[str], collective: Collective = Collective.RING
) -> float:
    """Return the seconds of an all-reduce between devices (names), alone, until the last has the sum."""
    key = (tuple(names), num_bytes, collective)
    if key not in network.alone_s:
        ready_s = dict.fromkeys(names, 0.0)
        due = all_reduce_due(idle(), network, num_bytes, ready_s, collective)
        network.alone_s[key] = max(due.values())
    return network.alone_s[key]
