"""What drivers take of a GPU's memory, worked out by hand, and what makers' GPUs cannot hold."""

from pathlib import Path

import pytest

from cost_model.cluster import Device
from cost_model.cluster_file import read_cluster
from cost_model.dtypes import FLOAT64, common_dtype
from cost_model.errors import InputError
from cost_model.vendors import AMD, APPLE, INTEL, NVIDIA, driver_bytes, library_of, vendor_of

CONTEXT, OVER_NVLINK = 787e6 + 2**26, 544e6
OVER_PCIE = OVER_NVLINK * 4 / 24  # channels


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ({"RTX-4090": 1}, CONTEXT),
        ({"RTX-4090": 2}, CONTEXT + 3 * OVER_PCIE),  # each way to one neighbour, and one sum
        ({"RTX-4090": 1, "T4": 5}, CONTEXT + 5 * OVER_PCIE),  # each way to two neighbours, and one sum
        ({"A100-SXM4-40GB": 8}, CONTEXT + 5 * OVER_NVLINK),
        ({"RTX-4090": 1, "AMD-Radeon-RX-7900-XTX": 1}, CONTEXT),  # they meet on the host
        ({"RTX-4090": 1, "cpu": 3}, CONTEXT),
        ({"MI300X": 2}, (0.35 + 3 * 0.65) * 2**30),
        ({"Apple-M3": 2}, 0.0),
        ({"cpu": 2}, 0.0),
        ({"emulated-V100": 2}, 0.0),
        ({"kind-0": 2}, 0.0),  # nobody knows what it is
    ],
)
def test_contexts_and_communicators_are_counted(kinds, expected):
    assert driver_bytes(next(iter(kinds)), kinds) == pytest.approx(expected)


def test_makers_are_known_by_name():
    named = {"NVIDIA-GeForce-RTX-5090": NVIDIA, "P100": NVIDIA, "AMD-Instinct-MI250X": AMD, "mine": NVIDIA}
    named |= {"Intel-Arc-A770-Graphics": INTEL, "Apple-M3-Max": APPLE, "cpu": None, "emulated-MI300X": None}
    assert {kind: vendor_of(kind) for kind in named} == named
    assert [library_of(kind) for kind in ("T4", "MI300X", "Apple-M3")] == ["nccl", "rccl", None]


def test_float64_is_refused_where_there_is_none():
    with pytest.raises(InputError, match=r"Apple-M3 has no float64 .*--dtype float32"):
        common_dtype({"Apple-M3": FLOAT64})
    assert common_dtype({"T4": FLOAT64}) == FLOAT64


def lab(folder: Path, head: str = "", key: str = "") -> list[Device]:
    path = folder / "cluster.toml"
    path.write_text(
        f'reserve = "10 %"\n{head}\n[network]\nbandwidth = "1 GB/s"\nlatency = "0 s"\n[[nodes]]\nname = "n"\n'
        f'devices = [{{ kind = "T4", memory = "16 GB"{key} }}, {{ kind = "T4", memory = "16 GB" }}]\n'
    )
    return list(read_cluster(path))


def test_a_plan_may_fill_what_reserve_and_driver_leave(tmp_path):
    each = CONTEXT + 3 * OVER_PCIE
    assert [device.usable_bytes for device in lab(tmp_path)] == pytest.approx([16e9 - 1.6e9 - each] * 2)
    one, other = lab(tmp_path, key=', driver_memory = "2 GB"')
    assert (one.driver_bytes, other.driver_bytes) == (2e9, pytest.approx(each))
    assert [device.driver_bytes for device in lab(tmp_path, 'driver_memory = "0 B"')] == [0.0, 0.0]


def test_a_device_that_its_driver_fills_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"15,000,000,000 bytes for the driver .* leave nothing of its 16"):
        lab(tmp_path, key=', driver_memory = "15 GB"')
