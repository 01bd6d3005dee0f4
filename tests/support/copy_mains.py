"""What ranks run that bring layers of a checkpoint from host to host; each host has a folder of its own."""

from dataclasses import asdict
from pathlib import Path

import torch

from hetpipe.runtime.processes import Emit
from hetpipe.training.checkpoint import LayerFile, write_layer
from hetpipe.training.checkpoint_copies import Copies, Hosts
from hetpipe.training.handover import Places
from hetpipe.training.meeting import gather

FIRST = 2
PLACES = ((0, 3), (1,), (2, 4))
"""The ranks of three hosts; those of the last one lead."""


def value_of(layer: int) -> torch.Tensor:
    """Tensors of a byte to several pieces, none like another."""
    size = (1, 1000, 6_000_000)[layer % 3]
    return torch.arange(size, dtype=torch.float32) + layer


def bring(root: str, spoilt: int | None, *, rank: int, emit: Emit) -> None:
    """Write two layers, and have them brought where they belong; spoilt: a layer that changes on its way."""
    host = next(index for index, local in enumerate(PLACES) if rank in local)
    folder = Path(root) / str(host)
    folder.mkdir(exist_ok=True)
    own: dict[int, LayerFile] = {}
    copies = Copies(Hosts.of(Places(FIRST, PLACES[host])), rank)
    for layer in (rank, rank + 5):
        own[layer] = write_layer(folder, layer, {"value": value_of(layer)})
        if layer == spoilt:
            path = folder / own[layer].file
            content = bytearray(path.read_bytes())
            content[-1] ^= 1
            path.write_bytes(content)
    written = gathered(own)
    copies.exchange(folder, written)
    emit({"event": "files", "rank": rank, "files": [[file.file, file.sha256] for file in own.values()]})
    gathered({})  # all are done
    copies.leave(folder)


def gathered(own: dict[int, LayerFile]) -> list[dict[int, LayerFile]]:
    rows = gather([[layer, asdict(file)] for layer, file in own.items()])
    return [{layer: LayerFile(**file) for layer, file in row} for row in rows]
