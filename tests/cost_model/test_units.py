"""Every unit that a file may use, by its value, and the refusal of others."""

import pytest

from cost_model.errors import InputError
from cost_model.units import parse_bandwidth, parse_bytes, parse_seconds

FACTORS = {
    "": 1,
    "k": 1e3,
    "K": 1e3,
    "M": 1e6,
    "G": 1e9,
    "T": 1e12,
    "Ki": 1024,
    "Mi": 1024**2,
    "Gi": 1024**3,
    "Ti": 1024**4,
}
SECONDS = {"s": 1, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9, "min": 60, "h": 3600}


@pytest.mark.parametrize(("prefix", "factor"), FACTORS.items())
def test_sizes_and_rates_have_decimal_and_binary_prefixes(prefix: str, factor: float) -> None:
    assert parse_bytes(f"3 {prefix}B") == 3 * factor
    assert parse_bandwidth(f"3 {prefix}B/s") == 3 * factor
    assert parse_bandwidth(f"16 {prefix}bit/s") == 2 * factor


@pytest.mark.parametrize(("unit", "seconds"), SECONDS.items())
def test_times_are_seconds(unit: str, seconds: float) -> None:
    assert parse_seconds(f"2 {unit}") == pytest.approx(2 * seconds, rel=1e-15)


@pytest.mark.parametrize("text", ["3 b", "3 kb", "3 kiB", "3 bit", "3"])
def test_other_units_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="write it like '40 GiB'"):
        parse_bytes(text)
