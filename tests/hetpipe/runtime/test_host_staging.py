"""Who meets where: GPUs over NCCL, whoever meets a CPU on the host."""

from itertools import combinations

import pytest

from cost_model.cluster import CPU, EMULATED, Device
from cost_model.errors import InputError
from hetpipe.runtime.host_staging import Staging


def devices(*kinds: str) -> list[Device]:
    return [Device(f"n/{index}", "n", kind, 2.0**30) for index, kind in enumerate(kinds)]


def test_gpus_alone_meet_over_nccl_and_copy_nothing():
    staging = Staging.of(devices("v100", "t4", CPU))
    assert staging.backend == "cpu:gloo,cuda:nccl"
    assert not staging.on_host((0, 1))
    assert not any(staging.copies(rank, (0, 1)) for rank in (0, 1))


def test_a_gpu_that_meets_a_cpu_copies_and_the_cpu_does_not():
    staging = Staging.of(devices("v100", "t4", CPU))
    for ranks in ((0, 2), (1, 2), (0, 1, 2)):
        assert staging.on_host(ranks)
        assert [staging.copies(rank, ranks) for rank in ranks] == [rank < 2 for rank in ranks]


@pytest.mark.parametrize("kinds", [(CPU, CPU), (EMULATED, CPU, EMULATED)])
def test_without_a_gpu_all_is_gloo(kinds):
    staging = Staging.of(devices(*kinds))
    assert staging.backend == "gloo"
    for pair in combinations(range(len(kinds)), 2):
        assert staging.on_host(pair) and not any(staging.copies(rank, pair) for rank in pair)


def test_gpus_beside_emulated_devices_are_refused_in_one_line():
    with pytest.raises(InputError, match=r"mixes GPUs with emulated devices \(emulated, v100\).*--exclude"):
        Staging.of(devices("v100", EMULATED))


def test_gpus_of_unlike_makers_meet_on_the_host_and_both_copy():
    staging = Staging.of(devices("RTX-4090", "AMD-Radeon-RX-7900-XTX", "MI300X", "Intel-Arc-A770", "T4"))
    assert staging.backend == "cpu:gloo,cuda:nccl,xpu:xccl"
    meet = {pair for pair in combinations(range(5), 2) if not staging.on_host(pair)}
    assert meet == {(0, 4), (1, 2)}
    assert staging.copies(0, (0, 1)) and staging.copies(1, (0, 1)) and not staging.copies(1, (1, 2))


def test_apples_gpus_have_nothing_but_the_host_to_meet_on():
    staging = Staging.of(devices("Apple-M3", "Apple-M3"))
    assert staging.backend == "gloo"
    assert staging.on_host((0, 1)) and staging.copies(1, (0, 1))


def test_every_other_kind_is_a_gpu():
    assert [device.is_gpu for device in devices(CPU, EMULATED, "t4")] == [False, False, True]
