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
KINDS = ("rank killed", "rank killed while a checkpoint is written", "launcher killed", "rank stopped")
SOON_S = 120.0


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
    seen: int = 0  # lines of recoveries.jsonl

    @property
    def folder(self) -> RunFolder:
        return RunFolder(self.place / "run")

    def step(self) -> int:
        """Return the last step in the metrics, 0 where there is none."""
        try:
            lines = self.folder.metrics.read_text().splitlines()
            return int(json.loads(lines[-1])["step"]) if lines else 0
        except (OSError, ValueError):
            return 0

    def train(self, command: Sequence[str], steps: int) -> None:
        """Start the run, again and again, and disturb it until it has ended."""
        while True:
            launcher = start(command, self.place)
            self.sessions.append(launcher.pid)
            if self._disturb(launcher, steps):
                return

    def _disturb(self, launcher: "subprocess.Popen[bytes]", steps: int) -> bool:
        """Disturb the run of a launcher; return whether it has come to its end."""
        while sum(self.left.values()):
            pause_s = self.chance.uniform(0.1, 2.0)
            self._wait_for_steps(launcher)
            time.sleep(pause_s)
            if launcher.poll() is not None:
                break
            kind = self.chance.choices(list(self.left), list(self.left.values()))[0]
            if kind == "launcher killed":
                at, when_s = self.step(), time.time()
                launcher.kill()
                launcher.wait()
                self._note(kind)
                self.repeated.setdefault(kind, []).append(max(0, at - self._kept()))
                if not wait_for(lambda: not running_in_session(launcher.pid)):
                    raise SystemExit(f"left over: {running_in_session(launcher.pid)}")
                self.noticed_s.setdefault(kind, []).append(time.time() - when_s)
                return False
            self._hurt(kind, launcher.pid)
        if launcher.wait() != 0:
            raise SystemExit((self.place / "errors").read_text()[-2000:])
        if self.step() != steps:
            raise SystemExit(f"the run ended at step {self.step()}")
        return True

    def _wait_for_steps(self, launcher: "subprocess.Popen[bytes]") -> None:
        begun_from = self.step()
        if not wait_for(lambda: launcher.poll() is not None or self.step() != begun_from):
            raise SystemExit("the run comes no further")

    def _hurt(self, kind: str, launcher: int) -> bool:
        """Kill or stop a rank; return whether the run went on after it, False if there was none to hurt."""
        if kind == KINDS[1] and not wait_for(self._is_writing, 20.0):
            return False
        ranks = ranks_of(launcher)
        if not ranks:
            return False
        when_s = time.time()
        os.kill(self.chance.choice(ranks), signal.SIGSTOP if kind == "rank stopped" else signal.SIGKILL)
        if not wait_for(lambda: len(self._recoveries()) > self.seen or not alive(launcher)):
            raise SystemExit(f"{kind}: nothing was noticed for {SOON_S} s")
        rows = self._recoveries()
        if len(rows) == self.seen:
            return False  # the run was at its end
        row = rows[-1]
        self.seen = len(rows)
        self._note(kind)
        self.noticed_s.setdefault(kind, []).append(row["noticed"] - when_s)
        self.again_s.setdefault(kind, []).append(row["again_s"])
        self.repeated.setdefault(kind, []).append(row["after_step"] - row["from_step"])
        return True

    def _note(self, kind: str) -> None:
        self.left[kind] -= 1
        self.done[kind] = self.done.get(kind, 0) + 1

    def _recoveries(self) -> list[dict[str, Any]]:
        path = self.folder.recoveries
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def _kept(self) -> int:
        return max((step for step, _ in written(self.folder.checkpoints)), default=0)

    def _is_writing(self) -> bool:
        found = self.folder.checkpoints
        return found.is_dir() and any(UNFINISHED_NAME.fullmatch(path.name) for path in found.iterdir())


def alive(pid: int) -> bool:
    return (
        Path(f"/proc/{pid}").exists()
        and "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:1]
    )


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


def command_of(place: Path, folder: str, steps: int) -> list[str]:
    return [
        "run", "--model", "bert-tiny", "--cluster", "cluster.toml", "--profile", str(place / "profile.json"),
        "--steps", str(steps), "--every", "10", "--keep", "3", "--run-folder", folder, "--resume", "auto",
        "--max-restarts", "10", "--no-proof", "-q",
    ]  # fmt: skip


def faults_of(place: Path, counts: dict[str, int], steps: int, seed: int = 0) -> Faults:
    """Train with faults, and without; check that nothing tells one from the other.

    steps: of either run; where they are over before all faults came, the rest is left out.
    """
    (place / "tmp").mkdir()
    (place / "cluster.toml").write_text(CLUSTER)
    if not (place / "profile.json").exists():
        command = ["profile", "--model", "bert-tiny", "--cluster", "cluster.toml", "-o", "profile.json"]
        start(command, place).wait()
    found = Faults(place, dict(counts), random.Random(seed))
    found.train(command_of(place, "run", steps), steps)
    start(command_of(place, "undisturbed", steps), place).wait()
    check(found, RunFolder(place / "undisturbed"), steps)
    return found


def check(found: Faults, undisturbed: RunFolder, steps: int) -> None:
    """Raises: AssertionError for a step that is missing or twice, another loss, or anything left over."""
    mine, other = found.folder.read_metrics(), undisturbed.read_metrics()
    assert [row["step"] for row in mine] == list(range(1, steps + 1)), "a step is missing, or twice"
    assert [row["samples_seen"] for row in mine] == [row["samples_seen"] for row in other]
    assert len(mine) == len(other)
    worst = max(abs(a["loss"] - b["loss"]) / abs(b["loss"]) for a, b in zip(mine, other, strict=True))
    assert worst <= 1e-6, f"losses differ by {worst:.1e}"
    for _, folder in written(found.folder.checkpoints):
        assert damage_of(folder) is None, damage_of(folder)
    left = [path.name for path in found.folder.checkpoints.iterdir() if path.name.startswith(".")]
    assert left == [], left
    assert wait_for(lambda: not any(map(running_in_session, found.sessions)))
    with found.folder.locked():  # nobody holds it
        pass
    now = time.time()
    old = [
        path for parent in (found.place / "tmp", Path("/dev/shm")) for path in parent.glob("hetpipe-*")
        if any(f"-{pid}-" in path.name for pid in found.sessions) and now - path.stat().st_mtime > 600
    ]  # fmt: skip
    assert old == [], old


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
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--profile", type=Path, help="one that was measured before")
    options = parser.parse_args()
    counts = dict(zip(KINDS, (options.ranks, options.writers, options.launchers, options.stops), strict=True))
    begun_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        place = Path(name)
        if options.profile is not None:
            (place / "profile.json").write_text(options.profile.read_text())
        wanted = {kind: count for kind, count in counts.items() if count}
        found = faults_of(place, wanted, options.steps, options.seed)
    print(table(found))
    print(
        f"{sum(found.done.values())} faults in {time.monotonic() - begun_s:.0f} s, "
        f"{sum(found.left.values())} of those wanted did not come to pass; "
        f"{os.cpu_count()} cores ({processor_name()}); Python {platform.python_version()}, "
        f"torch {version('torch')}"
    )


if __name__ == "__main__":
    main()
