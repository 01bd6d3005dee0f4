"""Adapters beside the layers of encoder-decoders: losses of one device; peft reads what is exported."""

import json

import peft
import pytest
import torch
import transformers

from hetpipe import cli
from hetpipe.data.dataset import IGNORE_LABEL
from hetpipe.data.task import registered_task
from hetpipe.models.adapters import is_adapter, task_spec, with_named_targets
from hetpipe.models.chain import ChainModel
from hetpipe.models.huggingface import model_spec
from hetpipe.models.names import model_entry
from hetpipe.runs.lora import LoraSettings
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.settings import Settings, TaskSettings
from other_folders import save_other
from partition.plan import Pipeline, Plan, Stage
from runs import made_up_profile_of, run

STEPS, LENGTH = 4, 14
PAIRS = [("The ship sails far away.", "Das Schiff segelt weit fort."), ("Grey.", "Grau.")] * 9
NO_DROPOUT = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout", "dropout_rate"), 0.0)
CASES = {
    "both": ("MarianMTModel", ("q_proj", "v_proj")),
    "decoder": ("MarianMTModel", ("encoder_attn.q_proj", "encoder_attn.v_proj")),
    "t5": ("T5ForConditionalGeneration", ("q", "v", "wo")),
    "bart": ("BartForConditionalGeneration", ("all-linear",)),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.parametrize(
    "case",
    [
        case if case in ("decoder", "t5") else pytest.param(case, marks=pytest.mark.exhaustive)
        for case in CASES
    ],
)
def test_adapters_train_as_on_one_device_and_are_read_by_peft(tmp_path, case):
    architecture, targets = CASES[case]
    config = getattr(transformers, architecture).config_class()
    known = {key: value for key, value in NO_DROPOUT.items() if hasattr(config, key)}
    save_other(tmp_path / "mine", architecture, **known)
    base, data = model_entry(str(tmp_path / "mine")), str(tmp_path / "pairs.jsonl")
    lines = [json.dumps({"source": source, "target": target}) for source, target in PAIRS]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines) + "\n")
    lora = with_named_targets(model_spec(base.name, base.place), LoraSettings(4, 8.0, targets))
    entry = base.with_adapters(lora)
    settings = Settings(
        steps=STEPS, learning_rate=1e-2, decay="constant", data=(data,), eval_data=(data,), weight_decay=0.0,
        warmup=0.0, clip_norm=1e30, **entry.in_settings,
    )  # fmt: skip
    chain = ChainModel.from_spec(task_spec(TaskSettings(entry.name, LENGTH, run=settings)))
    profile = made_up_profile_of(chain, entry.name, sequence_length=LENGTH)
    last = profile.num_layers
    cut = Stage(("here/0",), (0, 4), 2), Stage(("here/1",), (4, last), 1)
    plans = {
        "whole": Plan("manual", entry.name, 16, (Pipeline(16, 16, (Stage(("here/0",), (0, last), 1),)),)),
        "cut": Plan(
            "manual", entry.name, 16,
            (Pipeline(3, 10, cut), Pipeline(4, 6, (Stage(("here/2",), (0, last), 1),))),
        ),
    }  # fmt: skip
    losses = {name: run(tmp_path / name, plan, settings, profile)[1] for name, plan in plans.items()}

    done = RunFolder(tmp_path / "whole" / "run")
    task = registered_task(done, TaskSettings(entry.name, LENGTH, run=settings))
    layers = task.chain.materialise(range(last), settings.seed)
    trained = {name: value for name, value in layers.owned_parameters().items() if value.requires_grad}
    assert trained and all(map(is_adapter, trained))
    if case == "decoder":
        assert not any("encoder.layers" in name for name in trained)
    optimizer, expected = torch.optim.AdamW(trained.values(), lr=1e-2, weight_decay=0.0), []
    for step in range(STEPS):
        inputs, labels = task.batch(16 * step, 16)
        loss = task.loss(layers.run(0, last, inputs)[0], labels) / int((labels != IGNORE_LABEL).sum())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(float(loss))
    assert losses["whole"] == pytest.approx(expected, rel=2e-6)
    assert losses["cut"] == pytest.approx(expected, rel=2e-5)
    assert expected[-1] < expected[0]

    exported, merged = tmp_path / "exported", tmp_path / "merged"
    assert cli.main(["export", str(done.path), "-o", str(exported)]) == 0
    assert cli.main(["export", str(done.path), "-o", str(merged), "--merge"]) == 0
    model_class = getattr(transformers, architecture)
    read = {
        "peft": peft.PeftModel.from_pretrained(model_class.from_pretrained(tmp_path / "mine"), exported),
        "merged": model_class.from_pretrained(merged),
    }
    inputs, labels = task.held_out.batch(0, task.held_out.num_samples)
    told = done.read_metrics()[-1]["eval_loss"]
    for name, model in read.items():
        with torch.no_grad():
            assert float(model.eval()(**inputs, labels=labels).loss) == pytest.approx(told, rel=1e-5), name
