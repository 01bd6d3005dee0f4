"""Lists of hosts and of counts as SLURM writes them: `gpu[01-03,7]`, `4(x2),1`."""

import re
from collections.abc import Iterator
from itertools import product

from cost_model.errors import InputError

MOST_HOSTS = 4096
"""A list that stands for more is refused."""
MOST_CHARACTERS = 100_000
_ENTRY = re.compile(r"(?:[A-Za-z0-9_.-]|\[[0-9,-]+\])+")
_PART = re.compile(r"\[([0-9,-]+)\]|([^\[\]]+)")
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")
_COUNT = re.compile(r"(\d{1,6})(?:\(x(\d{1,6})\))?")


def hosts_of_list(text: str) -> tuple[str, ...]:
    """Return the hosts that a list stands for, in its order (slurm.schedmd.com, `scontrol show hostnames`).

    >>> hosts_of_list("gpu[01-03,7],login")
    ('gpu01', 'gpu02', 'gpu03', 'gpu7', 'login')

    Raises: InputError if it is no such list, or stands for more than 4,096 hosts.
    """
    found: list[str] = []
    if len(text) > MOST_CHARACTERS:
        raise _refused(text)
    for entry in re.split(r",(?![^\[]*\])", text):
        if not _ENTRY.fullmatch(entry):
            raise _refused(text)
        parts = [
            list(_numbers(numbers, text)) if numbers else [plain] for numbers, plain in _PART.findall(entry)
        ]
        for chosen in product(*parts):
            found.append("".join(chosen))
            if len(found) > MOST_HOSTS:
                raise _refused(text)
    return tuple(found)


def _numbers(ranges: str, text: str) -> Iterator[str]:
    """Give the numbers of one pair of brackets, with the zeros that stand before the first of a range."""
    for part in ranges.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise _refused(text)
        first, last = match[1], match[2] or match[1]
        if not int(first) <= int(last) < int(first) + MOST_HOSTS:
            raise _refused(text)
        for number in range(int(first), int(last) + 1):
            yield f"{number:0{len(first)}}"


def counts_of_list(text: str) -> tuple[int, ...]:
    """Return the counts, one for each host, that a list stands for.

    >>> counts_of_list("4(x2),1")
    (4, 4, 1)

    Raises: InputError if it is no such list.
    """
    found: list[int] = []
    for part in text[:MOST_CHARACTERS].split(","):
        match = _COUNT.fullmatch(part)
        if match is None or len(found) + int(match[2] or 1) > MOST_HOSTS:
            raise _refused(text)
        found += [int(match[1])] * int(match[2] or 1)
    return tuple(found)


def _refused(text: str) -> InputError:
    shown = text if len(text) < 60 else f"{text[:57]}..."
    return InputError(
        f"{shown!r} is no list of hosts or counts as SLURM writes them; give --rendezvous on each host"
    )
