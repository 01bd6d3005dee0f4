"""The clock that all ranks of a run go by: the monotonic one of the rank that reports.

Hosts count their monotonic seconds from different moments, and not equally fast. A rank asks for the time
there and back; half of the shortest such round trip is how far its clock can be off (Cristian, "Probabilistic
clock synchronization", Distributed Computing 1989, section 4). Asked again after a while, the difference of
both answers is the drift. Ranks that read one clock are off by exactly nothing.
"""

import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from hetpipe.training.meeting import LEAD_S, gather, meeting_with

ROUND_TRIPS = 8
AGAIN_S = 60.0
"""After so long the clocks are compared again: one part in ten thousand, more than any drifts, is 6 ms."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What a rank's clock is behind the common one at a moment, and how far that may be off."""

    at_s: float
    offset_s: float
    error_s: float


@dataclass(slots=True)
class CommonClock:
    """How a rank's monotonic clock and the common one belong together.

    lead_s: so far ahead lies the common start of a step, so that every rank hears of it before.
    """

    first: int
    rank: int
    others: tuple[int, ...] = ()
    lead_s: float = LEAD_S
    drift: float = 0.0
    reading: Reading = field(default_factory=lambda: Reading(0.0, 0.0, 0.0))

    @classmethod
    def of_all(cls, first: int = 0) -> "CommonClock":
        """Compare the clocks of all ranks, which call this together; first: the rank whose clock counts."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        clocks = gather(clock_of_host())
        others = tuple(other for other, clock in enumerate(clocks) if clock != clocks[first])
        made = cls(first, rank, others)
        made.compare()
        return made

    def common_s(self, own_s: float) -> float:
        """Return the common time of a moment of the own clock."""
        if self.rank not in self.others:
            return own_s
        return own_s + self.reading.offset_s + self.drift * (own_s - self.reading.at_s)

    def own_s(self, common_s: float) -> float:
        """Return the moment of the own clock at a common time."""
        if self.rank not in self.others:
            return common_s
        since_s = (common_s - self.reading.offset_s - self.reading.at_s) / (1 + self.drift)
        return self.reading.at_s + since_s

    def start_s(self) -> float:
        """Return, on the common clock, when all ranks begin the next step."""
        return float(max(gather(self.common_s(time.monotonic())))) + self.lead_s

    @property
    def figures(self) -> tuple[float, float, float]:
        """Return the seconds that the own clock is behind, how they grow a second, and their error."""
        return self.reading.offset_s, self.drift, self.reading.error_s

    @property
    def is_due(self) -> bool:
        """Whether it is time to compare the clocks again."""
        return self.rank in self.others and time.monotonic() - self.reading.at_s > AGAIN_S

    def compare(self) -> None:
        """Compare the clocks, on all ranks together.

        Raises: PeerError if a rank does not come in time, or is gone.
        """
        if not self.others:
            return
        for other in self.others:
            with meeting_with(f"the clock of rank {other if self.rank == self.first else self.first}"):
                if self.rank == self.first:
                    self._answer(other)
                elif self.rank == other:
                    self._take(self._asked())
        longest_s = max(2 * error_s for error_s in gather(self.reading.error_s))
        self.lead_s = LEAD_S + 2 * longest_s

    def _answer(self, other: int) -> None:
        now = torch.zeros(1, dtype=torch.float64)
        for _ in range(ROUND_TRIPS):
            dist.recv(now, other)
            dist.send(now.fill_(time.monotonic()), other)

    def _asked(self) -> Reading:
        found, now = [], torch.zeros(1, dtype=torch.float64)
        for _ in range(ROUND_TRIPS):
            begun_s = time.monotonic()
            dist.send(now, self.first)
            dist.recv(now, self.first)
            ended_s = time.monotonic()
            middle_s = (begun_s + ended_s) / 2
            found.append(Reading(middle_s, float(now) - middle_s, (ended_s - begun_s) / 2))
        return min(found, key=lambda reading: reading.error_s)

    def _take(self, new: Reading) -> None:
        before = self.reading
        if before.at_s:
            self.drift = (new.offset_s - before.offset_s) / (new.at_s - before.at_s)
        self.reading = new


def clock_of_host() -> str:
    """Return what is the same for all processes that read one monotonic clock: its boot and namespace."""
    names = []
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/timens_offsets"):
        try:
            names.append(Path(path).read_text().strip())
        except OSError:
            names.append("")
    return "/".join(names)
