"""Gradients in bf16 by an option: in the plan, its words, the report and the checkpoints; else refused."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from cost_model.profile import profile_text
from hetpipe.training.checkpoint import read_manifest
from partition.plan_file import plan_text, read_plan
from runs import CPU_CLUSTER, chain_plan, made_up_profile
from shell import Result, Shell

MODEL = "bert-tiny"
SENTENCE = "gradients: summed between devices in bf16, half the bytes, rounded"
Verb = Callable[[str], Result]


@pytest.fixture
def verb(hetpipe: Shell) -> Verb:
    """A verb for bert-tiny on two CPU devices, with a profile that nobody measured."""
    hetpipe.write("cluster.toml", CPU_CLUSTER)
    hetpipe.write("profile.json", profile_text(made_up_profile(MODEL)))
    hetpipe.write("plan.json", plan_text(chain_plan(MODEL, [0, 4, 8], 16)))
    return lambda words: hetpipe(f"{words} --cluster cluster.toml --profile profile.json")


def test_what_is_no_dtype_of_gradients_is_refused_in_one_line(verb):
    refused = verb("plan --gradient-dtype fp16")
    assert (refused.code, refused.err) == (
        2,
        "error: gradient_dtype 'fp16' is unknown; float32 and bf16 are known\n",
    )


def test_a_plan_of_another_dtype_is_refused(verb):
    refused = verb("run --model bert-tiny --plan plan.json --gradient-dtype bf16")
    assert refused.code == 2 and refused.err == (
        "error: --gradient-dtype is bf16, the plan's is float32; leave it out, or plan again\n"
    )


def test_gradients_of_a_model_in_float64_are_not_rounded(hetpipe, verb):
    text = profile_text(made_up_profile(MODEL)).replace('"dtype": "float32"', '"dtype": "float64"')
    hetpipe.write("profile.json", text)
    refused = verb("plan --gradient-dtype bf16")
    assert refused.code == 2
    assert "gradients of a model in float64 would be rounded to bf16; leave out" in refused.err


def test_a_plan_says_in_what_its_gradients_travel(verb):
    made = verb("plan --strategy ddp --no-proof --gradient-dtype bf16 -o rounded.json")
    assert made.code == 0, made.err
    assert SENTENCE in made.out.splitlines()
    assert read_plan(Path("rounded.json")).gradient_dtype == "bf16"
    assert SENTENCE in verb("explain rounded.json").out.splitlines()
    plain = verb("plan --strategy ddp --no-proof -o plain.json")
    assert SENTENCE not in plain.out
    assert "gradient_dtype" not in json.loads(Path("plain.json").read_text())


@pytest.mark.slow
def test_a_run_keeps_what_its_gradients_travel_in_and_who_goes_on_inherits_it(verb):
    run = "run --model bert-tiny --strategy ddp --no-proof --total-steps 9 -q"
    first = verb(f"{run} --steps 1 --gradient-dtype bf16")
    assert first.code == 0, first.err
    assert SENTENCE in first.out.splitlines()  # of the report
    folder = Path("runs/bert-tiny-001")
    assert json.loads((folder / "report.json").read_text())["gradient_dtype"] == "bf16"
    assert read_manifest(folder / "checkpoints" / "step-000001").settings["gradient_dtype"] == "bf16"
    second = verb(f"{run} --steps 2 --resume auto")
    assert read_plan(folder / "plan.json").gradient_dtype == "bf16"
    assert "before the checkpoint" not in second.err
    third = verb(f"{run} --steps 3 --resume auto --gradient-dtype float32 --override gradient-dtype")
    assert read_plan(folder / "plan.json").gradient_dtype == "float32"
    assert "note: gradient_dtype is float32, before the checkpoint it was bf16\n" in third.err
