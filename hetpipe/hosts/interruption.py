"""Interrupting the main thread of a launcher from the thread that hears of an end elsewhere."""

import signal
import threading
from types import FrameType

_NUMBER = signal.SIGUSR2


class Interrupted(BaseException):
    """Raised in the main thread, wherever it is; who raised it knows why."""


class Interruption:
    """Lets other threads interrupt the main one, between `begin` and `end`.

    In other threads than the main one nothing can be: they are told when they next look.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: int | None = None
        self._before: object = None

    def begin(self) -> None:
        """Allow interruptions of this thread, if it is the main one."""
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(_NUMBER, self._raise)
            with self._lock:
                self._thread = threading.get_ident()

    def end(self) -> None:
        """Allow none any more; one that is on its way is dropped."""
        if self._thread is not None:
            with self._lock:
                self._thread = None
            signal.signal(_NUMBER, self._before)  # type: ignore[arg-type]

    def interrupt(self) -> None:
        """Raise `Interrupted` in the main thread, if that is allowed."""
        with self._lock:
            if self._thread is not None:
                signal.pthread_kill(self._thread, _NUMBER)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        if self._thread is not None:
            raise Interrupted
