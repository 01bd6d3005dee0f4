"""How little passes the network cards of the nodes: bounds of closed form beside those of pipelines.

Both give samples weights: each layer has a share of a sample's work, the shares add up to one, and a node
does no more work than its devices can, nor more than its card lets through. docs/bounds.md
has the proofs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from cost_model.cluster import Node
from partition.bounds.sync_tables import card_directions_s, device_s_per_byte, own_bytes, summed_bytes
from partition.estimates.arrays import Floats
from partition.estimates.stage_tables import ProblemTables

SAFETY = 1e-6  # relative: for rounding
STEPS = 60  # of a bisection
GRID = 400  # of bytes summed


@dataclass(frozen=True, slots=True)
class NodeShape:
    """Equal nodes: how many, samples' work a second, seconds a byte on the card, whether the model fits.

    classes: of its devices; width: how many devices it has. device_s_per_byte: for which a byte keeps all
    that leads out of a device busy, at the least. directions_s: for which it keeps the card busy, out and in.
    passed_by_all: whether all pipelines may have a stage there: it has a device for each that is forced.
    """

    count: int
    rate: float
    s_per_byte: float
    holds_model: bool
    classes: tuple[int, ...]
    width: int
    device_s_per_byte: float
    directions_s: tuple[float, float]
    passed_by_all: bool = True


def lone_layer_bound_s(tables: ProblemTables) -> float:
    """Return seconds that no plan undercuts in which some layer is on one node only.

    All pipelines have a stage on that node. Some have it at their end alone, and some at their beginning, so
    that it has all layers; or all samples pass its card one way. Infinite where each node has fewer devices
    than there are pipelines.
    """
    homes = [shape for shape in node_shapes(tables) if shape.passed_by_all]
    return min([whole_pipeline_bound_s(tables), *(one_way_s(tables, home) for home in homes)])


def one_way_s(tables: ProblemTables, shape: NodeShape) -> float:
    """Return seconds that no plan undercuts in which all samples pass such a node's card the same way.

    Every pipeline sends forward from there to another node, or every one from another node to it; backward
    goes the other way. Messages forward begin behind a first layer's forward, and behind the last of them
    come a last layer's forward and all backwards; messages backward begin behind all forwards and a backward
    of the last layer, and one of the first layer comes behind them.
    """
    outputs, gradients = output_bytes(tables)[1:-1], gradient_bytes(tables)[1:-1]
    if not len(outputs):
        return np.inf
    batch, (forward_s, backward_s) = tables.problem.global_batch_size, _least_passes_s(tables)
    num_bytes = batch * float(outputs.min()), batch * float(gradients.min())
    around_s = (
        float(forward_s[0] + forward_s[-1] + backward_s.sum()),
        float(forward_s.sum() + backward_s[-1] + backward_s[0]),
    )
    ways = [
        max(each * pace + seconds for each, pace, seconds in zip(num_bytes, paces, around_s, strict=True))
        for paces in (shape.directions_s, shape.directions_s[::-1])
    ]
    return min(ways) * (1 - SAFETY)


def whole_pipeline_bound_s(tables: ProblemTables) -> float:
    """Return seconds that no plan undercuts with a layer on a node only that has all layers.

    All pipelines have a stage there. What others have of the layers, it sums with them, and their samples
    pass its card beside these sums.
    """
    batch = tables.problem.global_batch_size
    own, shares = own_bytes(tables.problem), work_shares(tables)
    inner = gradient_bytes(tables)[1:-1]
    order = np.argsort(-shares / np.maximum(own, 1e-300), kind="stable")  # most work for a byte summed
    num_bytes, work = (np.concatenate([[0.0], np.cumsum(each[order])]) for each in (own, shares))
    least = [np.inf]
    for shape in node_shapes(tables):
        if not (shape.holds_model and shape.passed_by_all):
            continue

        def done(step_s: float, shape: NodeShape = shape) -> float:
            here = shape.rate * step_s * (1 + SAFETY)
            if not len(inner):
                return here
            if shape.s_per_byte == 0:
                return np.inf
            left = step_s * (1 + SAFETY) / shape.s_per_byte
            summed = np.linspace(0.0, min(left, num_bytes[-1]), GRID)
            with np.errstate(divide="ignore", invalid="ignore"):
                passed = np.minimum(batch, np.nan_to_num((left - summed[:-1]) / float(inner.min()), nan=0.0))
            return here + float((passed * np.interp(summed[1:], num_bytes, work)).max())

        least.append(_least_step_s(done, batch))
    return min(least) * (1 - SAFETY)


def _least_step_s(done: Callable[[float], float], batch: float) -> float:
    """Return the most seconds known in which less than the batch is done; done: rises with the seconds."""
    high_s = 1.0
    while done(high_s) < batch:
        high_s *= 2
    low_s = 0.0
    for _ in range(STEPS):
        middle = (low_s + high_s) / 2
        low_s, high_s = (low_s, middle) if done(middle) >= batch else (middle, high_s)
    return low_s


def summed_layers_bound_s(tables: ProblemTables, low_s: float, high_s: float) -> float:
    """Return seconds, from low_s to high_s, that no plan undercuts that has every layer on two nodes or more.

    A node that holds the whole model sums all of it. The pipelines of another node come in and go out there,
    with all their samples: the fewer layers it holds and sums, the less work comes with a byte.
    """
    shapes, batch = node_shapes(tables), tables.problem.global_batch_size
    done = _done(tables, shapes)
    if done(low_s) >= batch:
        return low_s
    for _ in range(STEPS):
        middle = (low_s + high_s) / 2
        low_s, high_s = (low_s, middle) if done(middle) >= batch else (middle, high_s)
    return low_s


def _done(tables: ProblemTables, shapes: Sequence[NodeShape]) -> Callable[[float], float]:
    """Return the function from a step to the samples' work that all nodes can do in it."""
    num_layers = tables.num_layers
    runs = tables.stages.copy()
    runs[0, -1] = False
    start, stop = np.nonzero(runs)
    summed = np.maximum(summed_bytes(tables.problem), 0.0)
    share = np.concatenate([[0.0], np.cumsum(work_shares(tables))])
    work, sums = share[stop] - share[start], summed[start, stop]
    each = card_bytes(tables)[start, stop]
    with np.errstate(divide="ignore"):
        work_per_byte = np.where(each > 0, work / each, np.inf)

    def done(step_s: float) -> float:
        total = 0.0
        for shape in shapes:
            most = shape.rate * step_s * (1 + SAFETY)
            left = np.inf if shape.s_per_byte == 0 else step_s * (1 + SAFETY) / shape.s_per_byte
            if not shape.holds_model or summed[0, num_layers] > left:
                spare = left - sums
                passed = work_per_byte[spare > 0] * spare[spare > 0]
                most = min(most, float(passed.max(initial=0.0)))
            total += shape.count * most
        return total

    return done


def card_bytes(tables: ProblemTables) -> Floats:
    """Return bytes a sample of layers [start, stop) that pass a card in the direction of fewer of them.

    Into the node come the forward in front and the backward behind, out of it go the others.
    """
    outputs, gradients = output_bytes(tables), gradient_bytes(tables)
    return np.minimum(outputs[:, None] + gradients, gradients[:, None] + outputs)


def output_bytes(tables: ProblemTables) -> Floats:
    """Return the least bytes a sample that pass in front of each layer, and none at the end of the model."""
    profile = tables.problem.profile
    outputs = [
        [layer.output_bytes_per_sample for layer in profile.on(kind).layers[:-1]]
        for kind in set().union(*tables.kinds)
    ]
    return np.array([0.0, *np.min(outputs, axis=0), 0.0])


def gradient_bytes(tables: ProblemTables) -> Floats:
    """Return the bytes a sample in front of each layer that also come back: none below the first trained."""
    back = np.arange(tables.num_layers + 1) > tables.prices.first_trained
    return np.asarray(np.where(back, output_bytes(tables), 0.0))


def _layer_s(tables: ProblemTables) -> Floats:
    """Return the least seconds a sample of each layer, forward and backward, by class."""
    batch, sizes = tables.problem.global_batch_size, tables.problem.microbatch_sizes
    layers = np.arange(tables.num_layers)
    each = [
        tables.at(size).busy_s[:, layers, layers + 1] / size for size in range(1, min(batch, max(sizes)) + 1)
    ]
    return np.asarray(np.min(each, axis=0))


def _least_passes_s(tables: ProblemTables) -> Floats:
    """Return the least seconds of a microbatch's forward and backward of each layer: [pass, layer]."""
    batch, sizes = tables.problem.global_batch_size, tables.problem.microbatch_sizes
    layers, found = np.arange(tables.num_layers), []
    for size in range(1, min(batch, max(sizes)) + 1):
        made = tables.at(size)
        passes_s = (made.forward_s, made.backward_s)
        found.append([each[:, layers, layers + 1].min(axis=0) for each in passes_s])
    return np.asarray(np.min(found, axis=0))


def work_shares(tables: ProblemTables) -> Floats:
    """Return each layer's share of a sample's work: any make a bound, those of the times a good one."""
    mean = (np.array(tables.classes.counts)[:, None] / np.maximum(_layer_s(tables), 1e-300)).sum(axis=0)
    seconds = 1 / mean
    return np.asarray(seconds / seconds.sum())


def _rates(tables: ProblemTables) -> Floats:
    """Return samples' work a second, by class."""
    with np.errstate(divide="ignore"):
        return np.asarray((work_shares(tables) / _layer_s(tables)).max(axis=1))


def device_shapes(tables: ProblemTables) -> list[NodeShape]:
    """Return the devices of each class as if each was a node, and had a card on which all is for nothing."""
    pairs = enumerate(zip(tables.classes.counts, _rates(tables), strict=True))
    free = (0.0, (0.0, 0.0))
    return [NodeShape(count, float(rate), 0.0, True, (index,), 1, *free) for index, (count, rate) in pairs]


def node_shapes(tables: ProblemTables) -> list[NodeShape]:
    """Return the nodes, equal ones together."""
    rates = _rates(tables)
    classes, cluster = tables.classes.class_indices(), tables.problem.cluster
    own = {name for link in cluster.links for name in link.nodes}
    alike: dict[object, list[Node]] = {}
    for node in cluster.nodes:
        held = tuple(sorted(classes[device.name] for device in node.devices))
        kinds = frozenset(device.kind for device in node.devices)
        alike.setdefault((held, kinds, node.name if node.name in own else ""), []).append(node)
    optimizer = tables.problem.profile.optimizer_bytes_per_parameter_byte
    states = tables.bytes.weights[..., 0, -1].min() + tables.bytes.trained[0, -1] * (1 + optimizer)
    return [
        NodeShape(
            len(nodes),
            float(sum(rates[classes[device.name]] for device in nodes[0].devices)),
            max(card_directions_s(cluster, tables.network, nodes[0].devices)),
            sum(device.usable_bytes for device in nodes[0].devices) * (1 + SAFETY) >= states,
            tuple(sorted({classes[device.name] for device in nodes[0].devices})),
            len(nodes[0].devices),
            device_s_per_byte(tables.problem, tables.network, nodes),
            card_directions_s(cluster, tables.network, nodes[0].devices),
            len(nodes[0].devices) >= (tables.problem.forced.num_pipelines or 1),
        )
        for nodes in alike.values()
    ]
