"""Is anything lost when processes are killed and stopped at random? See README.md."""

import argparse
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from leftovers import folders_after_next_start, folders_of, listening, listening_in
from processes import ranks_of, running_in_session

from hetpipe.profiling.profile_cache import processor_name
from hetpipe.runs.run_folder import RunFolder
from hetpipe.training.checkpoint import UNFINISHED_NAME, written
from hetpipe.training.checkpoint_damage import damage_of

CLUSTER = """
[network]
bandwidth = "10 Gbit/s"
latency = "50 us"
[[nodes]]
name = "big"
devices = [{ kind = "emulated", count = 1, speed = 0.5, memory = "2 GiB", driver_memory = "0 B" }]
[[nodes]]
name = "small"
devices = [{ kind = "emulated", count = 2, speed = 0.25, memory = "1 GiB", driver_memory = "0 B" }]
"""
KINDS = (
    "rank killed", "rank killed while a checkpoint is written", "launcher killed", "rank stopped",
    "rank killed twice",
)  # fmt: skip
"""The last is lost once more before the run comes further, so that it goes on without its device."""
WRITER, LAUNCHER, STOPPED, TWICE = KINDS[1:]
SOON_S = 120.0
ENDLESS = 5000
"""Steps of the schedule; a run ends by SIGTERM when it has been disturbed often enough."""
LOSSES_AGREE = 1e-6


@dataclass(slots=True)
class Faults:
    """A run that is disturbed: how often each kind of fault is still to come, and what was seen of them."""

    place: Path
    left: dict[str, int]
    chance: random.Random
    done: dict[str, int] = field(default_factory=dict)
    noticed_s: dict[str, list[float]] = field(default_factory=dict)
    again_s: dict[str, list[float]] = field(default_factory=dict)
    repeated: dict[str, list[int]] = field(default_factory=dict)
    sessions: list[int] = field(default_factory=list)
    killed: list[int] = field(default_factory=list)  # launchers
    ports: dict[int, int] = field(default_factory=dict)  # that were listened on, by inode
    furthest: int = 0
    hurt: int = 0  # the rank
    worst: float = float("nan")  # relative difference of a loss

    @property
    def folder(self) -> RunFolder:
        return RunFolder(self.place / "run")

    def left_over(self) -> set[Path]:
        """Return what the launchers have left in shared memory and their temporary folder.

        Who was killed leaves folders until the next start; who was not leaves none.
        """
        temporary = self.place / "tmp"
        marks = [f"-{pid}-" for pid in self.killed]
        now = {
            path for path in folders_of(self.sessions, temporary)
            if not any(mark in path.name for mark in marks)
        }  # fmt: skip
        return now or folders_after_next_start(self.sessions, temporary)

    def step(self) -> int:
        """Return the last step in the metrics, 0 where there is none."""
        try:
            with open(self.folder.metrics, "rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
                return int(json.loads(file.read().splitlines()[-1])["step"])
        except (OSError, ValueError, IndexError):
            return 0

    def train(self, command: Sequence[str]) -> int:
        """Start the run, again and again, and disturb it often enough; return the steps it came to."""
        while True:
            launcher = start(command, self.place)
            self.sessions.append(launcher.pid)
            try:
                if self._disturb(launcher):
                    return self.step()
            finally:
                if launcher.poll() is None:  # something is wrong: it is not left running
                    launcher.kill()
                    launcher.wait()

    def _disturb(self, launcher: "subprocess.Popen[bytes]") -> bool:
        """Disturb the run of a launcher; return whether that was often enough, and the run has ended."""
        while any(self.left.values()):
            # mostly once it has come further, also while it repeats steps
            self._wait_for_step(launcher, self.furthest if self.chance.random() < 0.8 else 0)
            time.sleep(self.chance.uniform(0.0, 1.0))
            self.ports |= listening_in(launcher.pid)
            self.furthest = max(self.furthest, self.step())
            kind = self.chance.choices(list(self.left), list(self.left.values()))[0]
            if kind == LAUNCHER:
                self._kill(launcher)
                return False
            if self._hurt(kind, launcher, self._any_rank(launcher)) and kind == TWICE:
                self._hurt(kind, launcher, self.hurt)
        self._wait_for_step(launcher, self.furthest)
        launcher.terminate()
        if launcher.wait(SOON_S) != 128 + signal.SIGTERM:
            raise SystemExit(self._last_words())
        return True

    def _wait_for_step(self, launcher: "subprocess.Popen[bytes]", beyond: int) -> None:
        before = self.step()
        if not wait_for(lambda: launcher.poll() is not None or beyond < self.step() != before):
            raise SystemExit("the run comes no further")
        if launcher.poll() is not None:
            raise SystemExit(self._last_words())

    def _kill(self, launcher: "subprocess.Popen[bytes]") -> None:
        when_s = time.time()
        launcher.kill()
        launcher.wait()
        self.killed.append(launcher.pid)
        if not wait_for(lambda: not running_in_session(launcher.pid)):
            raise SystemExit(f"left over: {running_in_session(launcher.pid)}")
        self.noticed_s.setdefault(LAUNCHER, []).append(time.time() - when_s)
        self.repeated.setdefault(LAUNCHER, []).append(max(0, self.step() - self._kept()))
        self._note(LAUNCHER)

    def _any_rank(self, launcher: "subprocess.Popen[bytes]") -> int:
        return self.chance.randrange(max(1, len(ranks_of(launcher.pid))))

    def _hurt(self, kind: str, launcher: "subprocess.Popen[bytes]", rank: int) -> bool:
        """Kill or stop a rank, and wait until the run has gone on; return whether there was one to hurt."""
        if kind == WRITER and not wait_for(self._is_writing, 20.0):
            return False
        ranks = ranks_of(launcher.pid)
        if rank >= len(ranks):
            return False
        seen = len(self._recoveries())  # a run that begins anew begins the file anew
        when_s, self.hurt = time.time(), rank
        os.kill(ranks[rank], signal.SIGSTOP if kind == STOPPED else signal.SIGKILL)
        if not wait_for(lambda: len(self._recoveries()) > seen or launcher.poll() is not None):
            raise SystemExit(f"{kind}: nothing was noticed for {SOON_S} s")
        rows = self._recoveries()
        if len(rows) == seen:
            raise SystemExit(self._last_words())
        row = rows[-1]
        where = "" if row["where"] == "on the same devices" else ", other devices"
        self.noticed_s.setdefault(kind + where, []).append(row["noticed"] - when_s)
        self.again_s.setdefault(kind + where, []).append(row["again_s"])
        self.repeated.setdefault(kind + where, []).append(row["after_step"] - row["from_step"])
        self._note(kind, where)
        return True

    def _last_words(self) -> str:
        return (self.place / "errors").read_text()[-2000:]

    def _note(self, kind: str, where: str = "") -> None:
        self.left[kind] = max(0, self.left[kind] - 1)
        self.done[kind + where] = self.done.get(kind + where, 0) + 1

    def _recoveries(self) -> list[dict[str, Any]]:
        path = self.folder.recoveries
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def _kept(self) -> int:
        return max((step for step, _ in written(self.folder.checkpoints)), default=0)

    def _is_writing(self) -> bool:
        found = self.folder.checkpoints
        return found.is_dir() and any(UNFINISHED_NAME.fullmatch(path.name) for path in found.iterdir())


def wait_for(condition: Any, most_s: float = SOON_S) -> bool:
    """Wait until something holds; return whether it did in time."""
    end_s = time.monotonic() + most_s
    while not condition():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.02)
    return True


def start(command: Sequence[str], place: Path) -> "subprocess.Popen[bytes]":
    """Start a run in a session of its own."""
    with open(place / "output", "ab") as out, open(place / "errors", "ab") as errors:
        return subprocess.Popen(
            [sys.executable, "-m", "hetpipe", *command], cwd=place, stdout=out, stderr=errors,
            env={**os.environ, "TMPDIR": str(place / "tmp")}, start_new_session=True,
        )  # fmt: skip


def command_of(place: Path, folder: str, steps: int, *, planned: bool) -> list[str]:
    """Return a run's line; planned: by the plan that it began with, on other devices never."""
    plan = ["--plan", str(place / "plan.json")] if planned else []
    return [
        "run", "--model", "bert-tiny", "--cluster", "cluster.toml", "--profile", str(place / "profile.json"),
        "--steps", str(steps), "--total-steps", str(ENDLESS), "--every", "10", "--keep", "3",
        "--run-folder", folder, "--resume", "auto", "--max-restarts", "20", "-q", *plan,
    ]  # fmt: skip


def faults_of(place: Path, counts: dict[str, int], seed: int = 0) -> Faults:
    """Train with faults, and without; check that nothing tells one from the other.

    counts: how often, by kind.

    Raises: SystemExit if the run ends; AssertionError where something differs or is left.
    """
    place.mkdir(exist_ok=True)
    (place / "tmp").mkdir()
    (place / "cluster.toml").write_text(CLUSTER)
    model = ["--model", "bert-tiny", "--cluster", "cluster.toml"]
    if not (place / "profile.json").exists():
        done(["profile", *model, "-o", "profile.json"], place)
    done(["plan", *model, "--profile", "profile.json", "--no-proof", "-o", "plan.json"], place)
    found = Faults(place, {kind: count for kind, count in counts.items() if count}, random.Random(seed))
    planned = TWICE not in found.left
    steps = found.train(command_of(place, "run", ENDLESS, planned=planned))
    print(table(found), file=sys.stderr, flush=True)  # whatever is found to be wrong
    found.sessions.append(done(command_of(place, "undisturbed", steps, planned=planned), place))
    check(found, RunFolder(place / "undisturbed"), steps)
    return found


def done(command: Sequence[str], place: Path) -> int:
    """Run a command of hetpipe to its end; return the process that it was.

    Raises: SystemExit if it fails.
    """
    launcher = start(command, place)
    if launcher.wait() != 0:
        raise SystemExit((place / "errors").read_text()[-2000:])
    return launcher.pid


def check(found: Faults, undisturbed: RunFolder, steps: int) -> None:
    """Raises: AssertionError for a step that is missing or twice, another loss, or anything left over."""
    mine, other = found.folder.read_metrics(), undisturbed.read_metrics()
    assert [row["step"] for row in mine] == list(range(1, steps + 1)), "a step is missing, or twice"
    assert [row["samples_seen"] for row in mine] == [row["samples_seen"] for row in other]
    assert len(mine) == len(other)
    found.worst = max(abs(a["loss"] - b["loss"]) / abs(b["loss"]) for a, b in zip(mine, other, strict=True))
    assert found.worst <= LOSSES_AGREE, f"losses differ by {found.worst:.1e}"
    for _, folder in written(found.folder.checkpoints):
        assert damage_of(folder) is None, damage_of(folder)
    left = [path.name for path in found.folder.checkpoints.iterdir() if path.name.startswith(".")]
    assert left == [], left
    assert wait_for(lambda: not any(map(running_in_session, found.sessions)))
    with found.folder.locked():  # nobody holds it
        pass
    open_ports = {port for inode, port in listening().items() if inode in found.ports}
    assert not open_ports, f"listened on still: {open_ports}"
    assert not (left_over := found.left_over()), left_over


def table(found: Faults) -> str:
    """Return the rows of the README."""
    lines = [
        "| fault | times | noticed after | trains again after | steps repeated |",
        "|---|---|---|---|---|",
    ]
    for kind, count in found.done.items():
        cells = [spread(values.get(kind, [])) for values in (found.noticed_s, found.again_s)]
        steps = found.repeated.get(kind, [])
        middle = f"{statistics.median(steps):.0f} ({max(steps)} at most)" if steps else ""
        lines.append(f"| {kind} | {count} | {cells[0]} | {cells[1]} | {middle} |")
    return "\n".join(lines)


def spread(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.2f} s ({max(seconds):.2f} at most)" if seconds else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=140, help="ranks killed")
    parser.add_argument("--writers", type=int, default=40, help="ranks killed while a checkpoint is written")
    parser.add_argument("--launchers", type=int, default=20, help="launchers killed")
    parser.add_argument("--stops", type=int, default=50, help="ranks stopped")
    parser.add_argument("--twice", type=int, default=0, help="ranks killed twice: kills, two each; alone")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--profile", type=Path, help="one that was measured before")
    options = parser.parse_args()
    wanted = (options.ranks, options.writers, options.launchers, options.stops, options.twice)
    begun_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        place = Path(name)
        if options.profile is not None:
            (place / "profile.json").write_text(options.profile.read_text())
        found = faults_of(place, dict(zip(KINDS, wanted, strict=True)), options.seed)
        steps = found.step()
    print(table(found))
    print(
        f"{sum(found.done.values())} faults in {time.monotonic() - begun_s:.0f} s, {steps} steps; losses "
        f"differ by {found.worst:.1e} at most; {os.cpu_count()} cores ({processor_name()}); "
        f"Python {platform.python_version()}, torch {version('torch')}"
    )


if __name__ == "__main__":
    main()
