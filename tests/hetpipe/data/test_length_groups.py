"""Samples of like length in a step: each once an epoch, filled up little, with the loss that it has alone."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cost_model.errors import InputError
from hetpipe.data.chats import ChatDataset
from hetpipe.data.dataset import IGNORE_LABEL
from hetpipe.data.kinds import check_grouped
from hetpipe.data.length_groups import STEPS_SORTED, LengthGroups
from hetpipe.data.task import prepare_data, registered_task
from hetpipe.models.names import model_entry
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.settings import Settings, TaskSettings
from partition.plan_file import plan_text
from runs import chain_plan, made_up_profile, run
from shell import Shell

GPT2 = model_entry("gpt2-tiny")


def chats_of(lengths, *, sequence_length=64, seed=5) -> ChatDataset:
    """Chats of so many tokens, of which all but the first are learned; tokens count up."""
    ends = np.cumsum(lengths)
    tokens = np.arange(ends[-1], dtype=np.uint16)
    return ChatDataset(tokens, np.ones(len(tokens), np.uint8), ends, sequence_length, seed, 1)


def chat_file(folder: Path, count: int = 60) -> Path:
    """Chats of 1 to 40 words."""
    path = folder / "chats.jsonl"
    words = [1 + 7 * index % 40 for index in range(count)]
    rows = [{"prompt": f"{n}?", "completion": " ".join(["ship"] * n)} for n in words]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@given(
    lengths=st.lists(st.integers(2, 70), min_size=1, max_size=300),
    per_step=st.integers(1, 9),
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=20),
)
def test_every_epoch_has_each_sample_once_however_it_is_read(lengths, per_step, sizes):
    data, count = LengthGroups(chats_of(lengths), per_step), len(lengths)
    seen: list[int] = []
    for size in sizes:
        seen += data.order(len(seen), size).tolist()
    assert seen == data.order(0, len(seen)).tolist()
    epochs = [seen[start : start + count] for start in range(0, len(seen), count)]
    assert all(len(set(epoch)) == len(epoch) and max(epoch) < count for epoch in epochs)


def test_lengths_of_all_samples_are_computed_once(monkeypatch):
    asked, lengths = [], ChatDataset.lengths.fget
    monkeypatch.setattr(ChatDataset, "lengths", property(lambda data: asked.append(1) or lengths(data)))
    data = LengthGroups(chats_of(range(2, 50)), 4)
    assert [data.batch(step * 4, 4).labels.shape[0] for step in range(12)] == [4] * 12
    assert len(asked) == 1


def test_a_step_is_as_long_as_its_longest_sample_whichever_part_is_asked_for():
    lengths = [2 + 11 * index % 63 for index in range(500)]
    data = LengthGroups(chats_of(lengths), 8)
    for step in range(100):  # into the next epoch, which begins within a step
        whole = data.batch(8 * step, 8)
        part = data.batch(8 * step + 3, 2)
        longest = max(lengths[sample] for sample in data.order(8 * step, 8))
        assert whole.input_ids.shape == (8, min(64, -(-longest // 8) * 8))
        assert (part.input_ids == whole.input_ids[3:5]).all() and (part.labels == whole.labels[3:5]).all()
        assert whole.num_loss_tokens == (whole.labels != IGNORE_LABEL).sum()


def test_little_is_filling_and_steps_are_not_sorted():
    lengths = np.random.default_rng(0).geometric(0.05, 4 * STEPS_SORTED * 8) + 1
    data = LengthGroups(chats_of(lengths), 8)
    assert data.notes()[0].endswith("filled up to 64 tokens each, 68% is filling")
    assert data.notes()[-1] == "grouped by length, 8 a step: 16% is filling"
    steps = [data.length_at(8 * step, 8) for step in range(STEPS_SORTED)]
    assert len(set(steps)) > 4 and steps != sorted(steps) and steps != sorted(steps, reverse=True)
    again = [data.length_at(8 * step, 8) for step in range(STEPS_SORTED, 2 * STEPS_SORTED)]
    assert steps != again


def test_a_sample_has_the_loss_of_one_that_is_filled_up_to_the_end(tmp_path):
    """Of the same samples, in the same step: padded to the step's longest, or to the length of all."""
    settings = Settings(steps=1, data=(str(chat_file(tmp_path)),), group_by_length=True, **GPT2.in_settings)
    place, task_settings = RunFolder(tmp_path / "run"), TaskSettings("gpt2-tiny", 64, run=settings)
    plan = chain_plan("gpt2-tiny", [0, 6], 4)
    place.path.mkdir()
    told = prepare_data(place, task_settings, plan=plan)
    assert told[-1].startswith(f"grouped by length, {plan.global_batch_size} a step: ")
    place.write(place.plan, plan_text(plan))
    task = registered_task(place, task_settings)
    plain = registered_task(place, replace(task_settings, run=replace(settings, group_by_length=False)))
    groups, samples = task.batch.args[0], plain.batch.args[0]
    model = task.chain.materialise(range(6), seed=0).eval()
    shapes = set()
    with torch.no_grad():
        for step in range(3):
            inputs, labels = task.batch(16 * step, 16)
            full = samples.rows(groups.order(16 * step, 16), 16 * step, 64)
            shapes.add(inputs["input_ids"].shape[1])
            sums = []
            for given_inputs, given_labels in (
                (inputs, labels),
                ({"input_ids": torch.from_numpy(full.inputs["input_ids"])}, torch.from_numpy(full.labels)),
            ):
                logits = model.run(0, 6, given_inputs)[0]
                sums.append(float(task.loss(logits, given_labels)))
            assert sums[0] == pytest.approx(sums[1], rel=1e-6)
    assert len(shapes) > 1 and max(shapes) < 64


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*")
def test_losses_are_the_same_under_any_plan_and_on_resume(tmp_path):
    data = (str(chat_file(tmp_path)),)
    profile = made_up_profile("gpt2-tiny")
    settings = Settings(
        steps=6, learning_rate=1e-2, data=data, every=3, group_by_length=True, **GPT2.in_settings
    )
    whole, cut = chain_plan("gpt2-tiny", [0, 6], 4), chain_plan("gpt2-tiny", [0, 2, 6], 2)
    report, losses = run(tmp_path / "whole", whole, settings, profile)
    assert [device.peak_bytes for device in report.devices.values()] == [None]  # of a step of any length
    assert run(tmp_path / "cut", cut, settings, profile)[1] == pytest.approx(losses, rel=2e-6)
    source = RunFolder(tmp_path / "whole" / "run").checkpoints / "step-000003"
    gone_on = replace(settings, resume_from=str(source))
    assert run(tmp_path / "on", cut, gone_on, profile)[1] == pytest.approx(losses[3:], rel=2e-6)


def test_what_is_all_as_long_is_refused(tmp_path, hetpipe: Shell):
    (tmp_path / "a.txt").write_text("The ship sails.\n" * 100)
    with pytest.raises(
        InputError, match=r"--group-by-length is for chats, .*a\.txt \(text\) are all as long"
    ):
        check_grouped([tmp_path / "a.txt"], GPT2)
    with pytest.raises(InputError, match="packed rows are all as long"):
        Settings(steps=1, pack=True, group_by_length=True)
    path = chat_file(tmp_path)
    line = f"run --model gpt2-tiny --cluster cluster.toml --steps 1 --group-by-length --data {path}"
    for options, said in (("--pack", "packed rows"), ("--compile", "compiles blocks for one; leave one out")):
        result = hetpipe(f"{line} {options}")
        assert result.code == 2 and said in result.err and "Traceback" not in result.err
    result = hetpipe(line.replace(str(path), "a.txt"))
    assert result.code == 2 and "are all as long; leave it out" in result.err
