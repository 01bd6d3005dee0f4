"""What plans that shard gradients, or weights, have trained: exported, it is the model of one device."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from folders import model_class, save_model
from hetpipe import cli
from hetpipe.models.names import model_entry
from hetpipe.runs.settings import Settings
from partition.plan import Pipeline, Plan, Stage
from runs import chain_plan, made_up_profile, replica_plan, run

ARCHITECTURE = "GPT2LMHeadModel"  # whose first and last layer share a matrix


def two_pipelines(zero: int, layer_zero: tuple[int, ...] | None = None) -> Plan:
    cut = Pipeline(2, 5, (Stage(("here/0",), (0, 2), 2), Stage(("here/1",), (2, 5), 1)))
    whole = Pipeline(1, 3, (Stage(("here/2",), (0, 5), 1),))
    return Plan("manual", "", 8, (cut, whole), zero=zero, layer_zero=layer_zero)


PLANS = {
    "one": chain_plan("", [0, 5], 4, 8),
    "replicas, zero 2": replica_plan("", 5, (2, 5), (1, 3), zero=2),
    "replicas, zero 3": replica_plan("", 5, (2, 5), (1, 3), zero=3),
    "stages, zero 3": two_pipelines(3),
    "stages, zero by layer": two_pipelines(3, (3, 3, 1, 2, 3)),
}


@pytest.mark.slow
def test_what_sharded_plans_have_trained_is_exported_as_what_one_device_has(tmp_path: Path) -> None:
    save_model(tmp_path / "mine", ARCHITECTURE)
    entry = model_entry(str(tmp_path / "mine"))
    profile = replace(
        made_up_profile(str(tmp_path / "mine")), model=entry.name, sequence_length=32, dtype="float64"
    )
    settings = Settings(
        steps=2, model_folder=entry.place, dtype="float64", learning_rate=1e-2, warmup_steps=0, save=True
    )
    exported = {}
    for name, plan in PLANS.items():
        run(tmp_path / name, replace(plan, model=entry.name), settings, profile)
        target = tmp_path / name / "out"
        assert cli.main(["export", str(tmp_path / name / "run"), "-o", str(target)]) == 0
        found = model_class(ARCHITECTURE).from_pretrained(target, torch_dtype=torch.float64)
        exported[name] = found.state_dict()
    before = model_class(ARCHITECTURE).from_pretrained(tmp_path / "mine", torch_dtype=torch.float64)
    for key, value in exported["one"].items():
        moved = float((value - before.state_dict()[key]).abs().max())
        for name, found in exported.items():
            assert found.keys() == exported["one"].keys()
            assert float((found[key] - value).abs().max()) <= 1e-9 + 1e-7 * moved, (name, key)
    assert any(
        float((value - before.state_dict()[key]).abs().max()) > 1e-3 for key, value in exported["one"].items()
    )
