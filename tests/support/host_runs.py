"""The same `hetpipe run` on each of three hosts, none of which sees a folder of another."""

import contextlib
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cost_model.profile import profile_text
from hetpipe.profiling.merging import merge
from hetpipe.runs.run_folder import RunFolder
from places import ROOT
from runs import made_up_profile
from three_hosts import Host, three_hosts
from warm_starts import warm_python

NODES = ("big", "mid", "small")
TOKEN = "0123456789abcdef" * 2
SOON_S = 400.0  # a loaded machine starts six processes, which measure links too
_NODE = """
[[nodes]]
name = "{name}"
host = "{host}"
devices = [{{ kind = "{kind}", memory = "1 GiB", count = {count}, speed = 0.2 }}]
"""
_CLUSTER = """
name = "three"
[network]
bandwidth = "100 Mbit/s"
latency = "0.2 ms"
"""
_LINKS = tempfile.TemporaryDirectory(prefix="hetpipe-test-links-")
_TINY = "--model bert-tiny --sequence-length 16 --global-batch-size 8 --profile-budget 1"
LINE = f"{_TINY} --cluster cluster.toml --token-file token --trust-network --strategy gpipe-even"
ALONE = f"{_TINY} --cluster one.toml --strategy single"
"""The same on one device, in one process."""


def cluster_text(hosts: Sequence[Host]) -> str:
    """Two devices on the first host, one on each other; the last of another kind, which only it measures."""
    shapes = (("emulated", 2), ("emulated", 1), ("emulated-slow", 1))
    return _CLUSTER + "".join(
        _NODE.format(name=name, host=host.address, kind=kind, count=count)
        for name, host, (kind, count) in zip(NODES, hosts, shapes, strict=True)
    )


@dataclass(frozen=True)
class Ended:
    """How one host's command ended."""

    code: int
    out: str
    err: str


@dataclass
class Runs:
    """Three hosts, each with a folder of its own, and the commands that run there."""

    hosts: tuple[Host, ...]
    folders: tuple[Path, ...]
    started: "list[subprocess.Popen[str]]"

    def start(self, line: str, *, options: Sequence[str] = ("", "", ""), command: str = "run") -> None:
        """Start a line on all hosts; options: more of it for each."""
        for index, option in enumerate(options):
            self.start_on(index, f"{line} {option}", command=command)

    def start_on(self, index: int, line: str, *, command: str = "run") -> None:
        """Start a line on one host."""
        words = [command, "--node", NODES[index], *line.split()]
        self._start(index, *warm_python(), "-m", "hetpipe", *words)

    def start_here(self, line: str) -> None:
        """Start a line on the first host alone."""
        self._start(0, *warm_python(), "-m", "hetpipe", "run", "--node", NODES[0], *line.split())

    def start_by_torchrun(self, line: str, processes: Sequence[int] = (2, 1, 1)) -> None:
        """Start a line on all hosts by agents of torchrun, each of which starts so many processes."""
        meeting = f"{self.hosts[0].address}:29400"
        for index, count in enumerate(processes):
            agent = ["-m", "torch.distributed.run", "--nnodes", str(len(processes)), "--nproc-per-node"]
            agent += [str(count), "--rdzv-backend", "c10d", "--rdzv-endpoint", meeting, "--rdzv-id", "test"]
            words = ["--no-python", "--", *warm_python(), "-m", "hetpipe", "run", *line.split()]
            if self.hosts[index].namespace is None:  # all have the same name
                agent += ["--local-addr", self.hosts[index].address]
                words += ["--node", NODES[index]]
            self._start(index, *warm_python(), *agent, *words)

    def _start(self, index: int, *command: str) -> None:
        folder = self.folders[index]
        own = {"XDG_CACHE_HOME": str(folder / "cache"), "TMPDIR": str(folder), "PYTHONPATH": str(ROOT)}
        self.started.append(self.hosts[index].start(*command, folder=folder, environment=own))

    def ends(self, *codes: int) -> list[Ended]:
        """Wait until all have ended, with these codes."""
        found = []
        for process in self.started:
            out, err = process.communicate(timeout=SOON_S)
            found.append(Ended(process.returncode, out, err))
        self.started.clear()
        assert tuple(ended.code for ended in found) == codes, "\n".join(ended.err for ended in found)
        return found

    def give_profile(self, layer_s: float, *, sequence_length: int = 16) -> str:
        """Give every host a profile of times that are made up; return the option that names it.

        For tests of other things than measuring, which takes each host a while.
        """
        profile = merge(
            [made_up_profile("bert-tiny", kind, layer_s) for kind in ("emulated", "emulated-slow")]
        )
        for folder in self.folders:
            text = profile_text(replace(profile, sequence_length=sequence_length))
            (folder / "made-up.json").write_text(text)
        return "--profile made-up.json"

    def wait_for_step(self, folder: RunFolder, step: int) -> None:
        """Wait until the leader has written the metrics of a step."""
        self.wait_until(lambda: len(folder.read_metrics()) >= step)

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Wait for something that happens while all commands run."""
        end_s = time.monotonic() + SOON_S
        while not is_so():
            ended = [process.args for process in self.started if process.poll() is not None]
            assert not ended, [process.communicate() for process in self.started]
            assert time.monotonic() < end_s
            time.sleep(0.1)


@contextlib.contextmanager
def hosts_with_folders(path: Path, *, fresh: bool = False) -> Iterator[Runs]:
    """Make three hosts, and a folder with a cluster file and the token for each.

    fresh: the leader does not know the links from tests before, as it else does to save time.
    """
    with three_hosts() as hosts:
        folders = tuple(path / host.name for host in hosts)
        for folder in folders:
            folder.mkdir()
            (folder / "cluster.toml").write_text(cluster_text(hosts))
            (folder / "token").write_text(TOKEN)
            (folder / "token").chmod(0o600)
        if not fresh:
            known = folders[0] / "cache" / "hetpipe" / "links"
            known.parent.mkdir(parents=True)
            known.symlink_to(_LINKS.name)
        runs = Runs(hosts, folders, [])
        try:
            yield runs
        finally:
            for process in runs.started:
                process.kill()
                process.communicate()
