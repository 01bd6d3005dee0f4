"""The CPU threads of ranks."""

from dataclasses import replace

import pytest

from cost_model.cluster import CPU, EMULATED, Device
from hetpipe.runtime import rank_threads
from partition.plan import OPTIMIZER_STATES, OPTIMIZER_STEP, Pipeline, Plan, Stage

DEVICES = tuple(Device(f"n/{index}", "n", kind, 1e9) for index, kind in enumerate(("A100", "A100", "A100")))
OFFLOAD = (OPTIMIZER_STATES, OPTIMIZER_STEP)


@pytest.fixture(autouse=True)
def sixteen_cores(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 16)


def plan_of(*offloads: tuple[str, ...]) -> Plan:
    stages = tuple(
        Stage((f"n/{index}",), (index, index + 1), 1, offload=offload)
        for index, offload in enumerate(offloads)
    )
    return Plan("manual", "made-up", 1, (Pipeline(1, 1, stages),))


def test_cpus_share_the_cores_and_others_have_one_thread():
    devices = [replace(DEVICES[0], kind=kind) for kind in (CPU, EMULATED, CPU, "A100")]
    assert rank_threads.rank_threads(devices) == (8, 1, 8, 1)
    assert rank_threads.rank_threads(devices, local=[0, 1]) == (16, 1, 16, 1)


def test_gpus_whose_host_steps_share_its_cores():
    assert rank_threads.rank_threads(DEVICES, plan=plan_of((), (), ())) == (1, 1, 1)
    assert rank_threads.rank_threads(DEVICES, plan=plan_of(OFFLOAD, (), ())) == (16, 1, 1)
    several = plan_of(OFFLOAD, (OPTIMIZER_STATES,), OFFLOAD)
    assert rank_threads.rank_threads(DEVICES, plan=several) == (8, 1, 8)
    assert rank_threads.rank_threads(DEVICES, [1, 2], several)[2] == 16  # the other one is elsewhere
    emulated = [replace(device, kind=EMULATED) for device in DEVICES]
    assert rank_threads.rank_threads(emulated, plan=several) == (1, 1, 1)
