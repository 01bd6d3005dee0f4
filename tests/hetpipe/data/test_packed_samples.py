"""Samples packed into rows: each has the loss that it has alone, in every plan; what cannot be is refused."""

import json
import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from cost_model.errors import InputError
from hetpipe.data.chats import ChatDataset
from hetpipe.data.dataset import IGNORE_LABEL
from hetpipe.data.kinds import load_data
from hetpipe.data.packed_samples import PackedSamples, best_fit_decreasing
from hetpipe.data.task import Reading, prepare_data, registered_task
from hetpipe.data.vocabulary import load_vocabulary
from hetpipe.models.adapters import task_spec
from hetpipe.models.chain import ChainModel
from hetpipe.models.kept_proofs import require_split
from hetpipe.models.loss import loss_sum
from hetpipe.models.names import model_entry
from hetpipe.models.tasks import Task
from hetpipe.runs.lora import LoraSettings
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.settings import Settings, TaskSettings
from other_folders import save_other
from runs import chain_plan, made_up_profile, made_up_profile_of, run
from shell import Shell

LENGTH = 64
WORDS = ("ship", "sails", "over", "the", "grey", "sea", "far", "away", "who", "knows")


def chats_file(path, count=120, seed=0):
    drawn = random.Random(seed)

    def words(most):
        return " ".join(drawn.choices(WORDS, k=drawn.randint(1, most)))

    lines = [
        json.dumps({"prompt": words(6), "completion": words(drawn.choice((3, 20)))}) for _ in range(count)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def texts_file(path, count=60):
    drawn = random.Random(1)
    texts = [" ".join(drawn.choices(WORDS, k=drawn.choice((1, 4, 30, 200)))) for _ in range(count)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def prepared(folder, data, model="gpt2-tiny", *, pack=True):
    """The settings of a task on written data, and its samples."""
    entry = model_entry(model)
    settings = TaskSettings(
        entry.name, LENGTH, run=Settings(steps=1, data=(str(data),), pack=pack, **entry.in_settings)
    )
    folder.mkdir()
    place = RunFolder(folder)
    told = prepare_data(place, settings)
    spec = task_spec(settings)
    reading = Reading(
        spec, spec.inputs, load_vocabulary(place.vocabulary), place.chat_template, place.image_processor,
        LENGTH, 0,
    )  # fmt: skip
    return settings, load_data(place.path, reading), told


@pytest.mark.parametrize("seed", range(5))
def test_rows_hold_each_item_once_and_are_few(seed):
    lengths = np.random.default_rng(seed).integers(1, 41, 300)
    items, ends = best_fit_decreasing(lengths, 40)
    rows = np.split(items, ends[:-1])
    assert sorted(items) == list(range(300)) and all(lengths[row].sum() <= 40 for row in rows)
    least = -(-lengths.sum() // 40)
    assert least <= len(rows) <= 11 / 9 * least + 4  # Johnson, 1973


def test_rows_by_hand():
    items, ends = best_fit_decreasing(np.array([3, 6, 3, 5, 4, 1]), 9)
    # 6; 5 opens a row, 4 fills it; 3 fills the first; 3 opens the third, into which 1 goes
    assert [row.tolist() for row in np.split(items, ends[:-1])] == [[1, 0], [3, 4], [2, 5]]


def test_a_packed_row_has_whole_samples_one_after_the_other(tmp_path):
    _, packed, told = prepared(tmp_path / "packed", chats_file(tmp_path / "chats.jsonl"))
    _, alone, _ = prepared(tmp_path / "alone", tmp_path / "chats.jsonl", pack=False)
    assert isinstance(packed, PackedSamples) and isinstance(alone, ChatDataset)
    assert packed.num_terms == alone.num_terms and packed.num_samples < alone.num_samples / 2
    rows, singles = packed.batch(0, packed.num_samples), alone.batch(0, alone.num_samples)
    assert rows.num_loss_tokens == (rows.labels[:, 1:] != IGNORE_LABEL).sum() == packed.num_terms
    found = []
    for ids, labels, positions in zip(rows.input_ids, rows.labels, rows.inputs["position_ids"], strict=True):
        begins = [*np.flatnonzero(positions == 0), LENGTH]
        for start, stop in pairwise(begins):
            assert (positions[start:stop] == np.arange(stop - start)).all()
            assert labels[start] == IGNORE_LABEL
            if (labels[start:stop] != IGNORE_LABEL).any():
                found.append((tuple(ids[start:stop]), tuple(labels[start:stop])))
    expected = []
    for ids, labels, length in zip(
        singles.input_ids, singles.labels, (singles.labels != IGNORE_LABEL).cumsum(1).argmax(1), strict=True
    ):
        expected.append((ids, labels, length))
    assert len(found) == len(expected)
    texts = {ids for ids, _ in found}
    for ids, labels, last in expected:  # what fills a chat up is left out, what is learned is in it
        match = next(text for text in texts if tuple(ids[: len(text)]) == text and len(text) > last)
        assert (labels[len(match) :] == IGNORE_LABEL).all()
    assert any("chats packed into" in line and "% is filling" in line for line in told)


@pytest.mark.parametrize("make", [chats_file, texts_file])
def test_a_packed_sample_has_the_loss_and_gradients_that_it_has_alone(tmp_path, make):
    """In float64, of a whole epoch: by rows, and by the samples of each row one by one."""
    settings, packed, _ = prepared(tmp_path / "run", make(tmp_path / "data.jsonl", 16), "llama-tiny")
    torch.manual_seed(0)
    model = task_spec(settings).build().double()
    data = packed.batch(0, packed.num_samples)
    rows = {name: torch.from_numpy(value) for name, value in data.inputs.items()}
    labels = torch.from_numpy(data.labels)
    together = loss_sum(Task.CAUSAL_LM, model(**rows).logits, labels)
    together.backward()
    gradients = {name: value.grad.clone() for name, value in model.named_parameters()}
    model.zero_grad()
    total = 0.0
    for row in range(packed.num_samples):
        begins = [*np.flatnonzero(data.inputs["position_ids"][row] == 0), LENGTH]
        for start, stop in pairwise(begins):
            ids, own = rows["input_ids"][row : row + 1, start:stop], labels[row : row + 1, start:stop]
            if stop - start > 1:
                loss = loss_sum(Task.CAUSAL_LM, model(input_ids=ids).logits, own)
                loss.backward()
                total += loss.item()
    assert together.item() == pytest.approx(total, rel=1e-12)
    largest = max(float(value.abs().max()) for value in gradients.values())
    for name, value in model.named_parameters():
        assert float((value.grad - gradients[name]).abs().max()) <= 1e-6 * largest, name  # RMSNorm: float32


def test_long_texts_are_in_pieces_and_nothing_is_lost(tmp_path):
    _, packed, told = prepared(tmp_path / "run", texts_file(tmp_path / "texts.jsonl"))
    covered = np.zeros(len(packed.tokens), int)
    for start, length in zip(packed.starts, packed.lengths, strict=True):
        covered[start : start + length] += 1
    assert covered.max() == 1 and (covered == 0).sum() < 10  # pieces of one token
    assert any("are longer than 64 tokens and in pieces" in line for line in told)
    rows = packed.batch(0, packed.num_samples)
    assert rows.num_loss_tokens == (packed.lengths - 1).sum()


def test_an_epoch_of_rows_resumes_where_it_was(tmp_path):
    _, packed, _ = prepared(tmp_path / "run", chats_file(tmp_path / "chats.jsonl"))
    count = packed.num_samples
    whole = packed.batch(0, 2 * count)
    parts = [packed.batch(first, 3) for first in range(0, 2 * count - 2, 3)]
    joined = np.concatenate([part.input_ids for part in parts])
    assert (joined == whole.input_ids[: len(joined)]).all()
    first, second = (sorted(map(tuple, whole.input_ids[at : at + count])) for at in (0, count))
    assert first == second


@pytest.mark.parametrize("model", ["gpt2-tiny", "llama-tiny"])
def test_models_by_name_keep_packed_samples_apart(model):
    require_split(task_spec(TaskSettings(model, LENGTH, run=Settings(steps=1, pack=True))))


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        (
            "BloomForCausalLM",
            "takes no position_ids, which tell the samples of a row apart; leave out --pack",
        ),
        (
            "OPTForCausalLM",
            "cannot take packed samples: samples of one row have other logits .*; leave out --pack",
        ),
        (
            "ElectraForMaskedLM",
            r"--pack is for models that continue text \(causal-lm\), and .* learns masked-lm",
        ),
    ],
)
def test_a_model_that_cannot_is_refused_in_one_line(tmp_path, architecture, reason):
    save_other(tmp_path / "model", architecture)
    data = texts_file(tmp_path / "texts.jsonl")
    with pytest.raises(InputError, match=reason) as error:
        prepared(tmp_path / "run", data, str(tmp_path / "model"))
    assert "\n" not in str(error.value)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*chats")
@pytest.mark.filterwarnings("ignore:gpt2-tiny brings no chat template")
def test_the_same_losses_under_any_plan_and_on_resume(tmp_path):
    """With dropout; the held-out loss, which has none, is that of chats that are not packed."""
    data = str(chats_file(tmp_path / "chats.jsonl"))
    settings = Settings(steps=4, learning_rate=1e-2, data=(data,), eval_data=(data,), every=2, pack=True)
    profile = made_up_profile("gpt2-tiny")
    plans = {"whole": chain_plan("gpt2-tiny", [0, 6], 4), "cut": chain_plan("gpt2-tiny", [0, 2, 4, 6], 2)}
    losses = {name: run(tmp_path / name, plan, settings, profile)[1] for name, plan in plans.items()}
    assert losses["cut"] == pytest.approx(losses["whole"], rel=2e-6)
    done = RunFolder(tmp_path / "whole" / "run")
    gone_on = replace(settings, resume_from=str(done.checkpoints / "step-000002"))
    assert run(tmp_path / "on", plans["cut"], gone_on, profile)[1] == pytest.approx(
        losses["whole"][2:], rel=2e-6
    )
    task = registered_task(done, TaskSettings("gpt2-tiny", LENGTH, run=settings))
    assert {"input_ids", "position_ids"} == task.batch(0, 1)[0].keys()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*chats")
@pytest.mark.filterwarnings("ignore:llama-tiny.*brings no chat template")
def test_adapters_train_on_packed_rows_as_on_one_device(tmp_path):
    data = str(chats_file(tmp_path / "chats.jsonl"))
    entry = model_entry("llama-tiny").with_adapters(LoraSettings(4, 8.0, ("q_proj", "down_proj")))
    settings = Settings(
        steps=3, learning_rate=1e-2, weight_decay=0.0, data=(data,), eval_data=(data,), eval_every=3,
        pack=True, **entry.in_settings,
    )  # fmt: skip
    chain = ChainModel.from_spec(task_spec(TaskSettings(entry.name, LENGTH, run=settings)))
    profile = made_up_profile_of(chain, entry.name)
    plans = {"whole": chain_plan(entry.name, [0, 6], 4), "cut": chain_plan(entry.name, [0, 2, 4, 6], 2)}
    losses = {name: run(tmp_path / name, plan, settings, profile)[1] for name, plan in plans.items()}
    done = RunFolder(tmp_path / "whole" / "run")
    task = registered_task(done, TaskSettings(entry.name, LENGTH, run=settings))
    layers = task.chain.materialise(range(6), settings.seed)
    trained = [value for value in layers.owned_parameters().values() if value.requires_grad]
    optimizer, expected = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.0), []
    for step in range(3):
        inputs, labels = task.batch(16 * step, 16)
        loss = task.loss(layers.run(0, 6, inputs)[0], labels) * task.term_weight(labels)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate_at(step)
        optimizer.step()
        expected.append(loss.item())
    assert losses["whole"] == pytest.approx(expected, rel=2e-6)
    assert losses["cut"] == pytest.approx(expected, rel=2e-6)
    plain = TaskSettings(entry.name, LENGTH, run=replace(settings, pack=False))
    (tmp_path / "apart").mkdir()
    prepare_data(RunFolder(tmp_path / "apart"), plain)
    alone = registered_task(RunFolder(tmp_path / "apart"), plain)
    model = alone.chain.materialise(range(6), settings.seed).eval()
    with torch.no_grad():
        for name, value in model.owned_parameters().items():
            value.copy_(layers.owned_parameters()[name])
        inputs, labels = alone.held_out.batch(0, alone.held_out.num_samples)
        loss = alone.loss(model.run(0, 6, inputs)[0], labels) / alone.held_out.num_loss_tokens
    assert done.read_metrics()[-1]["eval_loss"] == pytest.approx(float(loss), rel=1e-5)


@pytest.mark.slow
def test_from_the_command_line(tmp_path, capsys, monkeypatch):
    """Packed rows are measured, planned and trained on; on resume they stay packed, or --override says so."""
    monkeypatch.chdir(tmp_path)
    shell = Shell(tmp_path, capsys)
    assert shell("init --emulate 0.5,0.3 -o emulated.toml").code == 0
    chats_file(tmp_path / "chats.jsonl")
    line = (
        "run --model gpt2-tiny --cluster emulated.toml --global-batch-size 8 --no-proof --profile-budget 0.5 "
        "--run-folder packed --json"
    )
    result = shell(f"{line} --data chats.jsonl --steps 2 --pack")
    assert result.code == 0, result.err
    assert "chats packed into" in result.err
    result = shell(f"{line} --steps 3 --resume packed")
    assert result.code == 0 and "chats packed into" in result.err, result.err
    result = shell(f"{line} --steps 4 --resume packed --no-pack")
    assert result.code == 2 and "pack is False, before the checkpoint it was True" in result.err
    result = shell("run --model bert-tiny --cluster emulated.toml --pack")
    assert result.code == 2 and "--pack is for models that continue text" in result.err
    assert len(result.err.strip().splitlines()) == 1
