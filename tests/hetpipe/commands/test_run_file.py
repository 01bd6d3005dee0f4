"""Run files: what they give, what an option on the command line changes, and what is refused."""

from pathlib import Path

import pytest

from cost_model.profile import profile_text
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.settings import read_settings
from partition.plan_file import plan_text
from runs import CPU_CLUSTER, chain_plan, made_up_profile
from shell import Shell

RUN = """
model = "llama-tiny"
cluster = "cluster.toml"
profile = "profile.json"
steps = 7
no_proof = true

[lora]
r = 4
targets = ["q_proj", "v_proj"]
"""


def refused(hetpipe: Shell, text: str, verb: str = "check") -> str:
    hetpipe.write("run.toml", text)
    result = hetpipe(f"{verb} --run-file run.toml")
    assert (result.code, result.err.count("\n")) == (2, 1), result
    return result.err


def test_a_run_file_gives_options_and_the_command_line_wins(hetpipe: Shell):
    plain = hetpipe(
        "plan --profile profile.json --cluster cluster.toml --no-proof --global-batch-size 8 --json"
    )
    hetpipe.write("run.toml", 'profile = "profile.json"\ncluster = "cluster.toml"\nglobal_batch_size = 8\n')
    assert hetpipe("plan --run-file run.toml --no-proof --json").json == plain.json
    other = hetpipe("plan --run-file run.toml --no-proof --json --global-batch-size 4").json
    assert other["global_batch_size"] == 4


def test_run_takes_a_file_without_an_option_and_only_one(hetpipe: Shell):
    hetpipe.write("job.toml", 'modle = "bert-tiny"\n')
    result = hetpipe("run job.toml")
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert "job.toml: unknown key 'modle'; did you mean \"model\"?" in result.err
    hetpipe.write("job.toml", 'model = "bert-tiny"\n')
    result = hetpipe("run job.toml --run-file job.toml")
    assert (result.code, "is a second run file; give one" in result.err) == (2, True), result


@pytest.mark.slow
def test_a_run_leaves_a_file_that_repeats_it(hetpipe: Shell):
    hetpipe.write("cluster.toml", CPU_CLUSTER)
    hetpipe.write("profile.json", profile_text(made_up_profile("bert-tiny")))
    hetpipe.write("plan.json", plan_text(chain_plan("bert-tiny", [0, 4, 8], 16)))
    hetpipe.write("text.txt", "a text\n" * 400)
    options = "--learning-rate 0.01 --decay cosine --warmup-steps 1 --betas 0.7,0.8 --seed 3 --timeout 2min"
    files = (
        "--cluster cluster.toml --profile profile.json --plan plan.json --data text.txt --eval-data text.txt"
    )
    first = hetpipe(
        f"run --model bert-tiny {files} {options} --steps 2 --total-steps 4 --no-save --every 1 -q"
    )
    assert first.code == 0, first.err
    again = hetpipe("run runs/bert-tiny-001/job.toml -q")
    assert again.code == 0, again.err
    folders = [RunFolder(Path(f"runs/bert-tiny-00{number}")) for number in (1, 2)]
    assert read_settings(folders[1].config) == read_settings(folders[0].config)
    rows = [folder.read_metrics() for folder in folders]
    for key in ("loss", "learning_rate", "eval_loss"):
        assert [row.get(key) for row in rows[1]] == [row.get(key) for row in rows[0]]
    hetpipe.write("wrong.toml", folders[0].job.read_text().replace("eval_data", "eval_dta"))
    assert 'did you mean "eval_data"' in hetpipe("run wrong.toml").err


@pytest.mark.slow
def test_the_lora_table_says_what_the_option_says(hetpipe: Shell):
    """A profile of another model is refused with the name of this one, which has a hash of its adapters."""

    def name(options: str) -> str:
        found = hetpipe(f"plan --profile profile.json --cluster cluster.toml {options}")
        assert (found.code, "of 'made-up', not of --model 'llama-tiny+lora@" in found.err) == (2, True), found
        return found.err

    hetpipe.write("run.toml", RUN)
    given = name("--model llama-tiny --lora r=4,targets=q_proj,v_proj")
    assert name("--run-file run.toml") == given
    assert name("--run-file run.toml --lora r=2,targets=o_proj") != given
    hetpipe.write("run.toml", 'model = "llama-tiny"\n[lora]\nr = 4\ntargets = "all-linear"\n')
    quantized = hetpipe.folder / "run.toml"
    plain = quantized.read_text()
    quantized.write_text(plain + 'load_in = "4bit"\n')
    found = hetpipe("plan --profile profile.json --cluster cluster.toml --run-file run.toml")
    assert (found.code, "not of --model 'llama-tiny+4bit+lora@" in found.err) == (2, True), found
    quantized.write_text(plain)
    every = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"
    assert name("--run-file run.toml") == name(f"--model llama-tiny --lora r=4,targets={every}")


def test_what_a_run_file_may_not_say_is_refused_in_a_line(hetpipe: Shell):
    tiny = 'model = "llama-tiny"\n'
    for text, message in (
        ("modle = 'gpt2'", "unknown key 'modle'; did you mean \"model\"?"),
        ("model = ", "not TOML"),
        (f"{tiny}[model]\nname = 'x'", "not TOML"),
        (f"{tiny}[run]\nsteps = 3", "unknown key 'run'"),
        ("[model]\nname = 'x'", "model is a table; [lora] is the only one"),
        (f"{tiny}[lora]\nrank = 4", '[lora]: unknown key "rank"'),
        (f"{tiny}[lora]\nr = 'four'", "[lora]: r: input should be a valid integer"),
        (f"{tiny}[lora]\nr = 0\ntargets = ['q_proj']", "[lora]: LoRA rank r is 0; give at least 1"),
        (f"{tiny}[lora]\nr = 4", "[lora]: LoRA targets are missing"),
        (f"{tiny}[lora]\nr = 4\ntargets = []", "[lora]: LoRA targets are missing"),
        (f"{tiny}[lora]\nr = 4\nalpha = 'abc'\ntargets = ['q_proj']", "[lora]: alpha: input should be"),
        (f"{tiny}[lora]\nr = 4\nload_in = '3bit'\ntargets = ['q_proj']", "give 4bit or 8bit"),
        (f"{tiny}[lora]\nload_in = '4bit'", 'key "r" is missing'),
        (f"{tiny}[lora]\ntargets = ['q_proj']", 'key "r" is missing'),
        (f"{tiny}[lora]\nr = 4\nadapter = 'x'", "leave those out"),
        (f"{tiny}[lora]\nadapter = 'nowhere'", "nowhere: no such folder"),
        (f"{tiny}[lora]\nr = 4\ntargets = ['q_prj']", 'did you mean "q_proj"?'),
        (f"{tiny}full = 'perhaps'", "'--full': Input should be a valid boolean"),
        ("model = ['llama-tiny']", "model is ['llama-tiny']; give one value"),
    ):
        assert message in refused(hetpipe, text), text
    both = "[lora]\nr = 4\ntargets = ['q_proj']"
    hetpipe.write("run.toml", tiny + both)
    found = hetpipe("check --run-file run.toml --adapter x")
    assert (found.code, found.err.count("\n")) == (2, 1) and "give one of them" in found.err
    assert "no such file" in hetpipe("check --run-file nowhere.toml").err
    assert "steps" in refused(hetpipe, f'{tiny}cluster = "cluster.toml"\nsteps = 1.5', "run")
    assert "a.txt does not exist" in refused(
        hetpipe, f'{tiny}cluster = "cluster.toml"\ndata = "a.txt"', "run"
    )
