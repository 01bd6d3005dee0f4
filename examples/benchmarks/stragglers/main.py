"""What a device that becomes slow costs, and what --adapt gives back of it. See README.md."""

import argparse
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hetpipe.profiling.profile_cache import processor_name

CLUSTER = """
[network]
bandwidth = "10 Gbit/s"
latency = "50 us"
[[nodes]]
name = "big"
devices = [
    {{ kind = "emulated", speed = {speed}, memory = "2 GiB", driver_memory = "0 B" }},
    {{ kind = "emulated", speed = {slowed}, memory = "2 GiB", driver_memory = "0 B" }},
    {{ kind = "emulated", speed = {speed}, memory = "2 GiB", driver_memory = "0 B" }},
]
"""
SLOW, BEGIN = "big/1", 40
"""The device that takes twice its time, and from which step on."""
MOST_STEPS, LEAST_SHARE = 25, 0.8
"""What is wanted: steps until it is named, and of what the new best plan promises."""
AFTER = 80
"""Steps after the slowdown that are run of those there are to do, and so many of the promised plan."""
SETTLED = 3
"""Steps after a change, or a start, that are not looked at."""


@dataclass(frozen=True, slots=True)
class Run:
    """A run: by step its seconds and when it was told of (monotonic), steps that name the device, output."""

    step_s: dict[int, float]
    told_s: dict[int, float]
    named: tuple[int, ...]
    said: str

    def median_s(self, first: int, last: int) -> float:
        """Return the median time of the steps from first to last."""
        return statistics.median(self.step_s[step] for step in range(first, last + 1) if step in self.step_s)


@dataclass(frozen=True, slots=True)
class Row:
    """What one repeat shows: steps until the device was named, seconds of a step, seconds of the change."""

    named: int
    before_s: float
    without_s: float
    with_s: float
    promised_s: float
    change_s: float

    @property
    def share(self) -> float:
        """Of the seconds that the new best plan promises to save in a step, those that are saved."""
        return (self.without_s - self.with_s) / (self.without_s - self.promised_s)

    @property
    def cells(self) -> list[str]:
        times = (self.before_s, self.without_s, self.with_s, self.promised_s)
        seconds = [f"{time_s * 1e3:.1f} ms" for time_s in times]
        return [str(self.named), *seconds, f"{self.share:.0%}", f"{self.change_s:.1f} s"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where the runs are, and what all of them train."""

    path: Path
    model: str
    tokens: int
    batch: int
    speed: float

    def cluster(self, name: str, times: float) -> Path:
        """Return a cluster file whose middle device is so many times slower."""
        path = self.path / f"{name}.toml"
        path.write_text(CLUSTER.format(speed=self.speed, slowed=self.speed / times))
        return path

    def profile(self) -> None:
        """Measure the layers once, for all runs."""
        cluster = self.cluster("as-it-was", 1)
        given = ["--model", self.model, "--cluster", cluster, "--sequence-length", self.tokens]
        _hetpipe(["profile", *given, "-o", self.path / "profile.json"])

    def train(
        self, name: str, steps: int, *options: str, last: int, times: float = 1.0, slowdown: bool = False
    ) -> Run:
        """Train as a user does, and watch the steps as they are written; end it by SIGTERM after the last."""
        folder = self.path / name
        shutil.rmtree(folder, ignore_errors=True)
        line = [
            sys.executable, "-m", "hetpipe", "run", "--model", self.model,
            "--cluster", self.cluster(name, times), "--profile", self.path / "profile.json",
            "--sequence-length", str(self.tokens), "--global-batch-size", str(self.batch),
            "--run-folder", folder, "-q", "--steps", str(steps), *options,
        ]  # fmt: skip
        given = {"HETPIPE_EMULATED_SLOWDOWN": f"{SLOW}=2@{BEGIN}"} if slowdown else {}
        with open(self.path / "said", "w+", encoding="utf-8") as said:
            process = subprocess.Popen(line, stdout=said, stderr=said, env=os.environ | given)
            told_s = _steps_told(folder / "metrics.jsonl", process, last)
            said.seek(0)
            text = said.read()
        if process.returncode not in (0, 128 + signal.SIGTERM, -signal.SIGTERM):
            raise SystemExit(f"a run ended with exit code {process.returncode}:\n{text}")
        steps = _steps(folder / "metrics.jsonl")
        named = tuple(entry["step"] for entry in steps if SLOW in entry.get("slow", {}))
        return Run({entry["step"]: entry["step_s"] for entry in steps}, told_s, named, text)


def _hetpipe(arguments: Sequence[object]) -> None:
    subprocess.run([sys.executable, "-m", "hetpipe", *map(str, arguments)], check=True, capture_output=True)


def _steps(path: Path) -> list[dict[str, Any]]:
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _steps_told(path: Path, process: "subprocess.Popen[bytes]", last: int) -> dict[int, float]:
    """Return when the line of each step was there, until the run ends, which is asked for after the last."""
    told: dict[int, float] = {}
    ended = False
    while process.poll() is None:
        now_s, count = time.monotonic(), path.read_bytes().count(b"\n") if path.exists() else 0
        for step in range(len(told) + 1, count + 1):
            told[step] = now_s
        if len(told) >= last and not ended:
            process.terminate()
            ended = True
        time.sleep(0.02)
    return told


def measure(place: Place, steps: int) -> Row:
    """Train without and with --adapt, and with the plan that is best for the slowed device from the start."""
    last = BEGIN + AFTER
    without = place.train("without", steps, "--no-save", last=last, slowdown=True)
    adapted = place.train("with", steps, "--adapt", last=last, slowdown=True)
    promised = place.train("promised", steps, "--no-save", last=AFTER, times=2.0)
    if "planned again" not in adapted.said:
        raise SystemExit(f"the plan stayed:\n{adapted.said}")
    changed = _changed_after(adapted)
    return Row(
        named=without.named[0] - BEGIN + 1,
        before_s=without.median_s(SETTLED, BEGIN - 1),
        without_s=without.median_s(BEGIN + SETTLED, last),
        with_s=adapted.median_s(changed + SETTLED, last),
        promised_s=promised.median_s(SETTLED, AFTER),
        change_s=_seconds_of_change(adapted, changed),
    )


def _changed_after(run: Run) -> int:
    """Return the step after which the run went on under another plan: the longest wait between two."""
    steps = sorted(run.told_s)
    return max(steps[:-1], key=lambda step: run.told_s[step + 1] - run.told_s[step])


def _seconds_of_change(run: Run, changed: int) -> float:
    return run.told_s[changed + 1] - run.told_s[changed] - run.step_s[changed + 1]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="bert-tiny")
    parser.add_argument("--tokens", type=int, default=16, help="length of a sample")
    parser.add_argument("--batch", type=int, default=16, help="samples a step")
    parser.add_argument("--speed", type=float, default=0.2, help="of each device, of this host's core")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(arguments)
    begun = time.monotonic()
    path = Path(tempfile.mkdtemp(prefix="stragglers-"))
    try:
        place = Place(path, options.model, options.tokens, options.batch, options.speed)
        place.profile()
        print(
            "| named after steps | before | slow | with `--adapt` | promised | regained | change |\n"
            "|---|---|---|---|---|---|---|"
        )
        rows = []
        for _ in range(options.repeats):
            rows.append(measure(place, options.steps))
            print("| " + " | ".join(rows[-1].cells) + " |", flush=True)
    finally:
        shutil.rmtree(path)
    named, share = max(row.named for row in rows), statistics.median(row.share for row in rows)
    print(
        f"\nnamed after at most {named} steps (wanted: {MOST_STEPS}); median {share:.0%} regained (wanted: "
        f"{LEAST_SHARE:.0%}).\n{time.monotonic() - begun:.0f} s in all; {processor_name()}, "
        f"{os.cpu_count()} cores, Python {platform.python_version()}, torch {version('torch')}."
    )
    return 0 if named <= MOST_STEPS and share >= LEAST_SHARE else 1


if __name__ == "__main__":
    sys.exit(main())
