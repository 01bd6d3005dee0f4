"""Three hosts on this machine: network namespaces with host names, addresses and shaped links of their own.

Where there are no namespaces (not root, or no `ip` and `tc`), plain processes on 127.0.0.1, .2 and .3.
"""

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

NAMES = ("h0", "h1", "h2")
RATES = ("1gbit", "1gbit", "100mbit")
_PREFIX = "hetpipe-test-"
_ETC = Path("/etc/netns")
_COUNT = itertools.count()
_AS_HOST = 'hostname "$0" && exec "$@"'


@dataclass(frozen=True)
class Host:
    """One of the hosts: its name, its address, and the interface that has it.

    namespace: its name, None for a plain process on loopback. port: its end of the link, at the switch.
    """

    name: str
    address: str
    interface: str
    namespace: str | None = None
    switch: str = ""
    port: str = ""

    def command(self, *command: str) -> list[str]:
        """Return the command line that runs a command on the host."""
        if self.namespace is None:
            return list(command)
        inside = ["unshare", "--uts", "--", "sh", "-c", _AS_HOST, self.name, *command]
        return ["ip", "netns", "exec", self.namespace, *inside]

    def start(
        self, *command: str, folder: Path, environment: Mapping[str, str] | None = None, **how: Any
    ) -> "subprocess.Popen[str]":
        """Start a command on the host, in a folder; its process id is that of the command."""
        how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **how}
        return subprocess.Popen(
            self.command(*command), cwd=folder, env={**os.environ, **(environment or {})}, **how
        )

    def run(self, *command: str) -> str:
        """Run a short command on the host and return what it prints."""
        return _run(*self.command(*command))

    def shape(self, rate: str, *, burst: str = "256kb") -> None:
        """Give the link another rate, each way; burst: what passes at once after a pause."""
        how = ("tbf", "rate", rate, "burst", burst, "latency", "50ms")
        _run("tc", "-n", str(self.namespace), "qdisc", "change", "dev", "eth0", "root", *how)
        _run("tc", "-n", self.switch, "qdisc", "change", "dev", self.port, "root", *how)

    def cut(self) -> None:
        """Take the link down, as a pulled cable does: nobody is told."""
        _run("ip", "-n", self.switch, "link", "set", self.port, "down")

    def mend(self) -> None:
        """Take the link up again."""
        _run("ip", "-n", self.switch, "link", "set", self.port, "up")

    def kill(self) -> None:
        """Kill every process of the host at once, as when its power fails."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def pids(self) -> list[int]:
        """Return the process ids of what runs on the host."""
        assert self.namespace is not None
        return [int(pid) for pid in _run("ip", "netns", "pids", self.namespace).split()]


@contextlib.contextmanager
def three_hosts(rates: Sequence[str] = RATES) -> Iterator[tuple[Host, ...]]:
    """Make the hosts, their links shaped to these rates, and remove them in the end."""
    if not has_namespaces():
        yield tuple(Host(name, f"127.0.0.{1 + i}", "lo") for i, name in enumerate(NAMES))
        return
    _remove_left_over()
    mark = f"{_PREFIX}{os.getpid()}-{next(_COUNT)}"
    hosts = tuple(
        Host(name, f"10.77.0.{10 + i}", "eth0", f"{mark}-{name}", f"{mark}-switch", f"v{i}")
        for i, name in enumerate(NAMES)
    )
    try:
        _connect(hosts, rates)
        yield hosts
    finally:
        for host in hosts:
            with contextlib.suppress(subprocess.CalledProcessError):
                host.kill()
        _remove(mark)


def _connect(hosts: Sequence[Host], rates: Sequence[str]) -> None:
    switch = hosts[0].switch
    known = "127.0.0.1 localhost\n" + "".join(f"{host.address} {host.name}\n" for host in hosts)
    _run("ip", "netns", "add", switch)
    _run("ip", "-n", switch, "link", "add", "bridge0", "type", "bridge")
    _run("ip", "-n", switch, "link", "set", "bridge0", "up")
    for host, rate in zip(hosts, rates, strict=True):
        assert host.namespace is not None
        _run("ip", "netns", "add", host.namespace)
        (_ETC / host.namespace).mkdir(parents=True)
        (_ETC / host.namespace / "hosts").write_text(known)
        inside = ("ip", "-n", host.namespace)
        pair = ("type", "veth", "peer", "name", "eth0", "netns", host.namespace)
        _run("ip", "-n", switch, "link", "add", host.port, *pair)
        _run("ip", "-n", switch, "link", "set", host.port, "master", "bridge0", "up")
        _run(*inside, "addr", "add", f"{host.address}/24", "dev", "eth0")
        _run(*inside, "link", "set", "eth0", "up")
        _run(*inside, "link", "set", "lo", "up")
        # what a host sends leaves its eth0, what it gets leaves the switch's end
        how = ("root", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms")
        _run("tc", "-n", host.namespace, "qdisc", "add", "dev", "eth0", *how)
        _run("tc", "-n", switch, "qdisc", "add", "dev", host.port, *how)


@cache
def has_namespaces() -> bool:
    """Return whether hosts of their own can be made here."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "tc", "unshare", "hostname"))):
        return False
    mark = f"{_PREFIX}{os.getpid()}-probe"
    host = Host("h0", "", "eth0", mark)
    try:
        _run("ip", "netns", "add", mark)
        (_ETC / mark).mkdir(parents=True)
        _run("ip", "-n", mark, "link", "add", "a0", "type", "veth", "peer", "name", "b0")
        _run("tc", "-n", mark, "qdisc", "add", "dev", "a0", "root", "tbf", "rate", "1gbit", "burst", "256kb",
             "latency", "50ms")  # fmt: skip
        return host.run("hostname").strip() == "h0"
    except (subprocess.CalledProcessError, OSError):
        return False
    finally:
        _remove(mark)


def _remove_left_over() -> None:
    """Remove the hosts of test runs that were killed."""
    for mark in {name.rpartition("-")[0] for name in _namespaces()}:
        pid = mark.removeprefix(_PREFIX).partition("-")[0]
        if pid.isdecimal() and not Path(f"/proc/{pid}").exists():
            _remove(mark)


def _remove(mark: str) -> None:
    for name in _namespaces():
        if name.startswith(mark):
            with contextlib.suppress(subprocess.CalledProcessError):  # another was faster
                Host(name, "", "", name).kill()
                _run("ip", "netns", "del", name)
    for folder in _ETC.glob(f"{mark}*"):
        shutil.rmtree(folder, ignore_errors=True)


def _namespaces() -> list[str]:
    found = _run("ip", "netns", "list").splitlines()
    return [line.split()[0] for line in found if line.startswith(_PREFIX)]


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
