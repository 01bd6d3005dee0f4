"""How the gradients of each run of layers are summed: over whom, and in which way."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from rich.table import Table

from cost_model.collectives import Collective
from cost_model.profile import ModelProfile
from cost_model.units import format_bytes
from hetpipe.program.costs import ProgramCosts
from hetpipe.program.instructions import Bucket
from hetpipe.reporting.tables import describe_layers, new_table

MOST_NAMES = 4
"""Devices that are named; of more their number is said."""

_WAYS = {
    Collective.RING: "ring all-reduce",
    Collective.TREE: "reduced to {root}, broadcast from it (parameter server)",
    Collective.HIERARCHICAL: "inside nodes, then between them",
}


@dataclass(frozen=True, slots=True)
class Summed:
    """Gradients that the same devices sum in the same way.

    layers: rising. tied: only what the first of them shares with the others. num_bytes: that each device
    gives to the sum, each time.
    """

    layers: tuple[int, ...]
    tied: bool
    devices: tuple[str, ...]
    way: str
    num_bytes: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def summed_gradients(costs: ProgramCosts) -> list[Summed]:
    """Return how gradients are summed, by layer; () of no devices that share any."""
    found = [_summed(costs, index, bucket) for index, bucket in enumerate(costs.program.buckets)]
    rising = sorted(found, key=lambda each: (each.tied, each.layers))
    return list(_joined(rising))


def sums_table(costs: ProgramCosts, profile: ModelProfile) -> list[Table]:
    """Return the table of `summed_gradients`, [] where nothing is summed."""
    rows = summed_gradients(costs)
    if not rows:
        return []
    table = new_table("gradients of", "on", "summed by")
    table.add_column("each gives", justify="right", no_wrap=True)
    for row in rows:
        names = ", ".join(row.devices) if len(row.devices) <= MOST_NAMES else f"{len(row.devices):,} devices"
        layers = describe_layers([profile.layers[layer].name for layer in row.layers])
        table.add_row(("tied: " if row.tied else "") + layers, names, row.way, format_bytes(row.num_bytes))
    return [table]


def _summed(costs: ProgramCosts, index: int, bucket: Bucket) -> Summed:
    names = costs.device_names
    root = names[bucket.root]
    way = _WAYS[bucket.collective].format(root=root)
    if bucket.state_owner is not None:
        way = f"reduced to {root}, which owns the states"
        if bucket.is_part:
            way += " from {:.0%} to {:.0%}".format(*bucket.part)
    devices = tuple(names[rank] for rank in sorted(bucket.ranks))
    return Summed(tuple(sorted(bucket.layers)), bucket.tied, devices, way, costs.sync_bytes(index))


def _joined(rows: list[Summed]) -> Iterator[Summed]:
    """Yield neighbouring layers that are summed alike as one."""
    for (tied, devices, way), group in groupby(rows, lambda row: (row.tied, row.devices, row.way)):
        alike = list(group)
        if tied:
            yield from alike
            continue
        layers = tuple(sorted({layer for row in alike for layer in row.layers}))
        yield Summed(layers, tied, devices, way, sum(row.num_bytes for row in alike))
