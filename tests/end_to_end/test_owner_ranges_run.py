"""Runs of which several devices own a range of a layer: losses, checkpoints, optimizers and bytes."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import user_tasks
from cost_model.sharding import OwnerRange
from hetpipe.data.user_task import own_task
from hetpipe.profiling.profile_cache import profile_model
from hetpipe.runs.optimizers import OptimizerKind
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.settings import Settings
from hetpipe.training import checkpoint
from hetpipe.training.trainer import AdamW, Trainer
from partition.plan import Plan
from runs import (
    EMULATED_CLUSTER,
    chain_plan,
    cluster_file,
    emulated_cluster,
    made_up_profile,
    replica_plan,
    run,
)

MODEL = "gpt2-tiny"
PROFILE = replace(made_up_profile(MODEL), dtype="float64")
LAYERS = PROFILE.num_layers
SETTINGS = Settings(MODEL, 4, dtype="float64", learning_rate=1e-3, clip_norm=0.5, save=False)

HALVES = ((2, (0.0, 0.5)), (0, (0.5, 1.0)))

pytestmark = pytest.mark.slow


def in_ranges(zero: int) -> Plan:
    """Three replicas of one stage; the embeddings, which are tied to the head, and a block are cut."""
    plan = replica_plan(MODEL, LAYERS, (2, 6), (4, 6), (2, 4), zero=zero)
    owners = ["here/2", "here/1"] + ["here/0"] * (LAYERS - 2)
    ranges = (
        OwnerRange(0, "here/2", 0.0, 0.3),
        OwnerRange(0, "here/0", 0.3, 0.9),
        OwnerRange(0, "here/1", 0.9, 1.0),
        OwnerRange(1, "here/1", 0.0, 0.5),
        OwnerRange(1, "here/2", 0.5, 1.0),
    )
    return replace(plan, state_owners=tuple(owners), owner_ranges=ranges)


@pytest.mark.parametrize("zero", [*(pytest.param(zero, marks=pytest.mark.exhaustive) for zero in (1, 2)), 3])
def test_a_run_in_ranges_goes_on_from_any_plan_and_any_from_it(tmp_path: Path, zero: int) -> None:
    _, expected = run(tmp_path / "whole", chain_plan(MODEL, [0, LAYERS], 16), SETTINGS, PROFILE)
    other = chain_plan(MODEL, [0, 2, LAYERS], 4)
    plans = {"ranges": in_ranges(zero), "chain": other}
    for name, plan in plans.items():
        first = replace(SETTINGS, steps=2, total_steps=4, save=True)
        report, losses = run(tmp_path / name, plan, first, PROFILE)
        assert report.owners_agree
        assert losses == pytest.approx(expected[:2], rel=1e-12)
    sources = {name: checkpoint.latest(RunFolder(tmp_path / name / "run").checkpoints) for name in plans}
    for name, target in (("ranges", other), ("chain", in_ranges(zero))):
        resumed = replace(SETTINGS, resume_from=str(sources[name]))
        _, losses = run(tmp_path / f"from {name}", target, resumed, PROFILE)
        assert losses == pytest.approx(expected[2:], rel=1e-12), name
    _same_files(sources["ranges"], sources["chain"])


def _same_files(mine: Path | None, theirs: Path | None) -> None:
    """The same names and shapes in each layer's file, and the same numbers but for rounding."""
    assert mine is not None and theirs is not None
    manifests = [checkpoint.read_manifest(each) for each in (mine, theirs)]
    for layer in range(LAYERS):
        found, expected = (
            checkpoint.read_layer(folder, manifest, layer)
            for folder, manifest in zip((mine, theirs), manifests, strict=True)
        )
        assert found.keys() == expected.keys()
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "kind", [OptimizerKind.ADADELTA, pytest.param(OptimizerKind.SGD, marks=pytest.mark.exhaustive)]
)
def test_optimizers_of_torch_step_ranges_and_go_on(tmp_path: Path, kind: OptimizerKind) -> None:
    settings = replace(SETTINGS, optimizer=kind, momentum=0.9 if kind is OptimizerKind.SGD else 0.0)
    profile = replace(PROFILE, optimizer_bytes_per_parameter_byte=settings.states_per_parameter)
    _, expected = run(tmp_path / "whole", chain_plan(MODEL, [0, LAYERS], 16), settings, profile)
    first = replace(settings, steps=2, total_steps=4, save=True)
    run(tmp_path / "ranges", in_ranges(3), first, profile)
    source = checkpoint.latest(RunFolder(tmp_path / "ranges" / "run").checkpoints)
    resumed = replace(settings, resume_from=str(source))
    _, losses = run(tmp_path / "on", in_ranges(3), resumed, profile)
    assert losses == pytest.approx(expected[2:], rel=1e-12)


@pytest.mark.parametrize("zero", [1, pytest.param(2, marks=pytest.mark.exhaustive), 3])
def test_bytes_of_ranges_are_those_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zero: int
) -> None:
    from transformers.models.llama.configuration_llama import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=512, hidden_size=64, intermediate_size=160, num_hidden_layers=4,
            num_attention_heads=2, max_position_embeddings=user_tasks.LENGTH,
        )
    )  # fmt: skip
    data, loss = user_tasks.sequences(16), user_tasks.next_token_loss
    profile = profile_model(
        "mine", emulated_cluster(tmp_path), user_tasks.LENGTH,
        budget_s=0.05, microbatch_sizes=(2, 4), task=own_task(model, data, loss),
    )  # fmt: skip
    plan = replica_plan("mine", profile.num_layers, (4, 8), (4, 4), (4, 4), zero=zero)
    owners = ("here/1", *["here/0"] * (profile.num_layers - 2), "here/2")
    ranges = (
        *(OwnerRange(0, f"here/{device}", *part) for device, part in ((1, (0.0, 0.75)), (2, (0.75, 1.0)))),
        *(OwnerRange(profile.num_layers - 1, f"here/{device}", *part) for device, part in HALVES),
    )
    made = Trainer(
        model, data, AdamW(1e-2), loss,
        plan=replace(plan, state_owners=owners, owner_ranges=ranges),
        cluster=cluster_file(tmp_path, EMULATED_CLUSTER), folder=tmp_path / "run", profile=profile,
        seed=0, save=False,
    )  # fmt: skip
    for name, device in made.fit(1).devices.items():
        assert device.peak_bytes == pytest.approx(device.predicted_bytes, rel=0.05), name
