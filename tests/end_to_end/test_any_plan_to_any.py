"""What one plan has written any other goes on from, with the losses of a run that knew neither."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from cost_model.sharding import OwnerRange
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.settings import Settings
from hetpipe.training.resumption import find_checkpoint
from partition.plan import OPTIMIZER_STATES, OPTIMIZER_STEP, SAVED_ACTIVATIONS, Pipeline, Plan, Stage
from runs import CPU_CLUSTER, chain_plan, made_up_profile, run

MODEL = "bert-tiny"
BEFORE, AFTER = 4, 10
CLUSTER = CPU_CLUSTER + (
    'host_memory = "1 GiB"\nhost_link = { bandwidth = "10 GB/s", latency = "10 us" }\n'
    'host_optimizer = "10 GB/s"\n'
)
ON_HOST = (OPTIMIZER_STATES, SAVED_ACTIVATIONS)


def pipeline(size: int, samples: int, *stages: tuple[int, int, int, int]) -> Pipeline:
    """Stages as (device, first layer, layer after the last, in_flight)."""
    return Pipeline(
        size, samples, tuple(Stage((f"here/{device}",), cut, held) for device, *cut, held in stages)
    )


def two(*, zero: int) -> Plan:
    first, second = pipeline(2, 6, (0, 0, 8, 1)), pipeline(2, 10, (1, 0, 3, 2), (2, 3, 8, 1))
    return Plan("manual", MODEL, 16, (first, second), zero=zero)


def in_ranges(plan: Plan) -> Plan:
    """The plan, of which two devices own the first and the last layer, a range each."""
    owners = tuple(f"here/{device}" for device in (0, 0, 1, 0, 2, 2, 0, 2))
    first = OwnerRange(0, "here/0", 0.0, 0.4), OwnerRange(0, "here/1", 0.4, 1.0)
    last = OwnerRange(7, "here/2", 0.0, 0.7), OwnerRange(7, "here/0", 0.7, 1.0)
    return replace(plan, state_owners=owners, owner_ranges=(*first, *last))


PLANS = {
    "one device": chain_plan(MODEL, [0, 8], 16),
    "even": chain_plan(MODEL, [0, 3, 6, 8], 4),
    "uneven": chain_plan(MODEL, [0, 1, 4, 7, 8], 2),
    "recomputed": chain_plan(MODEL, [0, 5, 8], 8, recompute=True),
    "on hosts": chain_plan(MODEL, [0, 3, 8], 2, offload=ON_HOST),
    "stepped by hosts": chain_plan(MODEL, [0, 5, 8], 4, offload=(OPTIMIZER_STATES, OPTIMIZER_STEP)),
    "two pipelines": two(zero=0),
    "zero 1": two(zero=1),
    "zero 2": two(zero=2),
    "zero 3": Plan(
        "manual", MODEL, 16,
        (
            pipeline(2, 6, (0, 0, 8, 1)),
            pipeline(4, 6, (1, 0, 8, 1)),
            Pipeline(2, 4, (Stage(("here/2",), (0, 8), 2, recompute=True, segment_layers=1),)),
        ),
        zero=3,
    ),
    "zero 3 of stages": two(zero=3),
    "zero by layer": replace(two(zero=3), layer_zero=(3, 3, 3, 1, 1, 2, 3, 2)),
    "zero 1 in ranges": in_ranges(two(zero=1)),
    "zero 2 in ranges": in_ranges(two(zero=2)),
    "zero 3 in ranges": in_ranges(two(zero=3)),
    "shared device": Plan(
        "manual", MODEL, 16,
        (pipeline(2, 10, (0, 0, 3, 3), (1, 3, 8, 1)), pipeline(4, 6, (0, 0, 5, 2), (2, 5, 8, 1))),
    ),
    "three replicas": Plan(
        "manual", MODEL, 16,
        (
            pipeline(2, 4, (0, 0, 8, 1)),
            pipeline(2, 4, (1, 0, 8, 1)),
            pipeline(2, 8, (2, 0, 5, 2), (3, 5, 8, 1)),
        ),
    ),
}  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize(("dtype", "most"), [("float32", 1e-6), ("float64", 1e-12)])
def test_all_ordered_pairs(tmp_path: Path, dtype: str, most: float):
    profile = replace(made_up_profile(MODEL), dtype=dtype)
    whole = Settings(MODEL, BEFORE + AFTER, dtype=dtype, learning_rate=1e-3, save=False)
    _, expected = run(tmp_path / "whole", PLANS["one device"], whole, profile, CLUSTER)
    worst = 0.0
    for source, plan in PLANS.items():
        begun = tmp_path / source
        first = replace(whole, steps=BEFORE, total_steps=BEFORE + AFTER, save=True)
        run(begun, plan, first, profile, CLUSTER)
        found = find_checkpoint("auto", RunFolder(begun / "run"), tmp_path, MODEL)
        for target, other in PLANS.items():
            place = tmp_path / f"{source} to {target}"
            _, losses = run(place, other, replace(whole, resume_from=str(found)), profile, CLUSTER)
            assert len(losses) == AFTER
            differences = [abs(a - b) / abs(b) for a, b in zip(losses, expected[BEFORE:], strict=True)]
            assert max(differences) <= most, (source, target, max(differences))
            worst = max(worst, *differences)
            shutil.rmtree(place)
    print(f"{dtype}: {len(PLANS) ** 2} pairs, losses differ by {worst:.1e} at most")
