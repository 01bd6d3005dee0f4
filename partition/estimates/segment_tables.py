"""Arrays of what recompute by segments keeps and needs (`cost_model.memory`), by [start, stop]."""

from collections.abc import Iterator
from itertools import repeat

import numpy as np

from cost_model.memory import segment_choices
from partition.estimates.arrays import Floats


def segment_tables(inputs: Floats, samples: int, alone_bytes: Floats) -> Iterator[tuple[Floats, Floats]]:
    """Yield for each number of layers in a segment (bytes of all inputs per sample, most bytes beyond them).

    For all stages of a microbatch of `samples`. inputs: bytes of what enters layer `start`, per sample;
    alone_bytes: what one segment needs while it works. Stages of no more layers than a segment are that one.
    A stage is its first segment and a shorter stage: rows are made from the last ones on. Tables by class in
    front give such tables.
    """
    if alone_bytes.ndim == 3:
        of_classes = [segment_tables(*each) for each in zip(inputs, repeat(samples), alone_bytes)]
        for pairs in zip(*of_classes, strict=True):
            yield np.stack([kept for kept, _ in pairs]), np.stack([most for _, most in pairs])
        return
    layers = len(alone_bytes) - 1
    stops = np.arange(layers + 1)
    for each in segment_choices(layers)[1:]:
        kept, most = inputs.copy(), alone_bytes.copy()
        for high in range(layers - each, 0, -each):
            rows = np.arange(max(0, high - each), high)
            after = rows + each
            longer = stops > after[:, None]
            output = 2 * samples * inputs[after, 0]
            first = (alone_bytes[rows, after] + output)[:, None] - samples * kept[after]
            most[rows] = np.where(longer, np.maximum(first, most[after]), most[rows])
            kept[rows] = np.where(longer, inputs[rows] + kept[after], inputs[rows])
        yield kept, most
