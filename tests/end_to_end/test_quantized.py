"""Adapters beside a base in 4 or 8 bits train under any plan as by peft and bitsandbytes alone."""

import json
import math
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import pytest
import torch

import peft_models
import runs
import user_tasks
from cost_model.dtypes import FLOAT16_AUTOCAST, FLOAT32
from cost_model.errors import InputError
from folders import tiny_model
from hetpipe.data.keyed_order import epoch_order
from hetpipe.data.task import TrainingTask, registered_task
from hetpipe.models.chain import ChainModel
from hetpipe.runs.lora import LoraSettings
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.settings import Settings, TaskSettings
from hetpipe.training import checkpoint, checkpoint_weights
from hetpipe.training.run import train
from hetpipe.training.trainer import Trainer
from live_tensors import WatchedAdamW
from partition.plan import Pipeline, Plan, Stage
from runs import chain_plan, cluster_file, made_up_profile_of
from shell import Shell

BATCH, STEPS, LENGTH = 8, 3, 12
LLAMA, GPT2, BERT = peft_models.TARGETS


@dataclass(frozen=True)
class Place:
    """A folder with a base, a PEFT folder of random adapters for it, and runs that begin with them."""

    path: Path
    architecture: str
    load_in: str | None

    @property
    def lora(self) -> LoraSettings:
        return LoraSettings(4, 8.0, peft_models.TARGETS[self.architecture])

    @cached_property
    def base(self) -> Path:
        return peft_models.base_folder(self.path, self.architecture)

    @cached_property
    def adapter(self) -> Path:
        folder = self.path / "adapter"
        base = tiny_model(self.architecture)
        peft_models.peft_model(base, self.lora).save_pretrained(str(folder))
        return folder

    @property
    def name(self) -> str:
        return peft_models.name_of(self.base, self.lora, self.load_in)

    def settings(self, **others: Any) -> Settings:
        chosen: dict[str, Any] = {"adapter": str(self.adapter), "learning_rate": 0.01, "steps": STEPS}
        chosen |= {"load_in": self.load_in, "total_steps": STEPS + 2}
        return peft_models.settings_of(self.base, self.lora, **{**chosen, **others})

    def run(self, run: str, plan: Plan, settings: Settings, dtype: str = FLOAT32) -> list[float]:
        chain = peft_models.chain_of(self.base, self.lora, self.load_in)
        profile = made_up_profile_of(chain, self.name, dtype=dtype, sequence_length=LENGTH)
        report = train(
            settings, cluster_file(self.path), profile, replace(plan, model=self.name), self.folder(run)
        )
        assert report.owners_agree
        return [entry["loss"] for entry in self.folder(run).read_metrics()]

    def folder(self, run: str) -> RunFolder:
        return RunFolder(self.path / run)

    def task(self, run: str) -> TrainingTask:
        return registered_task(self.folder(run), TaskSettings(self.name, LENGTH, run=self.settings()))

    def alone(self, run: str, base: Any, microbatch: int = 0) -> tuple[Any, list[float]]:
        """The training of a run by peft beside a base that bitsandbytes holds."""
        model = peft_models.loaded(self.base, self.architecture, self.adapter, base)
        steps = range(STEPS)
        return model, peft_models.train_alone(
            model, self.task(run), self.settings(), BATCH, steps, microbatch
        )

    def weights(self, run: str) -> dict[str, torch.Tensor]:
        found = checkpoint.latest(self.folder(run).checkpoints)
        assert found is not None
        return checkpoint_weights.read_weights(found)


def two_pipelines() -> Plan:
    one = Pipeline(2, 5, (Stage(("here/0",), (0, 5), 3),))
    two = Pipeline(1, 3, (Stage(("here/1",), (0, 2), 2), Stage(("here/2",), (2, 5), 1, recompute=True)))
    return Plan("manual", "", BATCH, (one, two))


PLANS = {"three stages": chain_plan("", [0, 1, 3, 5], 2, BATCH), "two pipelines": two_pipelines()}
CASES = [
    (LLAMA, "4bit"),
    (GPT2, "4bit"),
    (BERT, "8bit"),
    pytest.param(LLAMA, "8bit", marks=pytest.mark.exhaustive),  # each by itself is among the others
]


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "load_in"), CASES)
def test_adapters_beside_a_quantized_base_train_as_by_peft_alone(tmp_path, architecture, load_in):
    here = Place(tmp_path, architecture, load_in)
    losses = {name: here.run(name, plan, here.settings()) for name, plan in PLANS.items()}
    model, alone = here.alone("three stages", peft_models.quantized_base(here.base, architecture, load_in))
    _, in_microbatches = here.alone(
        "three stages", peft_models.quantized_base(here.base, architecture, load_in), microbatch=1
    )
    assert in_microbatches == pytest.approx(alone, rel=5e-7)  # what one process differs from itself
    expected = peft_models.adapters_of(model)
    for name, found in losses.items():
        assert found == pytest.approx(alone, rel=5e-7), name
        weights = here.weights(name)
        assert weights.keys() == expected.keys()
        for key, value in weights.items():
            torch.testing.assert_close(value, expected[key], rtol=2e-4, atol=2e-6, msg=key)
    full = replace(here, load_in=None)
    _, unquantized = full.alone("three stages", peft_models.loaded_base(here.base, architecture))
    assert abs(unquantized[0] - alone[0]) > 1e-5  # 4 and 8 bits are not the weights that were given


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "load_in"), [(LLAMA, "4bit"), (GPT2, "8bit")])
def test_adapters_beside_a_quantized_base_train_in_float16(tmp_path, architecture, load_in):
    here = Place(tmp_path, architecture, load_in)
    plan = chain_plan("", [0, 2, 5], 2, BATCH)
    losses = here.run("half", plan, here.settings(), FLOAT16_AUTOCAST)
    _, alone = here.alone("half", peft_models.quantized_base(here.base, architecture, load_in))
    assert losses == pytest.approx(alone, rel=1e-3)
    assert losses != pytest.approx(alone, rel=1e-6)  # the base is dequantized into float16
    steps = here.folder("half").read_metrics()
    assert [(step["finite"], step["loss_scale"]) for step in steps] == [(True, 2.0**16)] * STEPS
    assert all(
        "lora_" in name and value.dtype == torch.float32 for name, value in here.weights("half").items()
    )


def trainer(place: Path, plan: Plan, model: Any, optimizer: Any) -> Trainer:
    example = {"input_ids": user_tasks.sequences(1)[0]["input_ids"][None]}
    chain = ChainModel.from_module(model, example)
    profile = made_up_profile_of(chain, "mine", sequence_length=user_tasks.LENGTH)
    return Trainer(
        model, user_tasks.sequences(24), optimizer, user_tasks.next_token_loss,
        plan=replace(plan, model="mine"), cluster=cluster_file(place), folder=place / "run",
        profile=profile, seed=5, clip_norm=1e30, rate_schedule=user_tasks.constant,
    )  # fmt: skip


def peft_model_of(place: Path, architecture: str, load_in: str, **others: Any) -> Any:
    base = peft_models.quantized_base(
        peft_models.base_folder(place, architecture), architecture, load_in, **others
    )
    return peft_models.peft_model(base, LoraSettings(4, 8.0, peft_models.TARGETS[architecture]))


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "load_in"), [(LLAMA, "8bit"), (GPT2, "4bit")])
def test_a_trainer_takes_a_quantized_peft_model_as_it_is(tmp_path, architecture, load_in):
    model = peft_model_of(tmp_path, architecture, load_in, bnb_4bit_use_double_quant=True)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    made = trainer(tmp_path, two_pipelines(), model, partial(torch.optim.SGD, lr=1.0))
    made.fit(1)
    data = user_tasks.sequences(24)
    order = epoch_order(5, 0, len(data))
    ids = torch.stack([data[order[position]]["input_ids"] for position in range(BATCH)])
    (user_tasks.next_token_loss(model.train()(input_ids=ids).logits, ids) / BATCH).backward()
    gradients = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    assert made.checkpoint is not None
    stored = checkpoint_weights.read_weights(made.checkpoint)
    assert stored.keys() == gradients.keys()
    largest = max(value.abs().max() for value in gradients.values())
    for name, value in stored.items():
        assert (before[name] - value - gradients[name]).abs().max() <= 1e-6 * largest, name
    checkpoint_weights.load_weights(made.checkpoint, model)
    for name, value in model.named_parameters():
        assert torch.equal(value, stored.get(name, before[name])), name

    other = peft_model_of(tmp_path, architecture, "4bit", bnb_4bit_quant_type="fp4")
    with pytest.raises(InputError, match="is not that of their base"):
        checkpoint_weights.load_weights(made.checkpoint, other)


@pytest.mark.slow
def test_nothing_of_a_frozen_weight_is_alive_twice_on_any_rank(tmp_path):
    model = peft_model_of(tmp_path, LLAMA, "4bit")
    plan = chain_plan("mine", [0, 1, 3, 5], 2, BATCH)
    made = trainer(tmp_path, plan, model, partial(WatchedAdamW, folder=tmp_path))
    made.fit(2)
    chain = ChainModel.from_module(model, {"input_ids": torch.zeros(1, 4, dtype=torch.long)})
    infos = {info.name: info for layer in chain.layer_parameters for info in layer}
    packed = [info for info in infos.values() if info.packing is not None]
    matrices = {tuple(info.shape) for info in packed}
    trained = [info for info in infos.values() if info.reached]
    plain = [info for info in infos.values() if not info.reached and info.packing is None]
    lines = [path.read_text().splitlines() for path in tmp_path.glob("*.jsonl")]
    assert [len(steps) for steps in lines] == [2, 2, 2]
    last = [entry for steps in lines for entry in json.loads(steps[-1])]
    floats = [(tuple(shape), num_bytes) for shape, dtype, num_bytes in last if "float" in dtype]
    whole = [shape for shape, num_bytes in floats if num_bytes == 4 * math.prod(shape)]
    assert not matrices & set(whole)  # no dequantized copy, gradient or state
    values = sum(num_bytes for _, dtype, num_bytes in last if dtype == "torch.uint8")
    assert values == sum(math.prod(info.shape) // 2 for info in packed)
    # a trained weight with its gradient and two states; all others once
    once = [info.shape for info in plain] + [(math.prod(info.shape) // 64,) for info in packed]  # and scales
    for shape in set(once) - {(16,)}:  # the 16 values of 4 bits are a table of bitsandbytes
        assert whole.count(shape) == once.count(shape), shape
    for shape in {info.shape for info in trained}:
        assert whole.count(shape) == 4 * sum(info.shape == shape for info in trained), shape


@pytest.mark.slow
def test_a_run_goes_on_and_its_adapters_come_out_merged(hetpipe: Shell):
    here = Place(hetpipe.folder, LLAMA, "4bit")
    here.run("run", PLANS["three stages"], here.settings(steps=2))
    source = checkpoint.latest(here.folder("run").checkpoints)
    assert source is not None
    assert set(checkpoint_weights.read_weights(source)) == set(here.weights("run"))
    assert all("lora_" in name for name in here.weights("run"))
    for line in ("export run -o peft", "export run -o merged --merge"):
        exported = hetpipe(line)
        assert exported.code == 0, exported.err

    # another plan goes on; its first loss is that of the adapters that came out, beside the quantized base
    losses = here.run("run", PLANS["two pipelines"], here.settings(resume_from=str(source)))
    inputs, labels = here.task("run").batch(2 * BATCH, BATCH)
    task = here.task("run")
    base = peft_models.quantized_base(here.base, LLAMA, "4bit")
    model = peft_models.loaded(here.base, LLAMA, hetpipe.folder / "peft", base)
    merged = peft_models.loaded_base(hetpipe.folder / "merged", LLAMA)
    for found in (model.train(), merged.train()):
        with torch.no_grad():
            loss = task.loss(found(**inputs).logits, labels) * task.term_weight(labels)
        assert loss.item() == pytest.approx(losses[2], rel=1e-6)

    # with the base as it was given, or in 8 bits, it would be another
    for load_in in (None, "8bit"):
        other = replace(here, load_in=load_in)
        with pytest.raises(InputError, match="its model is "):
            other.run("run", PLANS["three stages"], other.settings(steps=3, resume_from=str(source)))
    peft_models.save_model(here.base, LLAMA, seed=8)
    with pytest.raises(InputError, match="trained beside another base"):
        here.run("run", PLANS["three stages"], here.settings(steps=3, resume_from=str(source)))


@pytest.mark.slow
def test_memory_beside_a_quantized_base_is_predicted(hetpipe: Shell):
    (hetpipe.folder / "base").mkdir()
    config = tiny_model(LLAMA, hidden_size=128, intermediate_size=352).config
    config.architectures = [LLAMA]
    config.save_pretrained(hetpipe.folder / "base")  # no weights: drawn, and quantized
    (hetpipe.folder / "cluster.toml").write_text(runs.EMULATED_CLUSTER)
    options = "--model ./base --cluster cluster.toml --lora r=4,targets=q_proj,down_proj --load-in 4bit"
    pins = "--pin here/0=0-1 --pin here/1=2-2 --pin here/2=3-4 --pipelines 1"  # a last stage of one block
    planned = hetpipe(f"plan {options} {pins} --profile-budget 1 --microbatch-size 2 -o plan.json")
    assert planned.code == 0, planned.err
    ran = hetpipe(f"run {options} --plan plan.json --steps 1 --no-save --json --profile-budget 1")
    assert ran.code == 0, ran.err
    for name, device in json.loads(ran.out)["devices"].items():
        assert device["predicted_bytes"] == pytest.approx(device["peak_bytes"], rel=0.05), name
