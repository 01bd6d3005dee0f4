"""Adapters train under any plan as peft's own loop trains them, and go in and out of PEFT folders."""

import shutil
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import peft_models
from cost_model.errors import InputError
from hetpipe.data.task import TrainingTask, registered_task
from hetpipe.models.adapters import base_name
from hetpipe.models.huggingface_folder import WEIGHTS_FILE
from hetpipe.runs.lora import LoraSettings, read_adapter_settings
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.run_report import RunReport
from hetpipe.runs.settings import Settings, TaskSettings
from hetpipe.training import checkpoint, checkpoint_weights
from hetpipe.training.frozen_base import weight_sha256
from hetpipe.training.run import train
from partition.plan import Pipeline, Plan, Stage
from runs import chain_plan, cluster_file, made_up_profile_of, replica_plan
from shell import Shell

BATCH, STEPS, LENGTH = 8, 3, 12
LLAMA, GPT2, BERT = peft_models.TARGETS


@dataclass(frozen=True)
class Place:
    """A folder with a base, a PEFT folder of random adapters for it, and runs that begin with them."""

    path: Path
    architecture: str
    lora: LoraSettings

    @cached_property
    def base(self) -> Path:
        return peft_models.base_folder(self.path, self.architecture)

    @cached_property
    def adapter(self) -> Path:
        folder = self.path / "adapter"
        peft_models.peft_model(
            peft_models.loaded_base(self.base, self.architecture), self.lora
        ).save_pretrained(str(folder))
        return folder

    @property
    def name(self) -> str:
        return peft_models.name_of(self.base, self.lora)

    def settings(self, **others: Any) -> Settings:
        chosen: dict[str, Any] = {"adapter": str(self.adapter), "learning_rate": 0.01, "steps": STEPS}
        return peft_models.settings_of(self.base, self.lora, **{**chosen, "total_steps": STEPS + 2, **others})

    def run(self, run: str, plan: Plan, settings: Settings) -> tuple[RunReport, list[float]]:
        profile = made_up_profile_of(
            peft_models.chain_of(self.base, self.lora), self.name, sequence_length=LENGTH
        )
        folder = self.folder(run)
        report = train(settings, cluster_file(self.path), profile, replace(plan, model=self.name), folder)
        return report, [entry["loss"] for entry in folder.read_metrics()]

    def folder(self, run: str) -> RunFolder:
        return RunFolder(self.path / run)

    def task(self, run: str) -> TrainingTask:
        return registered_task(self.folder(run), TaskSettings(self.name, LENGTH, run=self.settings()))

    def weights(self, run: str) -> dict[str, torch.Tensor]:
        found = checkpoint.latest(self.folder(run).checkpoints)
        assert found is not None
        return checkpoint_weights.read_weights(found)

    def alone(self, run: str, steps: int = STEPS) -> tuple[Any, list[float]]:
        """Peft's own training on the data of a run."""
        model = peft_models.loaded(self.base, self.architecture, self.adapter)
        settings = self.settings()
        return model, peft_models.train_alone(model, self.task(run), settings, BATCH, range(steps))


def place(path: Path, architecture: str, dropout: float = 0.0) -> Place:
    """Those of GPT-2 count alpha / sqrt(r)."""
    rslora = architecture == GPT2
    return Place(path, architecture, LoraSettings(4, 8.0, peft_models.TARGETS[architecture], dropout, rslora))


def two_pipelines(zero: int = 0) -> Plan:
    one = Pipeline(2, 5, (Stage(("here/0",), (0, 5), 3),))
    again = Stage(("here/2",), (2, 5), 1, recompute=True, segment_layers=int(zero > 1))
    two = Pipeline(1, 3, (Stage(("here/1",), (0, 2), 2), again))
    return Plan("manual", "", BATCH, (one, two), zero=zero)


PLANS = {
    "one device": chain_plan("", [0, 5], 4, BATCH),
    "two stages": chain_plan("", [0, 4, 5], 2, BATCH),
    "three stages, recompute": chain_plan("", [0, 1, 3, 5], 2, BATCH, recompute=True),
    "two pipelines": two_pipelines(),
    "sharded gradients": two_pipelines(zero=2),
    "sharded weights": replica_plan("", 5, (2, 5), (1, 2), (1, 1), zero=3),
}
FEW, MORE = ["three stages, recompute", "two pipelines"], ["two pipelines", *list(PLANS)[-2:]]
CASES = [
    (LLAMA, list(PLANS)),
    (GPT2, FEW),
    (BERT, FEW),
    # what is sharded of their adapters: test_peft_trainer.py has the gradients
    pytest.param(GPT2, MORE, marks=pytest.mark.exhaustive),
    pytest.param(BERT, MORE, marks=pytest.mark.exhaustive),
]


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "names"), CASES)
def test_adapters_train_as_by_peft_alone(tmp_path, architecture, names):
    here = place(tmp_path, architecture)
    reports = {}
    losses = {}
    for name in names:
        reports[name], losses[name] = here.run(name, PLANS[name], here.settings())
    model, alone = here.alone(names[0])
    expected = peft_models.adapters_of(model)
    stored = load_file(here.base / WEIGHTS_FILE)
    for name in names:
        assert losses[name] == pytest.approx(alone, rel=2e-6), name
        weights = here.weights(name)
        assert weights.keys() == expected.keys()
        for key, value in weights.items():
            torch.testing.assert_close(value, expected[key], rtol=2e-4, atol=2e-6, msg=key)
        source = checkpoint.latest(here.folder(name).checkpoints)
        assert source is not None
        hashes = checkpoint.read_manifest(source).base
        base = {base_name(key): sha256 for key, sha256 in hashes.items()}
        held = {key: weight_sha256(value) for key, value in stored.items()}
        assert base.keys() <= held.keys()
        assert base == {key: held[key] for key in base}, "the base changed"
    report = reports["two pipelines"]
    assert report.owners_agree and report.shared_parameters
    assert max(abs(alone[0] - later) for later in alone) > 1e-3


@pytest.mark.exhaustive
def test_each_plan_goes_on_from_the_adapters_of_each_other(tmp_path):
    here = place(tmp_path, LLAMA)
    plans = {**PLANS, "sharded states": two_pipelines(zero=1)}
    before, after = 4, 10
    settings = here.settings(steps=before + after, total_steps=before + after, save=False)
    _, expected = here.run("whole", plans["one device"], settings)
    worst = 0.0
    for source, plan in plans.items():
        here.run(source, plan, replace(settings, steps=before, save=True))
        found = checkpoint.latest(here.folder(source).checkpoints)
        again = replace(settings, resume_from=str(found), adapter=None)
        for target, other in plans.items():
            _, losses = here.run("pair", other, again)
            assert len(losses) == after
            shutil.rmtree(here.folder("pair").path)
            off = max(abs(mine / one - 1) for mine, one in zip(losses, expected[before:], strict=True))
            assert off <= 1e-6, (source, target, off)
            worst = max(worst, off)
    print(f"adapters: {len(plans) ** 2} pairs, losses differ by {worst:.1e} at most")


@pytest.mark.slow
def test_a_base_in_bfloat16_stays_so_and_trains_as_its_values_in_float32(tmp_path):
    here = place(tmp_path, LLAMA)
    file = here.base / WEIGHTS_FILE
    _ = here.adapter  # of the base in float32
    save_file({key: value.bfloat16() for key, value in load_file(file).items()}, file, {"format": "pt"})
    chain = peft_models.chain_of(here.base, here.lora)
    held = chain.weight_bytes(torch.float32)
    layers = chain.materialise(range(chain.num_layers), 0)
    kept = {value.dtype for name, value in layers.owned_parameters().items() if name.endswith("proj.weight")}
    assert kept == {torch.bfloat16}
    assert sum(layer.stored for layer in held) < 0.6 * 4 * sum(layer.num_parameters for layer in held)
    losses = {name: here.run(name, PLANS[name], here.settings())[1] for name in list(PLANS)[1:3]}
    _, alone = here.alone("two stages")
    for name, found in losses.items():
        assert found == pytest.approx(alone, rel=2e-6), name
    source = checkpoint.latest(here.folder("two stages").checkpoints)
    assert source is not None
    later = replace(here.settings(), steps=STEPS + 1, resume_from=str(source), adapter=None)
    assert len(here.run("two stages", PLANS["two stages"], later)[1]) == STEPS + 1


@pytest.mark.slow
def test_the_dropout_of_adapters_does_not_depend_on_the_plan(tmp_path):
    here = place(tmp_path, LLAMA, dropout=0.3)
    losses = {
        name: here.run(name, PLANS[name], here.settings())[1] for name in ("two stages", "two pipelines")
    }
    assert losses["two stages"] == pytest.approx(losses["two pipelines"], rel=2e-6)
    _, whole = replace(here, lora=replace(here.lora, dropout=0.0)).run(
        "whole", PLANS["two stages"],
        peft_models.settings_of(
            here.base, replace(here.lora, dropout=0.0), adapter=str(here.adapter), steps=1,
        ),
    )  # fmt: skip
    assert abs(whole[0] - losses["two stages"][0]) > 1e-4 * whole[0]


@pytest.mark.slow
def test_a_run_goes_on_and_ends_in_a_folder_that_peft_loads(hetpipe: Shell):
    here = place(hetpipe.folder, LLAMA)
    here.run("run", PLANS["two stages"], here.settings(steps=2))
    exported = hetpipe("export run -o peft")
    assert exported.code == 0, exported.err
    assert read_adapter_settings(hetpipe.folder / "peft") == here.lora
    assert {path.name for path in (hetpipe.folder / "peft").iterdir()} == {
        "adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    merged = hetpipe("export run -o merged --merge")
    assert merged.code == 0, merged.err

    # another plan goes on from the checkpoint: the loss of its first step is that of the exported adapters
    source = checkpoint.latest(here.folder("run").checkpoints)
    _, losses = here.run("run", PLANS["two pipelines"], here.settings(resume_from=str(source)))
    _, alone = here.alone("run")
    assert losses == pytest.approx(alone, rel=2e-6)
    inputs, labels = here.task("run").batch(2 * BATCH, BATCH)
    task = here.task("run")
    model = peft_models.loaded(here.base, LLAMA, hetpipe.folder / "peft").eval()
    whole = peft_models.loaded_base(hetpipe.folder / "merged", LLAMA).eval()
    for found in (model, whole):
        with torch.no_grad():
            loss = task.loss(found(**inputs).logits, labels) * task.term_weight(labels)
        assert loss.item() == pytest.approx(losses[2], rel=2e-6)
    assert not any("lora" in name for name in load_file(hetpipe.folder / "merged" / WEIGHTS_FILE))

    # and a new run goes on from the PEFT folder
    _, begun = here.run("new", PLANS["one device"], here.settings(adapter=str(hetpipe.folder / "peft")))
    expected = peft_models.loaded(here.base, LLAMA, hetpipe.folder / "peft")
    assert begun == pytest.approx(
        peft_models.train_alone(expected, here.task("new"), here.settings(), BATCH, range(STEPS)), rel=2e-6
    )


@pytest.mark.slow
def test_adapters_of_another_base_are_not_gone_on_with(hetpipe: Shell):
    here = place(hetpipe.folder, LLAMA)
    here.run("run", PLANS["one device"], here.settings(steps=1))
    source = checkpoint.latest(here.folder("run").checkpoints)
    assert source is not None
    before = here.folder("run").config.read_text()
    peft_models.save_model(here.base, LLAMA, seed=8)
    with pytest.raises(InputError, match=r"trained beside another base, .* has other values there") as caught:
        here.run("run", PLANS["one device"], here.settings(steps=2, resume_from=str(source)))
    assert "\n" not in str(caught.value)
    assert here.folder("run").config.read_text() == before
    merged = hetpipe("export run -o merged --merge")
    assert (merged.code, merged.err.count("\n")) == (2, 1) and "another base" in merged.err
    assert not (hetpipe.folder / "merged").exists()
    assert hetpipe("export run -o peft").code == 0  # the adapters are what they are
    for option, text in (
        ("", "the run's none; give --lora r=4,alpha=8,targets=down_proj,q_proj,v_proj to resume"),
        ("--lora r=2,targets=q_proj", "the run's r=2,alpha=2,targets=q_proj; give --lora r=4,alpha=8"),
    ):
        again = hetpipe(f"run --model {here.base} --cluster cluster.toml --resume run --steps 2 {option}")
        assert (again.code, again.err.count("\n")) == (2, 1) and text in again.err
    same = "--lora r=4,alpha=8,targets=down_proj,q_proj,v_proj"
    for model in ("llama-tiny", f"{here.base} --load-in 4bit"):  # refused before anything is measured
        again = hetpipe(f"run --model {model} --cluster cluster.toml --resume run --steps 2 {same}")
        assert (again.code, again.err.count("\n")) == (2, 1) and "give the same to resume" in again.err


def refused(hetpipe: Shell, line: str) -> str:
    result = hetpipe(line)
    assert (result.code, result.err.count("\n")) == (2, 1), (line, result)
    assert {path.name for path in hetpipe.folder.iterdir()}.isdisjoint({"runs", "out.json"})
    return result.err


@pytest.mark.slow
def test_what_cannot_be_adapted_is_refused_in_a_line(hetpipe: Shell):
    here = place(hetpipe.folder, LLAMA)
    base, adapter = here.base, here.adapter
    peft_models.base_folder(hetpipe.folder / "small", LLAMA)
    (hetpipe.folder / "empty").mkdir()
    for name, file, content in (
        ("garbled", "adapter_model.safetensors", b"no tensors"),
        ("unjson", "adapter_config.json", b"{"),
        ("old", "adapter_model.safetensors", None),
    ):
        shutil.copytree(adapter, hetpipe.folder / name)
        (hetpipe.folder / name / file).unlink()
        if content is not None:
            (hetpipe.folder / name / file).write_bytes(content)
    run = f"run --model {base} --cluster cluster.toml"
    for option, text in (
        ("--lora r=0,targets=q_proj", "rank r is 0; give at least 1"),
        ("--lora r=4,targets=q_prj", "has no such linear layer; did you mean \"q_proj\"?"),
        ("--lora r=4,targets=embed_tokens", "has no such linear layer; known: q_proj"),
        ("--lora r=4", "targets is missing"),
        ("--lora r=four,targets=q_proj", "'four' is no whole number"),
        ("--lora rank=4,targets=q_proj", "unknown key 'rank'"),
        ("--lora nonsense", "'nonsense' is no key=value"),
        ("--lora r=4,r=5,targets=q_proj", "r is given twice"),
        ("--lora r=4,dropout=1,targets=q_proj", "dropout is 1; give at least 0 and less than 1"),
        ("--lora r=4,alpha=nan,targets=q_proj", "alpha is nan"),
        (f"--lora r=4,targets=q_proj --adapter {adapter}", "give one of them"),
        ("--adapter nowhere", "no such folder"),
        ("--adapter empty", "holds no adapter_config.json"),
        ("--adapter garbled", "adapter_model.safetensors: is no safetensors file, or damaged"),
        ("--adapter unjson", "adapter_config.json: not JSON"),
        ("--adapter old", "holds no adapter_model.safetensors; save it by peft's save_pretrained"),
        ("--lora r=4,alpha=abc,targets=q_proj", "'abc' is no number"),
        ("--lora r=4,targets=", "targets are missing"),
        ("--lora r=4,targets=all-linear,lm_head", "'all-linear' is all there are"),
        ("--load-in 4bit", "give --lora or --adapter"),
        ("--load-in 3bit --lora r=4,targets=q_proj", "'3bit' is not supported; give 4bit or 8bit"),
    ):  # fmt: skip
        assert text in refused(hetpipe, f"{run} {option}"), option
        assert text in refused(hetpipe, f"{run.replace('run', 'plan', 1)} {option} -o out.json"), option
    folder = refused(hetpipe, f"run --model {adapter} --cluster cluster.toml")
    assert "is a PEFT folder; give its base by --model, and it by --adapter" in folder
    other = refused(hetpipe, f"run --model llama-tiny --cluster cluster.toml --adapter {adapter}")
    assert "has shape [4, 64], by llama-tiny and the folder's r [4, 172]; is it of this base?" in other
    bert = refused(hetpipe, f"run --model bert-tiny --cluster cluster.toml --adapter {adapter}")
    assert "LoRA target 'down_proj': bert-tiny has no such linear layer" in bert
    config = adapter / "adapter_config.json"
    text = config.read_text()
    config.write_text(text.replace('"use_dora": false', '"use_dora": true'))
    assert "use_dora is True, which is not trained here" in refused(hetpipe, f"{run} --adapter {adapter}")
    config.write_text(text.replace('"r": 4', '"r": 5'))
    assert "by base@" in refused(hetpipe, f"{run} --adapter {adapter}")
    assert "of a --model" in refused(
        hetpipe, "plan --profile profile.json --cluster cluster.toml --lora r=4,targets=q_proj"
    )
    assert "of 'made-up', not of --model" in refused(
        hetpipe, f"{run} --lora r=4,targets=q_proj --profile profile.json"
    )


@pytest.mark.slow
def test_cards_too_small_for_a_block_are_refused_with_what_is_missing(hetpipe: Shell):
    cards = '[{ kind = "emulated", count = 2, speed = 0.5, memory = "64 KiB" }]'
    network = '[network]\nbandwidth = "1 GB/s"\nlatency = "0 s"\n'
    hetpipe.write("small.toml", f'{network}[[nodes]]\nname = "n"\ndevices = {cards}\n')
    options = "--cluster small.toml --lora r=4,targets=q_proj --load-in 4bit --profile-budget 0 -q"
    short = hetpipe(f"run --model llama-tiny --steps 1 {options}")
    *before, error = short.err.splitlines()  # times known badly are said too
    assert short.code == 3 and all(line.startswith("warning: the times of") for line in before), short
    assert error.startswith("error: ") and error.count(" missing; add a device or memory") == 1, short
    assert not (hetpipe.folder / "runs").exists()
