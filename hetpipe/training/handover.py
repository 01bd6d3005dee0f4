"""What a launcher hands to its ranks beside the run folder: emulated links, places, a predicted step."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cost_model.cluster import is_emulated
from hetpipe.program.costs import ProgramCosts
from hetpipe.program.trace import Trace
from hetpipe.runtime.emulated_links import Board


@dataclass(frozen=True, slots=True)
class Places:
    """Which ranks are where. first: the one that reports, on the leader's host. local: those of this host."""

    first: int
    local: tuple[int, ...]

    @classmethod
    def of(cls, local: Sequence[int] | None) -> "Places | None":
        """Return the places on the host that leads, of which the first rank reports; None for one host."""
        return None if local is None else cls(local[0], tuple(local))


@dataclass(frozen=True, slots=True)
class Handover:
    """The files of a folder, in memory where the host has one, that is gone with the run."""

    path: Path

    @classmethod
    def fill(
        cls, path: Path, costs: ProgramCosts, predicted: Trace | None, places: Places | None = None
    ) -> "Handover":
        """Write what the ranks of this host need; predicted: needed by the one that reports."""
        made = cls(path)
        if any(is_emulated(device.kind) for device in costs.devices):
            Board.create(made._board, costs)
        places = places or Places(0, tuple(range(len(costs.devices))))
        made._places.write_text(json.dumps([places.first, places.local]))
        if predicted is not None:
            made._predicted.write_text(json.dumps(predicted.to_json()))
        return made

    def board(self, costs: ProgramCosts) -> Board | None:
        """Open the table of the emulated links; return None where no device is emulated."""
        return Board(self._board, costs, self.places().local) if self._board.exists() else None

    def places(self) -> Places:
        """Return which ranks are where."""
        first, local = json.loads(self._places.read_text())
        return Places(first, tuple(local))

    def predicted(self) -> Trace:
        """Return the step as it was predicted before the run: nothing is simulated twice."""
        return Trace.of_json(json.loads(self._predicted.read_text()))

    def planned_busy_s(self) -> tuple[float, ...]:
        """Return the busy seconds of each rank in that step."""
        predicted = self.predicted()
        return tuple(predicted.busy_s(rank) for rank in range(len(predicted.device_names)))

    @property
    def _board(self) -> Path:
        return self.path / "board"

    @property
    def _places(self) -> Path:
        return self.path / "places"

    @property
    def _predicted(self) -> Path:
        return self.path / "predicted"
