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
from hetpipe.training.full_devices import FullDevice

Replan = Callable[[frozenset[str], Mapping[str, float]], Prediction]
"""Plans without some devices, by name, and with no more than so many bytes on others; InfeasibleError if
nothing fits, InputError if a wish forbids it."""

LONGEST_BACK_OFF_S = 30.0
LOST, JOINED = "lost", "joined"
"""What lines of recoveries.jsonl are about: a rank or a host that was lost, a host that is back."""
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

    missing: gives the names of devices, of some, whose hosts are gone. returned: lets in the hosts that are
    back, and gives their nodes.

    replan: None where only the plan at hand may be run. tell: takes a sentence for each restart.
    reached: the last step that was done. lost: devices that are not used for now; those whose host is there
    are tried again after the next loss that the run has come further before. room_bytes: what devices that
    were full are planned with. last_step: of the run, behind which nothing is to go on with.
    """

    folder: RunFolder
    prediction: Prediction
    most: int
    replan: Replan | None
    tell: Callable[[str], object]
    missing: Callable[[Sequence[Device]], frozenset[str]] = lambda devices: frozenset()
    returned: Callable[[], frozenset[str]] = frozenset
    last_step: int | None = None
    reached: int = 0
    lost: frozenset[str] = frozenset()
    room_bytes: dict[str, float] = field(default_factory=dict)
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

    def finish(self) -> None:
        """Note a restart after which no step was done."""
        if self._open:
            self._write(again_s=None)

    def restart(self, error: WorkerLostError, begun_from: Path | None) -> Restart:
        """Return how to go on after an error; begun_from: where the whole run began.

        Raises: the error, if it is the user's, or restarts bring the run no further; InfeasibleError if
            nothing fits on the devices that are left, or in their memory.
        """
        noticed, report = time.time(), getattr(error, "report", None)
        if report is not None and (full := FullDevice.of(self.prediction, report)) is not None:
            return self._restart_with_less(error, full, self._source(begun_from))
        if self.most <= 0 or report is None or report["type"] not in _FROM_OUTSIDE:
            raise error
        source, forgiven = self._source(begun_from), False
        if source is not None and checkpoint.read_manifest(source).step == self.last_step:
            raise WorkerLostError(
                f"{error}, after the last step; {source} is whole, only the report was not written: hetpipe "
                f"export {self.folder.path} -o my-model"
            ) from error
        if self.reached > self._furthest:
            self._in_a_row, self._doubted = 0, self.lost - self._unreachable
            forgiven = bool(self._doubted)
        self._furthest = max(self._furthest, self.reached)
        if self._in_a_row >= self.most:
            raise WorkerLostError(f"{error}; {self._given_up(source)}") from error
        self._in_a_row += 1
        names, rank = self.prediction.program.device_names, int(report["rank"])
        device = names[rank] if 0 <= rank < len(names) else None
        where = "on the same devices"
        gone, back = self._gone_and_back()
        if device in self._doubted and self.replan is not None:
            gone |= {device}
        if gone & set(names):
            self._plan_without(gone, error, source)
            where = f"without {', '.join(sorted(self.lost))}"
        elif forgiven or back:
            where = self._plan_with_all(where, back)
        if device is not None:
            self._doubted |= {device}
        wait_s = 0.0 if self._in_a_row == 1 else min(LONGEST_BACK_OFF_S, 2.0 ** (self._in_a_row - 2))
        return self._going_on(error, source, where, noticed, wait_s)

    def _going_on(
        self, error: WorkerLostError, source: Path | None, where: str, noticed: float, wait_s: float
    ) -> Restart:
        """Tell and note a restart; return it."""
        self.tell(
            f"{error}, after step {self.reached}; going on from {_begin(source)} {where} "
            f"(restart {self._in_a_row} of {self.most} that come no further)"
        )
        self._note(str(error), source, where, noticed, _noticed_after_s(getattr(error, "report", {})))
        return Restart(source, self.prediction, wait_s)

    def _restart_with_less(self, error: WorkerLostError, full: FullDevice, source: Path | None) -> Restart:
        """Return how to go on with less on a device that was full: the same plan would fill it again.

        Raises: InfeasibleError if no other plan may be made, or none fits.
        """
        noticed, text = time.time(), f"{error}; {full.words}"
        if self.reached > self._furthest:
            self._in_a_row = 0
        self._furthest = max(self._furthest, self.reached)
        if self.replan is None or self._in_a_row >= self.most:
            raise InfeasibleError(f"{text}; {full.remedy}; {self._rest(source)}", device=full.name) from error
        self._in_a_row += 1
        gone, _ = self._gone_and_back()
        self.room_bytes[full.name] = full.room_bytes
        try:
            self.prediction = self.replan(self.lost | gone, self.room_bytes)
        except (InfeasibleError, InputError) as refused:
            raise InfeasibleError(
                f"{text}; with {full.room_bytes:,.0f} bytes there: {refused}; {self._rest(source)}",
                device=full.name,
                missing_bytes=getattr(refused, "missing_bytes", 0.0),
            ) from error
        self.lost |= gone
        where = f"with {full.room_bytes:,.0f} bytes planned on {full.name}"
        named = WorkerLostError(text)
        named.report = getattr(error, "report", {})  # type: ignore[attr-defined]
        return self._going_on(named, source, where, noticed, 0.0)

    def join(self, begun_from: Path | None) -> Restart:
        """Return how to go on with the hosts that are back; begun_from: where the whole run began."""
        noticed, back = time.time(), self._back()
        names, source = ", ".join(sorted(back)), self._source(begun_from)
        if not back:  # gone again, meanwhile
            return Restart(source, self.prediction, 0.0)
        assert self.replan is not None  # without which nobody is let in
        try:
            self.prediction = self.replan(self.lost, self.room_bytes)
            is_used = bool(back & set(self.prediction.program.device_names))
            where = f"with {names} again" if is_used else "as before: no plan with it is faster"
        except (InfeasibleError, InputError) as refused:
            where = f"as before: {refused}"
        told = f"{names} is back"
        self.tell(f"{told}, after step {self.reached}; going on from {_begin(source)} {where}")
        self._note(told, source, where, noticed, None, kind=JOINED)
        return Restart(source, self.prediction, 0.0)

    def _gone_and_back(self) -> tuple[frozenset[str], frozenset[str]]:
        """Return the devices whose hosts are gone, and those whose hosts are back, since the last time."""
        gone = self.missing(self.prediction.costs.cluster.devices) - self._unreachable
        self._unreachable |= gone
        self.lost |= gone - set(self.prediction.program.device_names)  # nothing ran there
        back = self._back()
        return gone - back, back

    def _back(self) -> frozenset[str]:
        """Let in the hosts that are back; return their devices."""
        nodes = self.returned()
        back = frozenset(name for name in self._unreachable if name.rpartition("/")[0] in nodes)
        self._unreachable -= back
        self.lost -= back
        return back

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
                self.prediction, self.lost = self.replan(lost, self.room_bytes), lost
                return
        try:
            self.prediction, self.lost = self.replan(least, self.room_bytes), least
        except InfeasibleError as infeasible:
            kept = "nothing was kept yet" if source is None else f"{source} is whole"
            raise InfeasibleError(f"{error}; without {names}: {infeasible}; {kept}") from error
        except InputError as refused:
            raise WorkerLostError(f"{error}; without {names}: {refused}") from error

    def _plan_with_all(self, where: str, back: frozenset[str]) -> str:
        """Plan with devices that were lost before, and those that are back; return where the run goes on."""
        assert self.replan is not None  # without which none is left out
        again = ", ".join(sorted((self.lost - self._unreachable) | back))
        try:
            self.prediction = self.replan(self._unreachable, self.room_bytes)
            self.lost = self._unreachable
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

    def _note(
        self,
        error: str,
        source: Path | None,
        where: str,
        noticed: float,
        silent_s: float | None,
        *,
        kind: str = LOST,
    ) -> None:
        self.finish()  # one after which no step was done
        from_step = 0 if source is None else checkpoint.read_manifest(source).step
        self._open = {
            "kind": kind,
            "error": error,
            "noticed": noticed,
            "noticed_after_s": silent_s,
            "after_step": max(self.reached, from_step),
            "from_step": from_step,
            "where": where,
            "devices": list(self.prediction.program.device_names),
        }
        self.reached = from_step

    def _write(self, *, again_s: float | None) -> None:
        try:
            with open(self.folder.recoveries, "a", encoding="utf-8") as file:
                file.write(json.dumps({**self._open, "again_s": again_s}) + "\n")
        except OSError as error:
            self.tell(f"{self.folder.recoveries}: cannot be written ({error.strerror})")
        self._open = {}


def _noticed_after_s(report: Mapping[str, Any]) -> float | None:
    """Return the seconds since the last sign of life of what was lost, or since its own last word."""
    if report.get("silent_s") is not None:
        return float(report["silent_s"])
    return max(0.0, time.monotonic() - report["when_s"]) if "when_s" in report else None


def _begin(source: Path | None) -> str:
    return "the beginning" if source is None else f"step {checkpoint.read_manifest(source).step}"
