"""What follows when a rank is lost: the run goes on from its last checkpoint, with what is left."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cost_model.cluster import Device
from cost_model.errors import InfeasibleError, InputError
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runtime.processes import WorkerLostError
from hetpipe.simulation.prediction import Prediction
from hetpipe.training import checkpoint
from hetpipe.training.checkpoint_damage import newest_whole

Replan = Callable[[frozenset[str]], Prediction]
"""Plans without some devices, by name; InfeasibleError if nothing fits, InputError if a wish forbids it."""

LONGEST_BACK_OFF_S = 30.0
_FROM_OUTSIDE = ("", "PeerError", "ChannelError", "DistNetworkError")
"""Types of errors that a rank gets from outside: it was killed, stopped or hangs, or a peer is gone. Others
come from what it computes, and would come again."""


@dataclass(frozen=True, slots=True)
class Restart:
    """How a run goes on: from where, None for its beginning, by which plan, and after which wait."""

    source: Path | None
    prediction: Prediction
    wait_s: float


@dataclass(slots=True)
class Recovery:
    """The restarts of a run: at most so many in a row that bring it no further.

    missing: gives the names of devices, of some, whose hosts are gone.

    replan: None where only the plan at hand may be run. tell: takes a sentence for each restart.
    reached: the last step that was done. lost: devices that are not used for now; those whose host is there
    are tried again after the next loss that the run has come further before.
    """

    folder: RunFolder
    prediction: Prediction
    most: int
    replan: Replan | None
    tell: Callable[[str], object]
    missing: Callable[[Sequence[Device]], frozenset[str]] = lambda devices: frozenset()
    reached: int = 0
    lost: frozenset[str] = frozenset()
    _furthest: int = -1
    _in_a_row: int = 0
    _doubted: frozenset[str] = frozenset()  # left out if they are lost once more before it comes further
    _unreachable: frozenset[str] = frozenset()  # of hosts that are gone
    _open: dict[str, Any] = field(default_factory=dict)

    def saw(self, event: Mapping[str, Any]) -> None:
        """Take what a rank emits: how far the run is, and after a restart when it trains again."""
        if event["event"] != "step":
            return
        self.reached = int(event["step"])
        if self._open:
            self._write(again_s=time.time() - self._open["noticed"])

    def restart(self, error: WorkerLostError, begun_from: Path | None) -> Restart:
        """Return how to go on after an error; begun_from: where the whole run began.

        Raises: the error, if it is the user's, or restarts bring the run no further; InfeasibleError if
            nothing fits on the devices that are left.
        """
        noticed, report = time.time(), getattr(error, "report", None)
        if self.most <= 0 or report is None or report["type"] not in _FROM_OUTSIDE:
            raise error
        source, forgiven = self._source(begun_from), False
        if self.reached > self._furthest:
            self._in_a_row, self._doubted = 0, self.lost - self._unreachable
            forgiven = bool(self._doubted)
        self._furthest = max(self._furthest, self.reached)
        if self._in_a_row >= self.most:
            raise WorkerLostError(f"{error}; {self._given_up(source)}") from error
        self._in_a_row += 1
        names, rank = self.prediction.program.device_names, int(report["rank"])
        device = names[rank] if 0 <= rank < len(names) else None
        where, gone = "on the same devices", self.missing(self.prediction.costs.devices)
        self._unreachable |= gone
        if device in self._doubted and self.replan is not None:
            gone |= {device}
        if gone:
            self._plan_without(gone, error, source)
            where = f"without {', '.join(sorted(self.lost))}"
        elif forgiven:
            where = self._plan_with_all(where)
        if device is not None:
            self._doubted |= {device}
        begin = "the beginning" if source is None else f"step {checkpoint.read_manifest(source).step}"
        self.tell(
            f"{error}, after step {self.reached}; going on from {begin} {where} "
            f"(restart {self._in_a_row} of {self.most} that come no further)"
        )
        self._note(error, source, where, noticed)
        wait_s = 0.0 if self._in_a_row == 1 else min(LONGEST_BACK_OFF_S, 2.0 ** (self._in_a_row - 2))
        return Restart(source, self.prediction, wait_s)

    def _plan_without(self, gone: frozenset[str], error: WorkerLostError, source: Path | None) -> None:
        """Plan without devices and those lost before; if nothing fits, with those whose hosts are there."""
        lost, least = self.lost | gone, self._unreachable | gone
        names = ", ".join(sorted(least))
        if self.replan is None:
            raise WorkerLostError(
                f"{error}; {names} is gone, and --plan is not planned anew; {self._rest(source)}"
            ) from error
        if lost != least:
            with suppress(InfeasibleError, InputError):
                self.prediction, self.lost = self.replan(lost), lost
                return
        try:
            self.prediction, self.lost = self.replan(least), least
        except InfeasibleError as infeasible:
            kept = "nothing was kept yet" if source is None else f"{source} is whole"
            raise InfeasibleError(f"{error}; without {names}: {infeasible}; {kept}") from error
        except InputError as refused:
            raise WorkerLostError(f"{error}; without {names}: {refused}") from error

    def _plan_with_all(self, where: str) -> str:
        """Plan with devices that were lost before; return where the run goes on."""
        assert self.replan is not None  # without which none is left out
        again = ", ".join(sorted(self.lost - self._unreachable))
        try:
            self.prediction, self.lost = self.replan(self._unreachable), self._unreachable
        except (InfeasibleError, InputError):  # the plan at hand is one that fits
            return where
        return f"with {again} again"

    def _source(self, begun_from: Path | None) -> Path | None:
        checkpoint.discard_unfinished(self.folder.checkpoints)
        newest = newest_whole(self.folder.checkpoints)
        for damage in newest.damage:
            self.tell(damage)
        return newest.folder or begun_from

    def _given_up(self, source: Path | None) -> str:
        return f"{self.most} restarts brought it no further (--max-restarts); {self._rest(source)}"

    def _rest(self, source: Path | None) -> str:
        if source is None:
            return "no checkpoint was written"
        return f"--resume {self.folder.path} goes on from {source.name}"

    def _note(self, error: WorkerLostError, source: Path | None, where: str, noticed: float) -> None:
        self._open = {
            "error": str(error),
            "noticed": noticed,
            "after_step": self.reached,
            "from_step": 0 if source is None else checkpoint.read_manifest(source).step,
            "where": where,
            "devices": list(self.prediction.program.device_names),
        }

    def _write(self, *, again_s: float) -> None:
        with open(self.folder.recoveries, "a", encoding="utf-8") as file:
            file.write(json.dumps({**self._open, "again_s": again_s}) + "\n")
        self._open = {}
