"""Starting the other hosts of a run by ssh: argument lists without a shell here, quoted words there.

The token goes over standard input, never into an argument; when this launcher ends, however it does, that
input ends, and the launchers there end with it.
"""

import os
import shlex
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from cost_model.cluster import Node
from cost_model.errors import InputError
from hetpipe.hosts.rendezvous import Rendezvous
from hetpipe.trust.channel import Address

TOKEN_FROM_INPUT = "-"
"""The --token-file of a launcher that is told the token over its standard input."""
KEPT_VARIABLES = ("HF_HUB_OFFLINE", "HETPIPE_DEBUG", "OMP_NUM_THREADS", "PYTHONPATH", "XDG_CACHE_HOME")
"""Of this host's environment; no other variable is sent, least of all one that holds a secret."""
ENDING_S = 15.0
AGAIN_S = 5.0
"""So long after it has ended is a launcher that is let in again started again."""
_REFUSED = 2
"""The exit code of a launcher that would be refused again."""
_OF_SSH = 255
"""The exit code of ssh where it has none of the command there."""
_ERROR = "error: "
"""How the last line of a hetpipe begins that ends with an error."""
_SOME_BYTES = 4096
_OWN_OPTIONS = {"--rendezvous": 1, "--node": 1, "--token-file": 1, "--ssh-config": 1}
_OWN_FLAGS = ("--hosts", "--print-launch", "--json")
STARTS_NONE = "--no-hosts"
"""Said to each host that is started from another one: a run file that both read may say `hosts = true`."""


def launch_words(
    arguments: Sequence[str], node: str, rendezvous: str, token_file: str, taken_back: Sequence[str] = ()
) -> list[str]:
    """Return the arguments of hetpipe for another host: those given here, with its own place.

    taken_back: options that say the opposite of what a run file says, which is read there too.

    >>> launch_words(["run", "--hosts", "--model", "bert-tiny", "--node=a"], "b", "tcp://a:1", "-")[1:7]
    ['--model', 'bert-tiny', '--rendezvous', 'tcp://a:1', '--node', 'b']
    """
    kept, left_out = [], 0
    for word in arguments:
        if left_out:
            left_out -= 1
        elif word in _OWN_OPTIONS:
            left_out = _OWN_OPTIONS[word]
        elif word.partition("=")[0] not in _OWN_OPTIONS and word not in _OWN_FLAGS:
            kept.append(word)
    return [*kept, "--rendezvous", rendezvous, "--node", node, "--token-file", token_file, *taken_back]


def remote_line(words: Sequence[str], folder: Path, environment: Mapping[str, str]) -> str:
    """Return the line that the shell of another host runs: hetpipe of the same Python, in the same folder."""
    given = [f"{name}={environment[name]}" for name in KEPT_VARIABLES if name in environment]
    command = shlex.join(["env", *given, sys.executable, "-m", "hetpipe", *words])
    return f"cd {shlex.quote(str(folder))} && exec {command}"


def ssh_command(host: str, line: str, config: Path | None) -> list[str]:
    """Return the arguments of ssh; it asks nothing, and its checks of hosts stay as they are.

    What it says is errors alone: no banner of the host, nor that a key was added.
    """
    options = ["-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=10"]
    options += ["-o", "LogLevel=ERROR"]
    return ["ssh", *(["-F", str(config)] if config is not None else []), *options, "--", host, line]


@dataclass(frozen=True, slots=True)
class Launch:
    """What is started on other hosts. arguments: of this command; config: of ssh, None for the user's."""

    nodes: tuple[Node, ...]
    arguments: tuple[str, ...]
    config: Path | None

    def check(self) -> None:
        """Check that the host of each node is known; InputError for one that is not."""
        for node in self.nodes:
            if node.host is None:
                raise InputError(
                    f"--hosts: node {node.name!r} has no `host` in the cluster file; give it one, or start "
                    "the line there by hand (--print-launch)"
                )

    def lines(self, rendezvous: str, token_file: str, taken_back: Sequence[str]) -> list[str]:
        """Return the lines to paste on each host; taken_back: as `launch_words`."""
        lines = []
        for node in self.nodes:
            words = ["hetpipe", *launch_words(self.arguments, node.name, rendezvous, token_file, taken_back)]
            lines += [f"# on {node.host or node.name}", shlex.join(words)]
        return lines


@dataclass(frozen=True, slots=True)
class _Started:
    """One ssh and the launcher that it runs; words: those of ssh itself, apart from what is said there."""

    process: "subprocess.Popen[bytes]"
    words: "tempfile._TemporaryFileWrapper[bytes]"

    @classmethod
    def of(cls, command: Sequence[str]) -> "_Started":
        """Start it.

        Raises: OSError if there is no ssh.
        """
        words = tempfile.NamedTemporaryFile()  # noqa: SIM115 - ssh, which takes no descriptor, writes into it
        ssh, *rest = command
        process = subprocess.Popen(
            [ssh, "-E", words.name, *rest],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C here is answered here
        )  # fmt: skip
        return cls(process, words)

    def own_words(self) -> list[str]:
        """Return the lines that ssh itself has said, once it has ended."""
        with self.words as words:
            words.seek(0)
            return list(_lines(words))

    def reason(self, said: str, own: Sequence[str]) -> str:
        """Return why it has ended, as hetpipe says there, or ssh, or else who was the last to say something.

        said: what `RemoteHosts._heard` gives. own: of `own_words`.
        """
        if self.process.returncode == _OF_SSH and not said.startswith(_ERROR):
            return own[-1] if own else "the connection was lost, or it was killed there"
        return said or "no word"


class RemoteHosts:
    """The launchers that were started on other hosts; a context: they end with it."""

    def __init__(self, launch: Launch, token: bytes, tell: Callable[[str], None]) -> None:
        """Prepare; tell: takes what they print."""
        self._launch, self._token, self._tell = launch, token, tell
        self._started: list[_Started] = []
        self._lock = threading.Lock()
        self._closing = threading.Event()

    def __enter__(self) -> Self:
        return self

    def start(self, address: Address, on_end: Callable[[str, str], bool]) -> None:
        """Start them all; they join the leader at an address.

        on_end: told of a node that has ended with an error, and how; gives whether to start it again.

        Raises: InputError without ssh.
        """
        rendezvous = str(Rendezvous(address))
        for node in self._launch.nodes:
            given = self._launch.arguments
            words = launch_words(given, node.name, rendezvous, TOKEN_FROM_INPUT, [STARTS_NONE])
            line = remote_line(words, Path.cwd(), os.environ)
            command = ssh_command(str(node.host), line, self._launch.config)
            started = self._start(command)
            assert started is not None  # nobody has ended them yet
            arguments = (node, command, started, on_end)
            threading.Thread(target=self._keep, args=arguments, daemon=True).start()

    def _start(self, command: Sequence[str]) -> _Started | None:
        """Start one, and give it the token; None if all are to end."""
        with self._lock:
            if self._closing.is_set():
                return None
            try:
                started = _Started.of(command)
            except OSError as error:
                raise InputError(
                    f"--hosts needs ssh, which cannot be started ({error.strerror}); install "
                    "openssh-client, or start the lines of --print-launch by hand"
                ) from None
            self._started.append(started)
        given = started.process.stdin
        assert given is not None
        with suppress(OSError):  # how it ended is told by `_keep`
            given.write(self._token + b"\n")
            given.flush()
        return started

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _keep(
        self,
        node: Node,
        command: Sequence[str],
        started: _Started | None,
        on_end: Callable[[str, str], bool],
    ) -> None:
        """Listen to a launcher until it ends, and to those that are started after it."""
        said, own = "", list[str]()
        while started is not None:
            said = self._heard(node, started.process, said)
            code = started.process.wait()
            own, before = started.own_words(), own
            if not code or self._closing.is_set():
                return
            for line in own if own != before else []:
                self._tell(f"[{node.name}] {line}")
            how = f"{node.name} ({node.host}) ended with code {code}: {started.reason(said, own)}"
            if not on_end(node.name, how) or code == _REFUSED or self._closing.wait(AGAIN_S):
                return
            started = None
            with suppress(InputError):  # there was an ssh
                started = self._start(command)

    def _heard(self, node: Node, process: "subprocess.Popen[bytes]", said: str) -> str:
        """Tell what is printed there until it ends, but not what was said last before.

        Returns the error that hetpipe has ended with there, else the last line.
        """
        assert process.stdout is not None
        last = ""
        with process.stdout as words:
            for line in _lines(words):
                if line.startswith(_ERROR) or not last.startswith(_ERROR):
                    last = line
                if line != said:
                    self._tell(f"[{node.name}] {line}")
        return last

    def _end(self) -> None:
        """Wait for the launchers there, which end with the run; end those that do not."""
        with self._lock:
            self._closing.set()
        for process in [started.process for started in self._started]:
            with suppress(subprocess.TimeoutExpired):
                process.wait(ENDING_S)
            assert process.stdin is not None
            with suppress(OSError):
                process.stdin.close()
            try:
                process.wait(ENDING_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _lines(words: Iterable[bytes]) -> Iterator[str]:
    """Yield the lines of what was said that are not empty."""
    for raw in words:
        if line := raw.decode("utf-8", "replace").rstrip():
            yield line


def end_with_input() -> None:
    """End this process when its standard input does: when the launcher that started it by ssh is gone.

    NOTE: read by its number: a thread that is in `sys.stdin` holds a lock that Python's end needs.
    """
    import signal

    descriptor = sys.stdin.fileno()
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # as below an sshd that nohup has started
        signal.signal(signal.SIGHUP, signal.SIG_DFL)

    def watch() -> None:
        with suppress(OSError):  # of a terminal that is gone
            while os.read(descriptor, _SOME_BYTES):
                pass
        os.kill(os.getpid(), signal.SIGHUP)

    threading.Thread(target=watch, daemon=True).start()
