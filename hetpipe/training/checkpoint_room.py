"""The room on the disk of a run's folder for the checkpoints of the run."""

import math
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cost_model.errors import InputError
from cost_model.memory import checkpoint_bytes
from cost_model.profile import ModelProfile
from cost_model.units import format_bytes
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.settings import Settings
from hetpipe.training import checkpoint


@dataclass(frozen=True, slots=True)
class Room:
    """The bytes that the checkpoints of a run take, and those that are free where they go.

    every: whether some are written before the end, so that --no-save alone does not help.
    """

    place: Path
    num_checkpoints: int
    checkpoint_bytes: float
    free_bytes: float
    every: bool = False

    @property
    def _fitting(self) -> int:
        return int(self.free_bytes / self.checkpoint_bytes) if self.checkpoint_bytes else self.num_checkpoints

    def check(self) -> None:
        """Check that there is room for one.

        Raises: InputError if not.
        """
        if self.num_checkpoints and not self._fitting:
            raise InputError(
                f"{self.place}: a checkpoint takes {format_bytes(self.checkpoint_bytes)}, and "
                f"{format_bytes(self.free_bytes)} are free there; make room, give another --run-folder "
                f"(folder), or keep no model: --no-save{' --every 0' if self.every else ''} (save=False)"
            )

    @property
    def shortage(self) -> str | None:
        """Say how many there is no room for, where it is not all of them: some may be removed meanwhile."""
        if not 0 < self._fitting < self.num_checkpoints:
            return None
        return (
            f"{self.place}: {self.num_checkpoints} checkpoints of {format_bytes(self.checkpoint_bytes)} "
            f"each, and {format_bytes(self.free_bytes)} free; training stops after {self._fitting} of them "
            "unless some are removed: give --keep, raise --every, or give another --run-folder"
        )


def room_of(
    folder: RunFolder, settings: Settings, profile: ModelProfile, *, adapters_alone: bool = False
) -> Room:
    """Return the room for a run, its folder being there or not.

    adapters_alone: whether what is frozen stays out of the checkpoints, as with --lora.

    Raises: InputError if the checkpoint that it goes on from cannot be read.
    """
    source = settings.resume_from
    done = 0 if source is None else checkpoint.read_manifest(Path(source)).step
    place = folder.path.absolute()
    free = shutil.disk_usage(next(parent for parent in (place, *place.parents) if parent.exists())).free
    return Room(
        folder.path,
        num_checkpoints(settings, done),
        checkpoint_bytes(profile, frozen=not (adapters_alone or settings.lora)),
        float(free),
        every=settings.every > 0 or settings.every_s > 0,
    )


def free_host_bytes() -> float:
    """Return the memory of this host that is free for this process, infinity where nothing says.

    What a container may have counts; its files in the page cache are free.
    """
    found = [math.inf]
    with suppress(OSError, KeyError, ValueError):
        found.append(1024.0 * _numbers(Path("/proc/meminfo"))["MemAvailable:"])
    with suppress(OSError, KeyError, ValueError):
        group = Path("/sys/fs/cgroup")
        limit, used = (float((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        found.append(limit - used + _numbers(group / "memory.stat")["inactive_file"])
    return max(0.0, min(found))


def _numbers(path: Path) -> dict[str, float]:
    """Return the first number of each line by the word before it."""
    return {word[0]: float(word[1]) for word in map(str.split, path.read_text().splitlines())}


def num_checkpoints(settings: Settings, done: int) -> int:
    """Return how many checkpoints a run that begins after `done` steps has on the disk at a time, at most.

    With --keep one more is there while it is written, and the best. Of those by time, whose number nobody
    knows, it is one. Each held-out loss may be a new best.
    """
    every, steps = settings.every, settings.steps
    if steps <= done:
        return 0
    before_and_end = steps // every - done // every if every else 0
    at_end = settings.save and not (every and steps % every == 0)
    found = before_and_end + at_end + (settings.every_s > 0)
    evaluated, each = bool(settings.eval_data), settings.eval_every
    if evaluated and settings.save and each:
        found += sum(1 for step in range(done - done % each + each, steps, each) if not every or step % every)
    return min(found, settings.keep + 1 + evaluated) if settings.keep else found
