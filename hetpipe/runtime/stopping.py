"""Signals that end training in good order: the step at hand is finished, and a checkpoint written, first."""

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing import forkserver, resource_tracker
from typing import NoReturn

from hetpipe.runtime.scratch import place_sockets

ASKING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
"""A scheduler's at the end of a job (SIGTERM), its warning before that (SIGUSR1), and Ctrl-C."""
_SENT_TO_ALL = (*ASKING, signal.SIGHUP)


class Stopping:
    """What signals have asked of this process.

    number: of the signal after which training ends, None while there was none. begun: whether a step is over,
    so that there is something to keep; before, every signal ends the process at once. at_once: whether one
    has done so.
    """

    def __init__(
        self, say: Callable[[str], None] = lambda name: None, *, outlives_terminal: bool = False
    ) -> None:
        """Ask for nothing yet; say: called with the name of the signal once there was one.

        outlives_terminal: whether SIGHUP, of a closed terminal, asks as the others do; else it ends at once.
        """
        self.number: int | None = None
        self.begun = self.at_once = False
        self._say = say
        self._outlives_terminal = outlives_terminal

    @property
    def asked(self) -> bool:
        """Whether training is to end."""
        return self.number is not None

    def hear(self, number: int, _frame: object = None) -> None:
        """Take a signal: remember it, or end at once.

        Raises: KeyboardInterrupt or SystemExit where there is nothing to wait for, at SIGHUP where nobody
        goes on without a terminal, and at Ctrl-C after another signal.
        """
        is_final = number == signal.SIGHUP and not self._outlives_terminal
        hurried = is_final or (self.asked and number == signal.SIGINT)
        if hurried or not self.begun:
            self.at_once = True
            _leave(number)
        self.ask(number)

    def ask(self, number: int, where: str = "") -> None:
        """Ask training to end, as the signal of that number does; where: "", or the host that got it."""
        if not self.asked:
            self.number = number
            with contextlib.suppress(RuntimeError):  # the stream was being written to
                self._say(f"{signal.Signals(number).name}{where}")

    def end(self) -> None:
        """End the process, if a signal has asked for it, now that all is kept."""
        if self.number is not None:
            _leave(self.number)


def _leave(number: int) -> NoReturn:
    """End the process as an exit does, so that nothing is left behind; with 128 + number, as shells say."""
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(128 + number)


@contextlib.contextmanager
def signals_heard(
    say: Callable[[str], None] = lambda name: None, *, outlives_terminal: bool = False
) -> Iterator[Stopping]:
    """Let signals ask training to end; say, outlives_terminal: as for `Stopping`.

    Where it does not outlive its terminal, SIGHUP ends the process at once, leaving nothing behind.

    Where somebody else handles them, or in another thread than the main one, nothing is changed.
    """
    stopping = Stopping(say, outlives_terminal=outlives_terminal)
    before = {}
    if threading.current_thread() is threading.main_thread():
        usual = (signal.SIG_DFL, signal.default_int_handler)
        found = {number: signal.getsignal(number) for number in _SENT_TO_ALL}
        before = {number: handler for number, handler in found.items() if handler in usual}
    for number in before:
        signal.signal(number, stopping.hear)
    try:
        yield stopping
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def start_deaf_forkserver() -> None:
    """Start the server that forks the ranks so that no signal but SIGKILL ends it.

    A scheduler sends its signals to all processes of a job, as a terminal that is closed does, and the
    launcher answers for all. Blocked signals stay so in what is started meanwhile; one that comes now reaches
    this process afterwards.

    NOTE: to start the resource tracker unblocks some of them (Python 3.11), so that comes first.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SENT_TO_ALL)
    try:
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, _SENT_TO_ALL)
        place_sockets()
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_signals_to_launcher() -> None:
    """Ignore, as a rank, what the launcher answers."""
    for number in _SENT_TO_ALL:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SENT_TO_ALL)
