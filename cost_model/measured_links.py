"""What messages and all-reduces were measured to take, by their size."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from pydantic import ConfigDict

from cost_model.cluster import Link
from cost_model.errors import InputError
from cost_model.strict_files import STRICT


@dataclass(frozen=True, slots=True)
class MeasuredLink(Link):
    """A link whose occupancy was measured at some sizes of messages.

    occupied_s: seconds for which a message of each of message_bytes occupies the link, latency left out.
    bandwidth_bytes_per_s: of what a message is larger than the largest of them.
    standard_error: relative, of the median that latency_s is; None where it is not known.
    calibrated: taken from a run over the very links, so that it counts where it is faster than the file, too.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    message_bytes: tuple[int, ...] = ()
    occupied_s: tuple[float, ...] = ()
    standard_error: float | None = None
    calibrated: bool = False

    def __post_init__(self) -> None:
        Link.__post_init__(self)  # super() does not know the class that slots make anew
        _check_by_size("message_bytes", self.message_bytes, "occupied_s", self.occupied_s)
        if self.standard_error is not None and not self.standard_error >= 0:
            raise InputError(f"standard_error is {self.standard_error}; give zero or more")

    def occupancy_s(self, num_bytes: float) -> float:
        """Return seconds for which one message occupies the link: linear between sizes, proportional below.

        >>> link = MeasuredLink(1.0, 4.0, message_bytes=(8, 16), occupied_s=(2.0, 6.0))
        >>> [link.occupancy_s(size) for size in (4, 8, 12, 16, 20)]
        [1.0, 2.0, 4.0, 6.0, 7.0]
        """
        sizes, seconds = self.message_bytes, self.occupied_s
        if not sizes:
            return num_bytes / self.bandwidth_bytes_per_s
        if num_bytes >= sizes[-1]:
            return seconds[-1] + (num_bytes - sizes[-1]) / self.bandwidth_bytes_per_s
        if num_bytes <= sizes[0]:
            return seconds[0] * (num_bytes / sizes[0])
        return _between(sizes, seconds, num_bytes)


@dataclass(frozen=True, slots=True)
class MeasuredAllReduce:
    """Seconds of an all-reduce between devices of these kinds, by the bytes that each of them gives."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    kinds: tuple[str, ...]
    message_bytes: tuple[int, ...]
    duration_s: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.kinds) < 2:
            raise InputError(f"kinds {list(self.kinds)} must name at least two devices, one kind for each")
        if not self.message_bytes:
            raise InputError("message_bytes [] must hold at least one size")
        _check_by_size("message_bytes", self.message_bytes, "duration_s", self.duration_s)

    def sum_s(self, num_bytes: float) -> float:
        """Return seconds for num_bytes: linear between the sizes, never below the smallest's.

        Beyond the largest size the last segment goes on, never falling; with one size, proportional.

        >>> pair = MeasuredAllReduce(("cpu", "cpu"), (8, 16), (2.0, 3.0))
        >>> [pair.sum_s(size) for size in (1, 8, 12, 32)]
        [2.0, 2.0, 2.5, 5.0]
        """
        sizes, seconds = self.message_bytes, self.duration_s
        if num_bytes <= sizes[0]:
            return seconds[0]
        if num_bytes < sizes[-1]:
            return _between(sizes, seconds, num_bytes)
        if len(sizes) == 1:
            return seconds[0] * (num_bytes / sizes[0])
        slope = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
        return seconds[-1] + max(0.0, slope) * (num_bytes - sizes[-1])


def slower(link: Link, measured: Link | None) -> Link:
    """Return the larger of the file's and the measured latency, and occupancy at each measured size.

    What a run has calibrated stands as it is.
    """
    if measured is None:
        return link
    if isinstance(measured, MeasuredLink) and measured.calibrated:
        return measured
    latency_s = max(link.latency_s, measured.latency_s)
    bandwidth = min(link.bandwidth_bytes_per_s, measured.bandwidth_bytes_per_s)
    if not isinstance(measured, MeasuredLink):
        return Link(latency_s, bandwidth)
    in_file = tuple(map(link.occupancy_s, measured.message_bytes))
    occupied = tuple(map(max, measured.occupied_s, in_file))
    if occupied == in_file and bandwidth == link.bandwidth_bytes_per_s:
        return Link(latency_s, bandwidth)
    return MeasuredLink(latency_s, bandwidth, measured.message_bytes, occupied)


def _between(sizes: Sequence[int], seconds: Sequence[float], num_bytes: float) -> float:
    """Interpolate between the two sizes around num_bytes, which lies between the first and the last."""
    upper = bisect_left(sizes, num_bytes)
    share = (num_bytes - sizes[upper - 1]) / (sizes[upper] - sizes[upper - 1])
    return seconds[upper - 1] + share * (seconds[upper] - seconds[upper - 1])


def _check_by_size(sizes_key: str, sizes: Sequence[int], key: str, seconds: Sequence[float]) -> None:
    if (sizes and sizes[0] < 1) or any(b <= a for a, b in pairwise(sizes)):
        raise InputError(f"{sizes_key} {list(sizes)} must rise, from 1 up")
    if len(seconds) != len(sizes):
        raise InputError(f"{key} has {len(seconds)} entries for {len(sizes)} {sizes_key}")
    for value in seconds:
        if not 0 <= value < float("inf"):
            raise InputError(f"{key} holds {value}; give zero or more seconds")
