"""Times that options give: between checkpoints, of patience with a silent rank."""

import re

from cost_model.errors import InputError
from cost_model.units import parse_seconds

LEAST_WAIT_S, LONGEST_WAIT_S = 1.0, 30 * 86400.0
"""What `--timeout` may be; who asks for less or more has most likely mistaken the unit."""


def checkpoint_times(text: str) -> tuple[int, float]:
    """Return the steps, or the seconds, between checkpoints.

    >>> checkpoint_times("50"), checkpoint_times("10min")
    ((50, 0.0), (0, 600.0))

    Raises: InputError if it is neither.
    """
    if re.fullmatch("[0-9]{1,18}", text):
        return int(text), 0.0
    seconds = _seconds(text)
    if not 0 < seconds < float("inf"):
        raise InputError(f"--every is {text!r}; give steps, such as 50, or a time, such as 10min; 0 for none")
    return 0, seconds


def timeout_seconds(text: str) -> float:
    """Return the seconds that a rank waits for another.

    >>> timeout_seconds("2min")
    120.0

    Raises: InputError if it is no time of a second at least.
    """
    seconds = _seconds(text)
    if not LEAST_WAIT_S <= seconds <= LONGEST_WAIT_S:
        raise InputError(f"--timeout is {text!r}; give a time of at least 1 s, at most 30 days, such as 2min")
    return seconds


def _seconds(text: str) -> float:
    """Return the seconds of a time; 0, which no option takes, of what is none."""
    try:
        return parse_seconds(text)
    except InputError:
        return 0.0
