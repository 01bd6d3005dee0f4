"""Starting the other hosts of a run by ssh: argument lists without a shell here, quoted words there.

The token goes over standard input, never into an argument; when this launcher ends, however it does, that
input ends, and the launchers there end with it.
"""

import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from cost_model.cluster import Node
from cost_model.errors import InputError
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


def rendezvous_text(address: Address) -> str:
    """Return the rendezvous at an address.

    >>> rendezvous_text(("10.0.0.1", 29500)), rendezvous_text(("fd00::1", 1))
    ('tcp://10.0.0.1:29500', 'tcp://[fd00::1]:1')
    """
    host, port = address
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def remote_line(words: Sequence[str], folder: Path, environment: Mapping[str, str]) -> str:
    """Return the line that the shell of another host runs: hetpipe of the same Python, in the same folder."""
    given = [f"{name}={environment[name]}" for name in KEPT_VARIABLES if name in environment]
    command = shlex.join(["env", *given, sys.executable, "-m", "hetpipe", *words])
    return f"cd {shlex.quote(str(folder))} && exec {command}"


def ssh_command(host: str, line: str, config: Path | None) -> list[str]:
    """Return the arguments of ssh; it asks nothing, and its checks of hosts stay as they are."""
    options = ["-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=10"]
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


class RemoteHosts:
    """The launchers that were started on other hosts; a context: they end with it."""

    def __init__(self, launch: Launch, token: bytes, tell: Callable[[str], None]) -> None:
        """Prepare; tell: takes what they print."""
        self._launch, self._token, self._tell = launch, token, tell
        self._started: list[subprocess.Popen[bytes]] = []
        self._lock = threading.Lock()
        self._closing = threading.Event()

    def __enter__(self) -> Self:
        return self

    def start(self, address: Address, on_end: Callable[[str, str], bool]) -> None:
        """Start them all; they join the leader at an address.

        on_end: told of a node that has ended with an error, and how; gives whether to start it again.

        Raises: InputError without ssh.
        """
        rendezvous = rendezvous_text(address)
        for node in self._launch.nodes:
            given = self._launch.arguments
            words = launch_words(given, node.name, rendezvous, TOKEN_FROM_INPUT, [STARTS_NONE])
            line = remote_line(words, Path.cwd(), os.environ)
            command = ssh_command(str(node.host), line, self._launch.config)
            process = self._start(command)
            assert process is not None  # nobody has ended them yet
            arguments = (node, command, process, on_end)
            threading.Thread(target=self._keep, args=arguments, daemon=True).start()

    def _start(self, command: Sequence[str]) -> "subprocess.Popen[bytes] | None":
        """Start one, and give it the token; None if all are to end."""
        with self._lock:
            if self._closing.is_set():
                return None
            try:
                process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C here is answered here
                )  # fmt: skip
            except OSError as error:
                raise InputError(
                    f"--hosts needs ssh, which cannot be started ({error.strerror}); install "
                    "openssh-client, or start the lines of --print-launch by hand"
                ) from None
            self._started.append(process)
        assert process.stdin is not None
        with suppress(OSError):  # how it ended is told by `_keep`
            process.stdin.write(self._token + b"\n")
            process.stdin.flush()
        return process

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _keep(
        self,
        node: Node,
        command: Sequence[str],
        process: "subprocess.Popen[bytes] | None",
        on_end: Callable[[str, str], bool],
    ) -> None:
        """Listen to a launcher until it ends, and to those that are started after it."""
        last = ""
        while process is not None:
            last = self._heard(node, process, last)
            code = process.wait()
            if not code or self._closing.is_set():
                return
            how = f"{node.name} ({node.host}) ended with code {code}: {last or 'no word'}"
            if not on_end(node.name, how) or code == _REFUSED or self._closing.wait(AGAIN_S):
                return
            with suppress(InputError):  # there was an ssh
                process = self._start(command)

    def _heard(self, node: Node, process: "subprocess.Popen[bytes]", said: str) -> str:
        """Tell what a launcher prints until it ends, but not what was said last before; return the last."""
        assert process.stdout is not None
        last = ""
        for raw in process.stdout:
            line = raw.decode("utf-8", "replace").rstrip()
            if line:
                last = line
                if line != said:
                    self._tell(f"[{node.name}] {line}")
        return last

    def _end(self) -> None:
        """Wait for the launchers there, which end with the run; end those that do not."""
        with self._lock:
            self._closing.set()
        for process in self._started:
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


def end_with_input() -> None:
    """End this process when its standard input does: when the launcher that started it by ssh is gone.

    NOTE: read by its number: a thread that is in `sys.stdin` holds a lock that Python's end needs.
    """
    import signal

    descriptor = sys.stdin.fileno()

    def watch() -> None:
        with suppress(OSError):  # of a terminal that is gone
            while os.read(descriptor, _SOME_BYTES):
                pass
        os.kill(os.getpid(), signal.SIGHUP)

    threading.Thread(target=watch, daemon=True).start()
