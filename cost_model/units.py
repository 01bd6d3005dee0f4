"""Sizes, rates and times as people write them, and back; inside the program all is bytes and seconds."""

import re
from collections.abc import Mapping
from fractions import Fraction

from cost_model.errors import InputError

# Exact numbers, so that "10 us" is the float nearest to 1e-5.
_PREFIXES = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_BYTES = {prefix + "B": factor for prefix, factor in (_PREFIXES | _BINARY).items()}
_RATES = {unit + "/s": factor for unit, factor in _BYTES.items()} | {
    prefix + "bit/s": Fraction(factor, 8) for prefix, factor in (_PREFIXES | _BINARY).items()
}
_MICRO = Fraction(1, 10**6)
_SECONDS: dict[str, int | Fraction] = {
    "s": 1,
    "ms": 1000 * _MICRO,
    "us": _MICRO,
    "µs": _MICRO,
    "ns": _MICRO / 1000,
    "min": 60,
    "h": 3600,
}
_QUANTITY = re.compile(r"\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE](?P<exponent>[-+]?\d+))?)\s*(?P<unit>\S*)\s*")
LONGEST_TEXT = 60
LARGEST_EXPONENT = 30
"""A quantity beyond it is none; the exact number of a large exponent alone fills the memory."""


def _parse(text: object, units: Mapping[str, int | Fraction], example: str) -> float:
    if not isinstance(text, str):
        raise InputError(f"{repr(text)[:LONGEST_TEXT]} has no unit; write it as text like {example!r}")
    if len(text) > LONGEST_TEXT:
        raise InputError(f"{text[:LONGEST_TEXT]!r}... is too long for a quantity; write it like {example!r}")
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise InputError(f"{text!r} is not a number with a unit; write it like {example!r}")
    if abs(int(match["exponent"] or 0)) > LARGEST_EXPONENT:
        raise InputError(f"{text!r} is out of range; write it like {example!r}")
    number, unit = Fraction(match[1]), match["unit"]
    if unit not in units:
        reason = f"unknown unit {unit!r}" if unit else "no unit"
        raise InputError(f"{text!r} has {reason}; write it like {example!r} (units: {', '.join(units)})")
    if number < 0:
        raise InputError(f"{text!r} is negative; give zero or more")
    return float(number * units[unit])


def parse_bytes(text: object) -> float:
    """Return bytes from text such as "40 GiB" or "800 MB".

    >>> parse_bytes("1.5 KiB")
    1536.0
    """
    return _parse(text, _BYTES, "40 GiB")


def parse_bandwidth(text: object) -> float:
    """Return bytes per second from text such as "10 Gbit/s" or "24 GB/s".

    >>> parse_bandwidth("8 Gbit/s")
    1000000000.0
    """
    return _parse(text, _RATES, "10 Gbit/s")


def parse_seconds(text: object) -> float:
    """Return seconds from text such as "50 us" or "0.2 ms".

    >>> parse_seconds("0.5 ms")
    0.0005
    """
    return _parse(text, _SECONDS, "50 us")


def parse_fraction_or_bytes(text: object, whole_bytes: float) -> float:
    """Return bytes from "10 %" of whole_bytes, or from a plain size.

    >>> parse_fraction_or_bytes("25 %", 8.0)
    2.0
    """
    if isinstance(text, str) and text.rstrip().endswith("%"):
        return whole_bytes * _parse(text, {"%": Fraction(1, 100)}, "10 %")
    return parse_bytes(text)


def format_bytes(num_bytes: float) -> str:
    """Format bytes for people, in binary units.

    >>> format_bytes(1536)
    '1.50 KiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.2f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.2f} TiB"


def format_seconds(seconds: float) -> str:
    """Format seconds for people, three significant digits.

    >>> format_seconds(0.01234)
    '12.3 ms'
    """
    if seconds == 0:
        return "0 s"
    return _in_unit(seconds, {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9})


def format_bandwidth(bytes_per_s: float) -> str:
    """Format bytes per second for people, in bits as networks are sold.

    >>> format_bandwidth(125e6)
    '1 Gbit/s'
    """
    return _in_unit(bytes_per_s * 8, {"Gbit/s": 1e9, "Mbit/s": 1e6, "kbit/s": 1e3, "bit/s": 1.0})


def format_number(number: float, digits: int) -> str:
    """Format a number for people, with so many significant digits and no exponent where it is large.

    >>> format_number(0.012345, 3), format_number(999.7, 3), format_number(890700.0, 4)
    ('0.0123', '1000', '890700')
    """
    text = f"{number:.{digits}g}"
    return f"{number:.0f}" if "e+" in text else text


def _in_unit(value: float, units: Mapping[str, float]) -> str:
    """Return a value in the largest unit of which it is one or more, once it is rounded; else in the last."""
    fitting = (unit for unit, factor in units.items() if float(f"{abs(value) / factor:.3g}") >= 1)
    unit = next(fitting, list(units)[-1])
    return f"{format_number(value / units[unit], 3)} {unit}"
