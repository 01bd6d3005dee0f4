"""When a SYNC that stands right behind a backward begins: inside it, when its layers are done."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from cost_model.cluster import Device
from cost_model.layer_costs import Prices
from hetpipe.program.instructions import Bucket, Compute, Pass, Program, Sync
from partition.plan import Stage


@dataclass(frozen=True, slots=True)
class InnerSync:
    """A SYNC that begins inside a backward, when the backward of this layer of the stage is over.

    place: of the SYNC in its rank's list.
    """

    place: int
    bucket: int
    layer: int


def inner_syncs(program: Program, rank: int) -> dict[int, tuple[InnerSync, ...]]:
    """Return the SYNCs of a rank that begin inside a backward, in order, by its place in the rank's list.

    They are those right behind it, with no send between, which would come later than the sums and wait for
    them. A SYNC begins after the SYNCs before it, too.
    """
    found: dict[int, tuple[InnerSync, ...]] = {}
    instructions = program.ranks[rank]
    behind: list[int] = []
    place = len(instructions) - 1
    while place >= 0:
        instruction = instructions[place]
        if isinstance(instruction, Sync):
            behind.append(place)
        else:
            if behind and isinstance(instruction, Compute) and instruction.op is Pass.BACKWARD:
                stage = program.stage(instruction)
                inner = tuple(_inner(program, stage, instructions, behind[::-1]))
                if inner:
                    found[place] = inner
            behind = []
        place -= 1
    return found


def _inner(
    program: Program, stage: Stage, instructions: Sequence[object], places: Sequence[int]
) -> Iterator[InnerSync]:
    syncs = [entry for entry in map(instructions.__getitem__, places) if isinstance(entry, Sync)]
    layers = layers_reached(stage, (program.buckets[sync.bucket] for sync in syncs))
    for place, sync, layer in zip(places, syncs, layers, strict=True):
        if layer > stage.start:
            yield InnerSync(place, sync.bucket, layer)


def layers_reached(stage: Stage, buckets: Iterable[Bucket]) -> Iterator[int]:
    """Yield, for buckets in their order, the layer of the stage whose backward must be over for each."""
    reached = stage.stop
    for bucket in buckets:
        held = [layer for layer in bucket.layers if stage.start <= layer < stage.stop]
        reached = min([reached, *held])
        yield reached


def after_layer_s(prices: Prices, device: Device, stage: Stage, samples: int, layer: int) -> float:
    """Return the seconds of a stage's backward that come after that of a layer; all of them for its end."""
    seconds = prices.backward_s(device, stage.start, layer, samples)
    if stage.recompute:
        # the layer's own segment was run again before its backward, those before it come later
        again = [part for part in stage.segments if part[1] <= layer]
        seconds += sum(prices.forward_s(device, *part, samples) for part in again)
    return seconds
