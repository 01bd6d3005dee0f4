"""What the process that plans hands to its ranks beside the run folder: emulated links, a predicted step."""

import pickle
from dataclasses import dataclass
from pathlib import Path

from cost_model.cluster import is_emulated
from hetpipe.program.costs import ProgramCosts
from hetpipe.program.trace import Trace
from hetpipe.runtime.emulated_links import Board
from hetpipe.simulation.prediction import Prediction


@dataclass(frozen=True, slots=True)
class Handover:
    """The files of a folder, in memory where the host has one, that is gone with the run."""

    path: Path

    @classmethod
    def fill(cls, path: Path, prediction: Prediction) -> "Handover":
        """Write what the ranks need of a prediction."""
        made = cls(path)
        if any(is_emulated(device.kind) for device in prediction.costs.devices):
            Board.create(made._board, prediction.costs)
        made._predicted.write_bytes(pickle.dumps(prediction.trace, pickle.HIGHEST_PROTOCOL))
        return made

    def board(self, costs: ProgramCosts) -> Board | None:
        """Open the table of the emulated links; return None where no device is emulated."""
        return Board(self._board, costs) if self._board.exists() else None

    def predicted(self) -> Trace:
        """Return the step as it was predicted before the run: nothing is simulated twice."""
        found = pickle.loads(self._predicted.read_bytes())  # of this run, in a folder of this user alone
        assert isinstance(found, Trace)
        return found

    @property
    def _board(self) -> Path:
        return self.path / "board"

    @property
    def _predicted(self) -> Path:
        return self.path / "predicted"
