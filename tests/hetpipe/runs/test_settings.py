import math
import re
from dataclasses import replace

import pytest

from cost_model.errors import InputError
from hetpipe.runs.settings import DECIDED, Clock, Decay, Settings, TaskSettings, read_settings, settings_text
from small_case import small_plan, small_profile

REFUSED = [
    ({"steps": 0}, "steps is 0; give at least 1"),
    ({"learning_rate": -1e-3}, "learning_rate is -0.001; give zero or more"),
    ({"weight_decay": -0.1}, "weight_decay is -0.1; give zero or more"),
    ({"every": -1}, "every is -1; give zero or more"),
    ({"every_s": -1.0}, "every_s is -1.0; give zero or more"),
    ({"every_s": float("inf")}, "every_s is inf; give a finite number"),
    ({"keep": -1}, "keep is -1; give zero or more"),
    ({"seed": -1}, "seed is -1; give zero or more"),
    ({"total_steps": 9}, "total_steps is 9, below steps (10); give at least that"),
    ({"warmup": 1.5}, "warmup is 1.5; give the share of the steps, in [0, 1]"),
    ({"clip_norm": 0.0}, "clip_norm is 0.0; give more than zero (1e30 for no clipping)"),
    ({"timeout_s": 0.0}, "timeout_s is 0.0; give more than zero seconds"),
    # the file could not be read back: JSON has neither
    ({"clip_norm": float("inf")}, "clip_norm is inf; give a finite number"),
    ({"learning_rate": float("nan")}, "learning_rate is nan; give a finite number"),
]


@pytest.mark.parametrize(("wrong", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_a_wrong_setting_is_refused_with_its_remedy(wrong, message):
    with pytest.raises(InputError, match=re.escape(message)):
        replace(Settings(steps=10), **wrong)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"sequence_length": -1}, "sequence_length is -1; give at least 1"),
        (
            {"dtype": "float16"},
            "dtype 'float16' is not supported; float32, float64, tf32, bfloat16-",
        ),
    ],
)
def test_a_task_of_no_length_or_an_unknown_dtype_is_refused(wrong, message):
    with pytest.raises(InputError, match=re.escape(message)):
        TaskSettings("bert-tiny", **wrong)


def test_settings_hold_nothing_that_plan_and_profile_hold():
    plan, profile = small_plan(num_samples=4), small_profile()
    settings = Settings.of(plan, profile, steps=3, seed=7)
    assert settings == Settings(steps=3, seed=7) and hash(settings) == hash(Settings(steps=3, seed=7))
    assert not {*DECIDED} & settings.to_json().keys()
    task = TaskSettings.of(profile, settings)
    assert (task.model, task.sequence_length, task.dtype) == ("made-up", profile.sequence_length, "float32")
    assert task.seed == 7


def test_what_is_stated_of_plan_and_profile_is_compared_with_them():
    plan, profile = small_plan(num_samples=4), small_profile()
    settings = Settings.of(plan, profile, steps=3, seed=7)
    assert (settings.model, settings.global_batch_size, Settings(steps=3).model) == ("made-up", 4, None)
    for one in (settings, Settings("made-up", 3), Settings(steps=3), replace(settings, steps=4)):
        one.check_stated(plan, profile)
    for wrong in ({"model": "bert-tiny"}, {"global_batch_size": 5}, {"dtype": "float64"}):
        ((key, value),) = wrong.items()
        for one in (replace(settings, **wrong), replace(Settings(steps=3, **wrong), seed=1)):
            with pytest.raises(InputError, match=f"{key} of the run is {value!r}, of its plan and profile"):
                one.check_stated(plan, profile)


def test_learning_rate_rises_linearly_and_then_falls_to_zero():
    settings = Settings(steps=10, learning_rate=1.0, warmup=0.2)
    # two warm-up steps: 1/3, 2/3; then (10 - step) / 8
    expected = [1 / 3, 2 / 3, 1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8]
    assert [settings.learning_rate_at(step) for step in range(10)] == pytest.approx(expected)
    assert settings.learning_rate_at(10) == 0.0


def test_learning_rate_without_warmup_begins_at_its_highest():
    settings = Settings(steps=4, learning_rate=2.0, warmup=0.0)
    assert [settings.learning_rate_at(step) for step in range(4)] == [2.0, 1.5, 1.0, 0.5]


def test_learning_rate_may_warm_up_to_the_end():
    settings = Settings(steps=3, learning_rate=4.0, warmup=1.0)
    assert [settings.learning_rate_at(step) for step in range(3)] == [1.0, 2.0, 3.0]


def test_warm_up_in_steps_and_four_ways_to_fall():
    settings = Settings(steps=6, learning_rate=3.0, warmup_steps=2)
    found = {
        decay: [replace(settings, decay=decay).learning_rate_at(step) for step in range(6)] for decay in Decay
    }
    assert found[Decay.LINEAR] == pytest.approx([1, 2, 3, 2.25, 1.5, 0.75])
    assert found[Decay.CONSTANT] == pytest.approx([1, 2, 3, 3, 3, 3])
    falling = [1.5 * (1 + math.cos(math.pi * quarter / 4)) for quarter in range(4)]
    assert found[Decay.COSINE] == pytest.approx([1, 2, *falling])
    # three steps are done at the top, and 4, 5, 6 after it
    roots = [3 * math.sqrt(3 / done) for done in (3, 4, 5, 6)]
    assert found[Decay.INVERSE_SQRT] == pytest.approx([1, 2, *roots])
    for decay in Decay:
        assert replace(settings, warmup_steps=0, decay=decay).learning_rate_at(0) == pytest.approx(3.0)


def test_total_steps_is_the_length_of_the_schedule_of_a_shorter_run():
    whole = Settings(steps=20)
    part = replace(whole, steps=5, total_steps=20)
    assert [part.learning_rate_at(s) for s in range(5)] == [whole.learning_rate_at(s) for s in range(5)]


def test_settings_are_read_back_as_they_were_written(tmp_path):
    path = tmp_path / "config.json"
    settings = Settings(
        steps=7,
        total_steps=9,
        clock=Clock.CPU,
        data=("a.txt", "b.txt"),
        resume_from="runs/x/checkpoints/step-000003",
        save=True,
        every=2,
        warmup_steps=3,
        decay=Decay.COSINE,
        eval_data=("c.txt",),
        eval_every=4,
        patience=2,
    )
    for entry in (settings, Settings(steps=1)):
        path.write_text(settings_text(entry))
        assert read_settings(path) == entry


def test_a_misspelt_key_of_the_file_is_named(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(settings_text(Settings(steps=1)).replace('"steps"', '"stepps"'))
    with pytest.raises(InputError, match=r'config\.json: unknown key "stepps"; did you mean "steps"\?'):
        read_settings(path)


def test_the_file_of_a_run_from_before_is_read_without_what_plan_and_profile_hold(tmp_path):
    path = tmp_path / "config.json"
    own = settings_text(Settings(steps=7, seed=3, clock=Clock.CPU)).replace("config/2", "config/1")
    decided = '"model": "gpt2-tiny",\n "global_batch_size": 8,\n "sequence_length": 64,\n "dtype": "float64",'
    path.write_text(own.replace('"steps"', f'{decided}\n "steps"'))
    found = read_settings(path)
    assert found == Settings(steps=7, seed=3, clock=Clock.CPU)
    assert not found.stated


def test_a_file_of_no_format_that_is_known_is_refused(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(settings_text(Settings(steps=1)).replace("config/2", "config/9"))
    with pytest.raises(InputError, match=r"format is 'hetpipe.config/9', this version reads"):
        read_settings(path)
