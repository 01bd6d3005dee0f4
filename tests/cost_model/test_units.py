"""Every unit that a file may use, and what it is worth."""

import pytest

from cost_model.errors import InputError
from cost_model.units import (
    format_bandwidth,
    format_bytes,
    format_number,
    format_seconds,
    parse_bandwidth,
    parse_bytes,
    parse_fraction_or_bytes,
    parse_seconds,
)

BYTES = {
    "B": 1.0,
    "kB": 1e3,
    "KB": 1e3,
    "MB": 1e6,
    "GB": 1e9,
    "TB": 1e12,
    "KiB": 1024.0,
    "MiB": 1024.0**2,
    "GiB": 1024.0**3,
    "TiB": 1024.0**4,
}
BITS = {unit.replace("B", "bit"): num_bytes / 8 for unit, num_bytes in BYTES.items()}
SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9, "min": 60.0, "h": 3600.0}


@pytest.mark.parametrize("unit", BYTES)
def test_sizes(unit: str):
    assert parse_bytes(f"3 {unit}") == 3 * BYTES[unit]
    assert parse_bandwidth(f"3 {unit}/s") == 3 * BYTES[unit]


@pytest.mark.parametrize("unit", BITS)
def test_rates_in_bits(unit: str):
    assert parse_bandwidth(f"4 {unit}/s") == 4 * BITS[unit]


@pytest.mark.parametrize("unit", SECONDS)
def test_times(unit: str):
    assert parse_seconds(f"1 {unit}") == SECONDS[unit]  # the nearest float, not the product of two
    assert parse_seconds(f" 2.5e1{unit} ") == pytest.approx(25 * SECONDS[unit], rel=1e-15)


@pytest.mark.parametrize(
    "text",
    ["1e400 GiB", "1e99999999999 GiB", "1e-999999999 s", "9" * 5000, "9" * 5000 + " GiB", " " * 10**6 + "x"],
)
def test_what_is_no_quantity_of_this_world_is_refused_at_once(text):
    for parse in (parse_bytes, parse_bandwidth, parse_seconds):
        with pytest.raises(InputError) as caught:
            parse(text)
        assert len(str(caught.value)) < 200


def test_no_other_unit_is_known():
    for parse, units in (
        (parse_bytes, BYTES),
        (parse_bandwidth, [f"{unit}/s" for unit in [*BYTES, *BITS]]),
        (parse_seconds, SECONDS),
    ):
        with pytest.raises(InputError, match="unknown unit 'x'") as error:
            parse("1 x")
        listed = str(error.value).partition("(units: ")[2].removesuffix(")")
        assert sorted(listed.split(", ")) == sorted(units)


def test_a_share_of_the_whole():
    assert parse_fraction_or_bytes("12.5 %", 80.0) == 10.0
    assert parse_fraction_or_bytes("1 KiB", 80.0) == 1024.0


def test_what_is_printed_for_people():
    sizes = (0, 1023, 1024, 5 * 2**20, 3.5 * 2**30, 2**41)
    assert [format_bytes(size) for size in sizes] == [
        "0 B",
        "1023 B",
        "1.00 KiB",
        "5.00 MiB",
        "3.50 GiB",
        "2.00 TiB",
    ]
    times = (0, 2e-9, 4.56e-6, 0.01234, 1.5, 7200)
    assert [format_seconds(time) for time in times] == [
        "0 s",
        "2 ns",
        "4.56 us",
        "12.3 ms",
        "1.5 s",
        "7200 s",
    ]
    rates = (1, 125, 125e3, 1.25e9)
    assert [format_bandwidth(rate) for rate in rates] == ["8 bit/s", "1 kbit/s", "1 Mbit/s", "10 Gbit/s"]


def test_what_is_rounded_to_a_thousand_is_one_of_the_next_unit():
    times = (0.9997, 0.9994, 9.996e-4, 9.999e-7, 999.7, 1234.5)
    assert [format_seconds(time) for time in times] == ["1 s", "999 ms", "1 ms", "1 us", "1000 s", "1234 s"]
    assert [format_bandwidth(rate / 8) for rate in (9.997e8, 9.997e11)] == ["1 Gbit/s", "1000 Gbit/s"]
    assert [format_number(number, 4) for number in (890_700.0, 12.345, 99_999.6)] == [
        "890700",
        "12.35",
        "100000",
    ]
