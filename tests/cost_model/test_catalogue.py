"""The catalogue of accelerators: spellings and plausible facts."""

import pytest

from cost_model.catalogue import ACCELERATORS, accelerator
from cost_model.errors import InputError


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA A100-SXM4-40GB", "A100-SXM4-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIE-80GB"),
        ("A100-PCIE-40GB", "A100-PCIE-40GB"),
        ("a100", "A100-SXM4-40GB"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM5"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("Tesla V100-SXM2-32GB", "V100-SXM2-32GB"),
        ("Tesla T4", "T4"),
        ("NVIDIA TITAN V", "Titan-V"),
        ("GeForce RTX 2060", "RTX-2060"),
        ("Quadro P4000", "P4000"),
        ("Tesla P100-PCIE-12GB", "P100-PCIE-12GB"),
        ("V100S", "V100S-PCIE-32GB"),
        ("A800", "A800-SXM4-80GB"),
        ("NVIDIA GeForce RTX 3090", "RTX-3090"),
        ("rtx_3090", "RTX-3090"),
        ("4060Ti", "RTX-4060-Ti"),
        ("1080 ti", "GTX-1080-Ti"),
        ("RTX A5000", "A5000"),
    ],
)
def test_common_spellings_are_known(kind, name):
    assert accelerator(kind).name == name


def test_unknown_names_get_the_nearest():
    with pytest.raises(InputError, match="no accelerator 'RTX 3099'; did you mean \"RTX-309"):
        accelerator("RTX 3099")


def test_every_name_and_alias_leads_to_its_own_entry():
    for entry in ACCELERATORS:
        assert all(accelerator(word) is entry for word in (entry.name, *entry.aliases))


def test_facts_are_in_range():
    assert len(ACCELERATORS) >= 25
    for entry in ACCELERATORS:
        assert 6 * 2**30 <= entry.memory_bytes <= 192 * 2**30, entry.name
        assert 200e9 <= entry.memory_bandwidth_bytes_per_s <= 8e12, entry.name
        assert 4e12 <= entry.peak_flops["float32"] <= 105e12, entry.name
        assert entry.peak("float16")[0] >= entry.peak("tf32")[0] >= entry.peak("float32")[0], entry.name
        assert 2014 <= entry.year <= 2025, entry.name


@pytest.mark.parametrize(("kind", "mib"), [("H100", 81_559), ("H100-NVL", 95_830), ("H200", 143_771)])
def test_memory_is_what_the_driver_reports(kind, mib):
    assert accelerator(kind).memory_bytes == pytest.approx(mib * 2**20, rel=0.01)  # MiB in nvidia-smi


def test_without_tensor_cores_for_a_dtype_float32_counts():
    assert accelerator("P100").peak("float16") == (9.3e12, False)
    assert accelerator("V100").peak("float16") == (125e12, True)
    assert accelerator("V100").peak("bfloat16") == (15.7e12, False)
    assert accelerator("A100").peak("float32") == (19.5e12, False)
