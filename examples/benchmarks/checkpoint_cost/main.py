"""What checkpoints beside training cost, and how long it takes to go on from one. See README.md."""

import argparse
import os
import platform
import shutil
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

from cost_model.cluster_file import read_cluster
from hetpipe.profiling.profile_cache import processor_name, profile_model
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.settings import Settings
from hetpipe.training.checkpoint import latest, read_manifest
from hetpipe.training.run import train
from partition.plan import Pipeline, Plan, Stage

CLUSTER = """
[network]
bandwidth = "10 Gbit/s"
latency = "50 us"
[[nodes]]
name = "here"
devices = [{ kind = "cpu", count = 2, memory = "11 GiB" }]
"""
MOST_SHARE, MOST_RESTORE_S = 0.035, 20.0
"""What is wanted: of the time of the steps, and until training goes on."""
PROFILE_S = 10.0


@dataclass(slots=True)
class Watched:
    """Seconds by step, and for the step of each checkpoint the last one before it was whole."""

    step_s: dict[int, float] = field(default_factory=dict)
    whole: dict[int, int] = field(default_factory=dict)

    def __call__(self, event: dict[str, Any]) -> None:
        if event["event"] == "step":
            self.step_s[event["step"]] = event["wall_s"]
        elif event["event"] == "checkpoint":
            self.whole[event["step"]] = max(self.step_s)
            if not event["in_background"]:
                raise SystemExit("host memory has no room for a copy: training waited for the checkpoint")

    def shares(self, every: int) -> "list[Share]":
        """Return what each checkpoint cost, by the seconds of the steps beside it and of others near."""
        found = []
        for step, end in self.whole.items():
            beside = range(step + 1, end + 2)  # the last one is when it is told, before the next step
            quiet = [self.step_s[other] for other in self._quiet_near(step, every)]
            usual = statistics.median(quiet)
            cost = sum(self.step_s[other] - usual for other in beside if other in self.step_s)
            found.append(Share(step, usual, cost, len(beside), cost / (every * usual)))
        return found

    def _quiet_near(self, step: int, every: int) -> list[int]:
        """Return the steps of the time around a checkpoint in which none was written."""
        busy = {other for begun, end in self.whole.items() for other in range(begun + 1, end + 2)}
        near = range(step - every // 2, step + every // 2 + 1)
        return [other for other in near if other in self.step_s and other not in busy and other > 2]


@dataclass(frozen=True, slots=True)
class Share:
    """What a checkpoint cost: seconds beyond those of usual steps, and as a share of `--every` such steps."""

    step: int
    usual_s: float
    cost_s: float
    num_beside: int
    share: float


def plan_of(model: str, num_layers: int, batch: int) -> Plan:
    """Return two stages on two devices, a sample a microbatch."""
    cut = num_layers // 2
    stages = (Stage(("here/0",), (0, cut), 2), Stage(("here/1",), (cut, num_layers), 1))
    return Plan("manual", model, batch, (Pipeline(1, batch, stages),))


def from_disk(folder: Path) -> None:
    """Let the kernel forget the files of a checkpoint, so that they are read from the disk again."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def measure(place: Path, model: str, sequence_length: int, batch: int, every: int, rounds: int) -> bool:
    """Train, measure and print; return whether what is wanted was reached."""
    cluster = place / "cluster.toml"
    cluster.write_text(CLUSTER)
    profile = profile_model(
        model, read_cluster(cluster), sequence_length, budget_s=PROFILE_S, microbatch_sizes=[1]
    )
    plan = plan_of(model, len(profile.layers), batch)
    settings = Settings(
        model, every * rounds + every // 2, every=every, keep=1, save=False, learning_rate=1e-5
    )
    folder, watched = RunFolder(place / "run"), Watched()
    train(settings, cluster, profile, plan, folder, on_event=watched)
    shares = watched.shares(every)
    print(
        "| checkpoint after step | usual step | cost | in steps | of `--every` steps |\n|---|---|---|---|---|"
    )
    for found in shares:
        print(
            f"| {found.step} | {found.usual_s:.3f} s | {found.cost_s:.2f} s | {found.num_beside} "
            f"| {found.share:.2%} |"
        )
    seconds = restore(place, settings)
    share = statistics.median(found.share for found in shares)
    size = sum(file.bytes for file in read_manifest(newest_of(folder)).layers)
    steps = sorted(watched.step_s.values())
    print(
        f"\n{model}, {batch} samples of {sequence_length} tokens, --every {every}, {size / 1e9:.2f} GB a "
        f"checkpoint; steps from {steps[0]:.2f} to {steps[-1]:.2f} s.\n"
        f"median {share:.2%} of the steps (wanted: {MOST_SHARE:.1%}); restored and training after "
        f"{seconds:.1f} s (wanted: {MOST_RESTORE_S:.0f})."
    )
    return share <= MOST_SHARE and seconds <= MOST_RESTORE_S


def restore(place: Path, settings: Settings) -> float:
    """Go on from the newest checkpoint as a user does; return the seconds until its first step begins.

    Counted is all of it: the command and its processes, finding and hashing the checkpoint, reading it.
    """
    folder, resumed = RunFolder(place / "run"), RunFolder(place / "resumed")
    kept = newest_of(folder)
    from_disk(kept)
    begun = time.time()
    subprocess.run(
        [
            sys.executable, "-m", "hetpipe", "run", "--model", settings.model, "--cluster", folder.cluster,
            "--profile", folder.profile, "--plan", folder.plan, "--resume", folder.path, "--no-save",
            "--steps", str(read_manifest(kept).step + 1), "--every", "0", "--run-folder", resumed.path, "-q",
        ],
        check=True,
    )  # fmt: skip
    (step,) = resumed.read_metrics()
    return resumed.metrics.stat().st_mtime - step["wall_s"] - begun


def newest_of(folder: RunFolder) -> Path:
    """Return the last checkpoint of a run that wrote some."""
    kept = latest(folder.checkpoints)
    assert kept is not None
    return kept


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="bert-large")
    parser.add_argument("--tokens", type=int, default=32, help="length of a sample")
    parser.add_argument("--batch", type=int, default=2, help="samples a step")
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--checkpoints", type=int, default=2)
    parser.add_argument("--place", type=Path, help="where to write; else the temporary folder")
    options = parser.parse_args(arguments)
    begun = time.monotonic()
    place = Path(tempfile.mkdtemp(prefix="checkpoint-cost-", dir=options.place))
    try:
        reached = measure(
            place, options.model, options.tokens, options.batch, options.every, options.checkpoints
        )
    finally:
        shutil.rmtree(place)
    print(
        f"{time.monotonic() - begun:.0f} s in all; {processor_name()}, {os.cpu_count()} cores, "
        f"Python {platform.python_version()}, torch {version('torch')}."
    )
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
