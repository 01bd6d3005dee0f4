"""The CPU seconds that this process and all others of the host use."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class HostLoad:
    """The CPU use of this host between two points in time, by process group; owns its counters."""

    def __init__(self) -> None:
        self._start_s = time.monotonic()
        self._host_s = _host_cpu_s()
        self._process_s = time.process_time()

    def lap(self) -> tuple[float, float, float]:
        """Return (wall seconds, host CPU seconds, own CPU seconds) since the last lap."""
        now = (time.monotonic(), _host_cpu_s(), time.process_time())
        result = (now[0] - self._start_s, now[1] - self._host_s, now[2] - self._process_s)
        self._start_s, self._host_s, self._process_s = now
        return result

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Leave what is done inside the context out of the lap."""
        before = (time.monotonic(), _host_cpu_s(), time.process_time())
        yield
        self._start_s += time.monotonic() - before[0]
        self._host_s += _host_cpu_s() - before[1]
        self._process_s += time.process_time() - before[2]


def _host_cpu_s() -> float:
    """Return the CPU seconds that all processes of the host have used; 0 where the kernel does not tell."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return 0.0
    user, nice, system, _idle, _iowait, irq, softirq = map(int, fields[:7])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")
