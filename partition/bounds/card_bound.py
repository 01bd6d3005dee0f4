"""How little passes the network cards of the nodes: bounds of closed form beside those of pipelines.

Both give samples weights: each layer has a share of a sample's work, the shares add up to one, and a node
does no more work than its devices can, nor more than its card lets through. docs/planning.md, "The bound",
has the proofs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from cost_model.cluster import Node
from partition.bounds.sync_tables import card_s_per_byte, summed_bytes
from partition.estimates.arrays import Floats
from partition.estimates.stage_tables import ProblemTables

SAFETY = 1e-6  # relative: for rounding
STEPS = 60  # of a bisection


@dataclass(frozen=True, slots=True)
class _NodeShape:
    """Equal nodes: how many, samples' work a second, seconds a byte on the card, whether the model fits."""

    count: int
    rate: float
    s_per_byte: float
    holds_model: bool


def lone_layer_bound_s(tables: ProblemTables) -> float:
    """Return seconds that no plan undercuts in which some layer is on one node only.

    All pipelines have a stage on that node: those that are on it alone do what its devices can, the others
    pass its card.
    """
    batch, boundaries = tables.problem.global_batch_size, _gradient_bytes(tables)[1:-1]
    least = []
    for shape in _shapes(tables):
        done = shape.rate if shape.holds_model else 0.0
        if len(boundaries):
            card_s = shape.s_per_byte * float(boundaries.min())
            done += 1 / card_s if card_s > 0 else np.inf
        least.append(batch / done if done > 0 else np.inf)
    return min(least) * (1 - SAFETY)


def summed_layers_bound_s(tables: ProblemTables, low_s: float, high_s: float) -> float:
    """Return seconds, from low_s to high_s, that no plan undercuts that has every layer on two nodes or more.

    A node that holds the whole model sums all of it. The pipelines of another node come in and go out there,
    with all their samples: the fewer layers it holds and sums, the less work comes with a byte.
    """
    shapes, batch = _shapes(tables), tables.problem.global_batch_size
    done = _done(tables, shapes)
    if done(low_s) >= batch:
        return low_s
    for _ in range(STEPS):
        middle = (low_s + high_s) / 2
        low_s, high_s = (low_s, middle) if done(middle) >= batch else (middle, high_s)
    return low_s


def _done(tables: ProblemTables, shapes: Sequence[_NodeShape]) -> Callable[[float], float]:
    """Return the function from a step to the samples' work that all nodes can do in it."""
    num_layers, outputs, gradients = tables.num_layers, _boundary_bytes(tables), _gradient_bytes(tables)
    runs = tables.stages.copy()
    runs[0, -1] = False
    start, stop = np.nonzero(runs)
    summed = np.maximum(summed_bytes(tables.problem.profile), 0.0)
    share = np.concatenate([[0.0], np.cumsum(_shares(tables))])
    work, sums = share[stop] - share[start], summed[start, stop]
    # into the node, a sample: forward in front, backward behind; out of it the other way round
    each = np.minimum(outputs[start] + gradients[stop], gradients[start] + outputs[stop])
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


def _boundary_bytes(tables: ProblemTables) -> Floats:
    """Return bytes a sample that pass in front of each layer and at the end of the model, where none do."""
    outputs = [layer.output_bytes_per_sample for layer in tables.problem.profile.layers[:-1]]
    return np.array([0.0, *outputs, 0.0])


def _gradient_bytes(tables: ProblemTables) -> Floats:
    """Return `_boundary_bytes` that also come back, as gradients: none below the first trained layer."""
    back = np.arange(tables.num_layers + 1) > tables.prices.first_trained
    return np.asarray(np.where(back, _boundary_bytes(tables), 0.0))


def _layer_s(tables: ProblemTables) -> Floats:
    """Return the least seconds a sample of each layer, forward and backward, by class."""
    batch, sizes = tables.problem.global_batch_size, tables.problem.microbatch_sizes
    layers = np.arange(tables.num_layers)
    each = [
        tables.at(size).busy_s[:, layers, layers + 1] / size for size in range(1, min(batch, max(sizes)) + 1)
    ]
    return np.asarray(np.min(each, axis=0))


def _shares(tables: ProblemTables) -> Floats:
    """Return each layer's share of a sample's work: any make a bound, those of the times a good one."""
    mean = (np.array(tables.classes.counts)[:, None] / np.maximum(_layer_s(tables), 1e-300)).sum(axis=0)
    seconds = 1 / mean
    return np.asarray(seconds / seconds.sum())


def _shapes(tables: ProblemTables) -> list[_NodeShape]:
    """Return the nodes, equal ones together."""
    with np.errstate(divide="ignore"):
        rates = (_shares(tables) / _layer_s(tables)).max(axis=1)
    classes, cluster = tables.classes.class_indices(), tables.problem.cluster
    own = {name for link in cluster.links for name in link.nodes}
    alike: dict[object, list[Node]] = {}
    for node in cluster.nodes:
        held = tuple(sorted(classes[device.name] for device in node.devices))
        kinds = frozenset(device.kind for device in node.devices)
        alike.setdefault((held, kinds, node.name if node.name in own else ""), []).append(node)
    optimizer = tables.problem.profile.optimizer_bytes_per_parameter_byte
    states = tables.bytes.weights[0, -1] + tables.bytes.trained[0, -1] * (1 + optimizer)
    return [
        _NodeShape(
            len(nodes),
            float(sum(rates[classes[device.name]] for device in nodes[0].devices)),
            card_s_per_byte(cluster, tables.network, nodes[0].devices),
            sum(device.usable_bytes for device in nodes[0].devices) * (1 + SAFETY) >= states,
        )
        for nodes in alike.values()
    ]
