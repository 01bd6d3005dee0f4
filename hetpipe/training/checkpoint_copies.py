"""Checkpoints of a run on several hosts: each layer is written where it lives, and brought to two hosts.

The host that leads gets all layers, and so does one other, so that the loss of any one host, or of its disk,
loses nothing, without a folder that hosts share. Layers travel between ranks, in a group of their own, while
training goes on; what arrives is compared with the hash of what was written.
"""

import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from cost_model.errors import InputError
from hetpipe.runtime.peer_errors import peer_error
from hetpipe.training.checkpoint import LayerFile, file_damage
from hetpipe.training.handover import Places
from hetpipe.training.meeting import gather

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

PIECE_BYTES = 2**24
LONGEST_S = 6 * 3600.0
"""So long may a checkpoint travel; a peer that is gone is noticed at once."""


@dataclass(frozen=True, slots=True)
class Hosts:
    """On which host each rank is.

    lowest: by rank, the lowest rank of its host, which keeps the folder there. first: the rank that reports.
    """

    lowest: tuple[int, ...]
    first: int

    @classmethod
    def of(cls, places: Places) -> "Hosts":
        """Learn it from all ranks; places: of this rank's host."""
        return cls(tuple(gather(min(places.local))), places.first)

    @property
    def keeper(self) -> int | None:
        """Return the rank that keeps a second copy; None where all ranks are on one host."""
        return min(set(self.lowest) - {self.lowest[self.first]}, default=None)

    @property
    def completing(self) -> tuple[int, ...]:
        """Return the ranks that get all layers, and complete the checkpoint on their hosts."""
        return (self.first,) if self.keeper is None else (self.first, self.keeper)

    def takers(self, owner: int) -> tuple[int, ...]:
        """Return the ranks to which a layer's owner sends it: those on whose hosts it is not."""
        return tuple(rank for rank in self.completing if self.lowest[rank] != self.lowest[owner])


class Copies:
    """The way of layers from host to host, as one rank takes part in it."""

    def __init__(self, hosts: Hosts, rank: int) -> None:
        """Open it, on all ranks together; there is none on one host."""
        self.hosts, self._rank = hosts, rank
        self._group: ProcessGroup | None = None
        if hosts.keeper is not None:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=LONGEST_S))

    def exchange(self, folder: Path, written: Sequence[Mapping[int, LayerFile]]) -> None:
        """Bring the layers to the hosts that keep them, on all ranks side by side.

        folder: of this host, with the layers that its ranks wrote. written: the files by rank and layer.

        Raises: PeerError if a rank is gone; InputError if something else arrives than was written.
        """
        if self._group is None:
            return
        files = {layer: (rank, file) for rank, own in enumerate(written) for layer, file in own.items()}
        for layer in sorted(files):  # the same order everywhere, so that none waits for one that waits for it
            owner, file = files[layer]
            for taker in self.hosts.takers(owner):
                if self._rank == owner:
                    self._move(folder / file.file, file.bytes, taker, sends=True)
                elif self._rank == taker:
                    self._move(folder / file.file, file.bytes, owner, sends=False)
                    if damage := file_damage(folder, file):
                        raise InputError(f"{damage}, sent by rank {owner}; go on with --resume")

    def leave(self, folder: Path) -> None:
        """Remove the folder of a host that keeps no copy, once all is where it belongs."""
        is_kept = self.hosts.lowest[self._rank] in {self.hosts.lowest[rank] for rank in self.hosts.completing}
        if not is_kept and self.hosts.lowest[self._rank] == self._rank:
            shutil.rmtree(folder, ignore_errors=True)

    def _move(self, path: Path, num_bytes: int, peer: int, *, sends: bool) -> None:
        since_s, piece = time.monotonic(), torch.empty(min(PIECE_BYTES, num_bytes), dtype=torch.uint8)
        with open(path, "rb" if sends else "wb") as file:
            for start in range(0, num_bytes, PIECE_BYTES):
                part = piece[: min(PIECE_BYTES, num_bytes - start)]
                try:
                    if sends:
                        file.readinto(part.numpy())  # type: ignore[attr-defined]
                        dist.send(part, peer, group=self._group)
                    else:
                        dist.recv(part, peer, group=self._group)
                        file.write(part.numpy().data)
                except RuntimeError as error:
                    what = "sent a layer to" if sends else "waited for a layer of"
                    raise peer_error(f"rank {self._rank} {what} rank {peer}", since_s, error) from error
