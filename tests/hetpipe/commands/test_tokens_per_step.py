"""The batch of a run in tokens: samples times their length, or one line that says why not."""

import pytest

from cost_model.profile import profile_text
from other_folders import save_other
from partition.plan_file import plan_text
from runs import CPU_CLUSTER, chain_plan, made_up_profile
from shell import Shell

LINE = "run --model gpt2-tiny --cluster cluster.toml --profile profile.json --no-proof --dry-run --json"


@pytest.fixture
def hetpipe(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shell = Shell(tmp_path, capsys)
    shell.write("cluster.toml", CPU_CLUSTER)
    shell.write("profile.json", profile_text(made_up_profile("gpt2-tiny")))
    shell.write("plan.json", plan_text(chain_plan("gpt2-tiny", [0, 6], 4)))
    return shell


def test_a_step_has_as_many_samples_as_tokens_make(hetpipe: Shell):
    result = hetpipe(f"{LINE} --tokens-per-step 512")
    assert result.code == 0, result.err
    assert result.json["plan"]["global_batch_size"] == 512 // 64
    assert hetpipe(f"{LINE} --plan plan.json --tokens-per-step 1024").code == 0  # 16 samples


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("--tokens-per-step 500", "500 is no multiple of the 64 tokens of a sample; give 448 or 512"),
        ("--tokens-per-step 5", "5 is no multiple of the 64 tokens of a sample; give 64 or 128"),
        ("--tokens-per-step 64 --global-batch-size 8 --sequence-length 64", "say the same; give one of them"),
        ("--tokens-per-step 64 --global-batch-size 8", "say the same; give one of them"),
        ("--tokens-per-step 512 --plan plan.json", "512 is 8 samples, the plan's are 16; leave it out"),
        ("--pack --optimizer sgd --betas 0.9,0.95", "--betas is of adamw and adam, and --optimizer is sgd"),
        ("--optimizer sdg", "is not one of"),
    ],
)
def test_what_makes_no_batch_is_refused_in_one_line(hetpipe: Shell, options: str, reason: str):
    result = hetpipe(f"{LINE} {options}")
    assert result.code == 2 and reason in result.err, result.err
    assert result.out == ""


def test_a_model_of_images_has_no_tokens_and_nothing_is_measured_before_it_is_said(tmp_path, hetpipe: Shell):
    """A sample of it would have counted as the 64 tokens that a text has where nothing says how many."""
    save_other(tmp_path / "vit", "ViTForImageClassification")
    result = hetpipe("run --model ./vit --cluster cluster.toml --dry-run --tokens-per-step 512")
    assert result.code == 2 and result.out == "", result.err
    assert "--tokens-per-step is of texts, and images are read; give --global-batch-size" in result.err
