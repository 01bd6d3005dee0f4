"""Frozen weights in the memory of hosts: the same bits under every plan, bytes and seconds as planned."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import other_folders
import peft_models
from cost_model.profile import ModelProfile, profile_text
from hetpipe.models.adapters import task_spec
from hetpipe.models.chain import ChainModel
from hetpipe.runs.lora import LoraSettings
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.settings import Settings, TaskSettings
from hetpipe.runtime.host_weights import check_fetched, names_on_host
from hetpipe.training import checkpoint, checkpoint_weights
from partition.estimates.plan_memory import weights_on_host
from partition.plan import (
    FROZEN_WEIGHTS,
    OPTIMIZER_STATES,
    SAVED_ACTIVATIONS,
    Pipeline,
    Plan,
    Stage,
)
from partition.plan_file import plan_text
from runs import CPU_CLUSTER, chain_plan, made_up_profile, made_up_profile_of, run
from shell import Shell

LORA = LoraSettings(2, 4.0, ("query", "value"))
NAME = "bert-tiny" + LORA.suffix
BATCH = 4
CLUSTER = (
    CPU_CLUSTER.replace('kind = "cpu", count = 4', 'kind = "emulated", count = 3, speed = 0.3')
    + 'host_memory = "1 GiB"\nhost_link = { bandwidth = "200 MB/s", latency = "10 us" }\n'
)


def settings(**others: Any) -> Settings:
    return Settings(**{"steps": 2, "total_steps": 4, "learning_rate": 1e-3, "lora": LORA, **others})


def profile(layer_s: float = 1e-4) -> ModelProfile:
    chain = ChainModel.from_spec(task_spec(TaskSettings(NAME, run=settings())))
    return made_up_profile_of(chain, NAME, kind="emulated", layer_s=layer_s)


def on_hosts(plan: Plan, *words: str) -> Plan:
    return replace(
        plan,
        pipelines=tuple(
            replace(
                pipeline,
                stages=tuple(replace(stage, offload=words or (FROZEN_WEIGHTS,)) for stage in pipeline.stages),
            )
            for pipeline in plan.pipelines
        ),
    )


def two_pipelines(num_layers: int) -> Plan:
    one = Pipeline(1, 2, (Stage(("here/0",), (0, num_layers), 2),))
    two = Pipeline(
        1, 2, (Stage(("here/1",), (0, 4), 2), Stage(("here/2",), (4, num_layers), 1, recompute=True))
    )
    return Plan("manual", NAME, BATCH, (one, two))


PLANS = {
    "one device": lambda count: chain_plan(NAME, [0, count], 2, BATCH),
    "recompute": lambda count: chain_plan(NAME, [0, 4, count], 1, BATCH, recompute=True),
    "segments": lambda count: chain_plan(NAME, [0, count], 2, BATCH, recompute=True, segment_layers=1),
    "two pipelines": two_pipelines,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        "segments",
        "two pipelines",  # one of them recomputes a stage
        *(pytest.param(kind, marks=pytest.mark.exhaustive) for kind in ("one device", "recompute")),
    ],
)
def test_runs_with_weights_on_hosts_have_the_same_bits(tmp_path: Path, kind: str) -> None:
    made_up = profile()
    plan = PLANS[kind](made_up.num_layers)
    before, expected = run(tmp_path / "plain", plan, settings(save=True), made_up, CLUSTER)
    report, losses = run(tmp_path / "host", on_hosts(plan), settings(save=True), made_up, CLUSTER)
    assert losses == expected
    for name, device in report.devices.items():
        other = before.devices[name]
        assert device.peak_bytes and other.peak_bytes
        saved = other.peak_bytes - device.peak_bytes
        assert saved > 0
        assert saved == other.predicted_bytes - device.predicted_bytes
    weights = []
    for each in ("plain", "host"):
        found = checkpoint.latest(RunFolder(tmp_path / each / "run").checkpoints)
        assert found is not None
        weights.append(checkpoint_weights.read_weights(found))
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [(SAVED_ACTIVATIONS,), (OPTIMIZER_STATES, FROZEN_WEIGHTS, SAVED_ACTIVATIONS)]
)
def test_runs_with_activations_on_hosts_have_the_same_bits(tmp_path: Path, words: tuple[str, ...]) -> None:
    """Of a stage with two microbatches in flight and one after it, and of one in whose rounds all are."""
    made_up = profile()
    one = Pipeline(1, 2, (Stage(("here/0",), (0, made_up.num_layers), 2),))
    cuts = (0, 4), (4, made_up.num_layers)
    two = Pipeline(
        1, 2, tuple(Stage((f"here/{1 + index}",), cut, 2 - index) for index, cut in enumerate(cuts))
    )
    plan = Plan("manual", NAME, BATCH, (one, two))
    before, expected = run(tmp_path / "plain", plan, settings(), made_up, CLUSTER)
    report, losses = run(tmp_path / "host", on_hosts(plan, *words), settings(), made_up, CLUSTER)
    assert losses == expected
    for name, device in report.devices.items():
        peak_bytes, other = device.peak_bytes, before.devices[name].peak_bytes
        assert peak_bytes and other and peak_bytes < other


@pytest.mark.slow
def test_a_run_goes_on_from_weights_on_hosts_without_them_and_back(tmp_path: Path) -> None:
    made_up = profile()
    plain = chain_plan(NAME, [0, 4, made_up.num_layers], 2, BATCH)
    _, expected = run(tmp_path / "whole", plain, settings(steps=4), made_up, CLUSTER)
    first = run(tmp_path / "one", on_hosts(plain), settings(save=True), made_up, CLUSTER)[1]
    source = checkpoint.latest(RunFolder(tmp_path / "one" / "run").checkpoints)
    later = settings(steps=4, resume_from=str(source))
    assert run(tmp_path / "other", plain, later, made_up, CLUSTER)[1][-2:] == expected[2:]
    whole = chain_plan(NAME, [0, made_up.num_layers], 2, BATCH)
    assert run(tmp_path / "third", on_hosts(whole), later, made_up, CLUSTER)[1][-2:] == pytest.approx(
        expected[2:], rel=1e-6
    )
    assert first == expected[:2]


LLAMA, LLAMA_BLOCKS = "LlamaForCausalLM", 4


def small_base(folder: Path, load_in: str | None, *, double: bool = False) -> Path:
    """A folder with four blocks; quantized by bitsandbytes already, its scales too, where they are double."""
    base = folder / "base"
    peft_models.save_model(base, LLAMA, num_hidden_layers=LLAMA_BLOCKS)
    if double:
        assert load_in is not None
        stored = peft_models.quantized_base(base, LLAMA, load_in, bnb_4bit_use_double_quant=True)
        stored.save_pretrained(folder / "stored")
        return folder / "stored"
    return base


@pytest.mark.slow
@pytest.mark.parametrize(
    ("load_in", "double"),
    [
        ("4bit", True),
        ("8bit", False),
        *(pytest.param(load_in, False, marks=pytest.mark.exhaustive) for load_in in (None, "4bit")),
    ],
)
def test_bases_in_4_and_8_bits_come_from_hosts_and_exports_are_equal(
    tmp_path: Path, capsys, monkeypatch, load_in: str | None, double: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    base, lora = small_base(tmp_path, load_in, double=double), LoraSettings(2, 4.0, ("q_proj", "down_proj"))
    given = None if double else load_in
    name = peft_models.name_of(base, lora, given)
    chain = peft_models.chain_of(base, lora, given)
    made_up = made_up_profile_of(chain, name, kind="emulated", sequence_length=12)
    chosen = peft_models.settings_of(
        base, lora, load_in=given, steps=2, total_steps=4, learning_rate=1e-2, save=True
    )
    plan = chain_plan(name, [0, made_up.num_layers], 2, BATCH)
    before, expected = run(tmp_path / "plain", plan, chosen, made_up, CLUSTER)
    report, losses = run(tmp_path / "host", on_hosts(plan), chosen, made_up, CLUSTER)
    assert losses == expected
    old, new = before.devices["here/0"], report.devices["here/0"]
    assert old.peak_bytes and new.peak_bytes and new.peak_bytes < old.peak_bytes
    saved, predicted = old.peak_bytes - new.peak_bytes, old.predicted_bytes - new.predicted_bytes
    parts = 2 * 7 * (4 if double else 2)  # tensors in two rooms, which begin at multiples of 16 bytes
    assert predicted - 16 * parts < saved <= predicted

    hetpipe = Shell(tmp_path, capsys)
    for merged in ("", "--merge"):
        found = []
        for each in ("plain", "host"):
            exported = hetpipe(f"export {each}/run -o {each}/out{merged} {merged}")
            assert exported.code == 0, exported.err
            (file,) = (tmp_path / each / f"out{merged}").glob("*model.safetensors")
            found.append(safetensors.torch.load_file(file))
        assert found[0].keys() == found[1].keys()
        assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])


def test_any_optimizer_may_train_beside_weights_on_hosts(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    made_up, hetpipe = profile(), Shell(tmp_path, capsys)
    plan = chain_plan(NAME, [0, made_up.num_layers], 2, BATCH)
    hetpipe.write("cluster.toml", CLUSTER)
    hetpipe.write("profile.json", profile_text(replace(made_up, optimizer_bytes_per_parameter_byte=1.0)))
    hetpipe.write("plan.json", plan_text(on_hosts(plan)))
    line = "run --model bert-tiny --lora r=2,alpha=4,targets=query,value --cluster cluster.toml --dry-run "
    line += "--profile profile.json --plan plan.json --optimizer adagrad"
    found = hetpipe(line)
    assert found.code == 0, found.err
    hetpipe.write("plan.json", plan_text(on_hosts(plan, OPTIMIZER_STATES, FROZEN_WEIGHTS)))
    refused = hetpipe(line)
    assert refused.code == 2 and "the optimizer has them on the device alone" in refused.err


def test_no_states_are_planned_for_hosts_where_the_optimizer_cannot(tmp_path: Path, capsys, monkeypatch):
    """`run` had refused the plan that it had made itself."""
    monkeypatch.chdir(tmp_path)
    hetpipe = Shell(tmp_path, capsys)
    hetpipe.write("cluster.toml", CLUSTER.replace("count = 3", "count = 2").replace("4 GiB", "4 MB"))
    hetpipe.write("profile.json", profile_text(made_up_profile("bert-tiny", kind="emulated", layer_s=1e-4)))
    line = "run --model bert-tiny --cluster cluster.toml --profile profile.json --dry-run --no-proof "
    line += "--global-batch-size 4 --json"
    (pipeline,) = hetpipe(line).json["plan"]["pipelines"]
    assert any("optimizer states" in stage.get("offload", ()) for stage in pipeline["stages"])
    nothing = hetpipe(f"{line} --optimizer adagrad")
    assert nothing.code == 3 and "no pipeline fits" in nothing.err and nothing.err.count("\n") == 1


def test_embeddings_of_a_decoder_stay_on_the_device(tmp_path: Path) -> None:
    """They are no block: a plan that moved them was refused by its run."""
    apart = {"share_encoder_decoder_embeddings": False, "tie_word_embeddings": False}
    other_folders.save_other(tmp_path, "MarianMTModel", **apart)
    lora = LoraSettings(2, 4.0, ("q_proj", "v_proj"))
    chain = peft_models.chain_of(tmp_path, lora)
    made_up = made_up_profile_of(chain, peft_models.name_of(tmp_path, lora))
    place = chain.layer_names.index("decoder-embeddings")
    assert made_up.layers[place].unreached_bytes > 0 and not made_up.shares_frozen(place)
    plan = on_hosts(chain_plan(made_up.model, [0, chain.num_layers], 1, BATCH))
    names = names_on_host(plan, "here/0", chain)
    check_fetched(chain.materialise(range(chain.num_layers), 0), names, chain.layer_names)
    assert names.keys() == weights_on_host(plan, made_up, "here/0").keys()
    assert names and place not in names
