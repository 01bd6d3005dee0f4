"""What decides a run's losses is that of its checkpoint, or said to differ."""

from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import JsonValue

from cost_model.errors import InputError
from hetpipe.commands.resuming import RunBefore
from hetpipe.runs.settings import Settings, TaskSettings
from hetpipe.training.checkpoint import Manifest
from hetpipe.training.resumed_settings import (
    changes,
    check_overridden,
    deciding_settings,
    differences,
    inherited,
    option_differences,
    overridden,
)
from runs import chain_plan

PLAN = chain_plan("mine", [0, 2, 5], 4)
BEFORE = TaskSettings("mine", 8, "float32", Settings(steps=10, learning_rate=1e-3, betas=(0.8, 0.9), seed=3))


def manifest(settings: TaskSettings = BEFORE) -> Manifest:
    decided = deciding_settings(settings, PLAN)
    return Manifest("mine", 4, 64, settings.seed, 8, "", (), "2", {}, None, settings=decided)


def resumed(**changes: object) -> TaskSettings:
    return replace(BEFORE, run=replace(BEFORE.run, resume_from="x", **changes))


def test_the_same_settings_differ_in_nothing():
    assert differences(manifest(), resumed(), PLAN) == []
    stated = resumed(steps=8, total_steps=10)  # the schedule is the same, though its end is not reached
    assert differences(manifest(), stated, PLAN) == []


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"learning_rate": 3e-4}, "learning_rate is 0.0003, before the checkpoint it was 0.001"),
        ({"weight_decay": 0.1}, "weight_decay is 0.1, before the checkpoint it was 0.01"),
        ({"betas": (0.9, 0.9)}, "betas is 0.9, 0.9, before the checkpoint it was 0.8, 0.9"),
        ({"clip_norm": 5.0}, "clip_norm is 5, before the checkpoint it was 1"),
        ({"data": ("a.txt",)}, "data is a.txt, before the checkpoint it was none"),
    ],
)
def test_each_difference_is_a_sentence(changes, sentence):
    assert differences(manifest(), resumed(**changes), PLAN) == [sentence]


def test_batch_and_precision_are_compared_too():
    other = replace(BEFORE, dtype="bfloat16-autocast")
    assert differences(manifest(), other, chain_plan("mine", [0, 5], 4, batch=8)) == [
        "global_batch_size is 8, before the checkpoint it was 16",
        "dtype is bfloat16-autocast, before the checkpoint it was float32",
    ]


def test_another_length_of_the_schedule_is_told_by_the_rate_of_the_next_step():
    # warm-up: 1 of 10 steps, then 1e-3 x (10 - 4) / 9; of 20 steps 2, then 1e-3 x (20 - 4) / 18
    assert differences(manifest(), resumed(steps=20), PLAN) == [
        "total_steps is 20, before the checkpoint it was 10: the next step's learning rate is 0.000889 and "
        "not 0.000667"
    ]
    assert differences(manifest(), resumed(steps=20), PLAN, own={"own_rates": True}) == []


def own_before(**own: JsonValue) -> Manifest:
    return replace(manifest(), settings={**deciding_settings(BEFORE, PLAN), **own})


@pytest.mark.parametrize(
    ("before", "now", "sentences"),
    [
        ({"num_samples": 16}, {"num_samples": 17}, ["num_samples is 17, before the checkpoint it was 16"]),
        ({"shuffle": True}, {"shuffle": False}, ["shuffle is False, before the checkpoint it was True"]),
        ({"data_seed": 3}, {"data_seed": 4}, ["data_seed is 4, before the checkpoint it was 3"]),
        ({}, {"num_samples": 17, "shuffle": False, "own_rates": True, "next_rate": 0.5}, []),
        (
            {"own_rates": False},
            {"own_rates": True, "next_rate": 0.5},
            ["rate_schedule is given, before the checkpoint it was not"],
        ),
        (
            {"own_rates": True, "next_rate": 0.5},
            {"own_rates": False},
            ["rate_schedule is not given, before the checkpoint it was"],
        ),
        (
            {"own_rates": True, "next_rate": 1.0},
            {"own_rates": True, "next_rate": 0.1},
            ["rate_schedule is 0.1 in the next step, before the checkpoint it was 1"],
        ),
        ({"own_rates": True, "next_rate": 0.3}, {"own_rates": True, "next_rate": 0.3}, []),
        ({"own_rates": True, "next_rate": 0.3}, {"own_rates": True}, []),
    ],
)
def test_the_order_of_own_data_and_own_rates_are_compared(before, now, sentences):
    assert differences(own_before(**before), resumed(), PLAN, own=now) == sentences


def test_what_is_not_given_is_inherited():
    found = inherited(manifest(), steps=8)
    assert Settings(steps=8, **found) == replace(BEFORE.run, steps=8, total_steps=10)
    assert "total_steps" not in inherited(manifest(), steps=11)  # the schedule ended before
    assert inherited(replace(manifest(), settings={}), steps=8) == {"seed": 3}  # of an older checkpoint


SOURCE = Path("runs/x/checkpoints/step-000004")


def test_what_differs_is_refused_until_it_is_named():
    found = changes(manifest(), resumed(learning_rate=3e-4, betas=(0.9, 0.9)), PLAN)
    check_overridden(found, overridden(["learning-rate", "betas,clip-norm"]), SOURCE)
    with pytest.raises(InputError) as caught:
        check_overridden(found, overridden(["betas"]), SOURCE)
    assert str(caught.value) == (
        "runs/x/checkpoints/step-000004: learning_rate is 0.0003, before the checkpoint it was 0.001; leave "
        "out what says so to go on as before, or give --override learning-rate to change it"
    )
    with pytest.raises(InputError, match='did you mean "learning-rate"'):
        overridden(["learning-rat"])
    written = found[0].to_json(4)
    assert written == {"step": 4, "key": "learning_rate", "before": 1e-3, "now": 3e-4}


def test_a_longer_schedule_is_refused_only_where_the_run_needs_none():
    check_overridden(changes(manifest(), resumed(steps=20), PLAN), (), SOURCE)
    with pytest.raises(InputError, match="total_steps is 20"):
        check_overridden(changes(manifest(), resumed(steps=8, total_steps=20), PLAN), (), SOURCE)


def test_texts_are_compared_by_what_they_say():
    before = deciding_settings(replace(BEFORE, run=replace(BEFORE.run, data=("/a/x.txt",))), PLAN, "a" * 64)
    moved, there = resumed(data=("/b/x.txt",)), replace(manifest(), settings=before)
    assert changes(there, moved, PLAN, data_sha256="a" * 64) == []
    (other,) = changes(there, moved, PLAN, data_sha256="b" * 64)
    assert (other.key, other.before, other.now) == ("data", "a" * 64, "b" * 64)
    assert [change.key for change in changes(there, moved, PLAN)] == ["data"]  # by where they lie


def test_on_several_hosts_no_places_are_inherited():
    before = RunBefore(SOURCE, {"data": ("/a/x.txt",)})
    with pytest.raises(InputError, match="whose place is each host's own; give --data on each host"):
        before.check_data_given("--data")
    RunBefore(SOURCE, {"data": ()}).check_data_given("--data")


def in_groups(*groups: dict[str, object], rate: float = 0.1) -> list[str]:
    before = [{"lr": 0.1, "momentum": 0.9, "nesterov": False}, {"lr": 0.2, "momentum": 0.9}]
    optimizer = {"name": "torch.optim.sgd.SGD", "options": before[: len(groups) or 2]}
    settings = {"learning_rate": 0.1}
    return option_differences(replace(manifest(), optimizer=optimizer, settings=settings), list(groups), rate)


def test_the_options_of_an_optimizer_of_ones_own_are_compared():
    same = {"lr": 0.1, "momentum": 0.9, "nesterov": False, "new": 3}
    assert in_groups(same) == []
    other = {"lr": 0.3, "momentum": 0.5, "nesterov": True}
    told = [
        "momentum of SGD is 0.5, before the checkpoint it was 0.9",
        "nesterov of SGD is True, before the checkpoint it was False",
    ]
    assert in_groups(other, rate=0.3) == told  # of the rate the settings tell
    assert in_groups(same, {"lr": 0.3, "momentum": 0.9}) == [
        "lr of group 1 of SGD is 0.3, before the checkpoint it was 0.2"
    ]
    assert in_groups() == ["SGD has 0 groups of parameters, before the checkpoint it had 2"]
    before = replace(manifest(), optimizer={"name": "AdamW", "steps": 4})
    assert option_differences(before, [], 0.1) == []  # of an older checkpoint
