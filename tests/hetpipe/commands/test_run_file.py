"""Run files: what they give, what an option on the command line changes, and what is refused."""

import dataclasses
import inspect
import json
import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest
from typer.main import get_command

from cost_model.profile import ModelProfile, profile_text
from hetpipe.cli import app
from hetpipe.commands.job_file import job_text, leaving_job
from hetpipe.commands.run import run_command
from hetpipe.runs.lora import LoraSettings, parse_lora
from hetpipe.runs.metric_sinks import SinkKind
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.settings import Settings, checked_settings, read_settings
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


def command_of_run() -> tuple[Any, Any]:
    """Return the verb as typer has it, and the context that it is called in."""
    verbs: Any = get_command(app)
    whole = verbs.make_context("hetpipe", [], resilient_parsing=True)
    return verbs.get_command(whole, "run"), whole


def parameters_of_run() -> dict[str, Any]:
    """Return the parameters of `hetpipe run` by the names of their options, as run files have them."""
    named = (
        (next((option for option in parameter.opts if option.startswith("--")), ""), parameter)
        for parameter in command_of_run()[0].params
    )
    found = {option.removeprefix("--").replace("-", "_"): parameter for option, parameter in named}
    return {name: parameter for name, parameter in found.items() if name not in ("", "help", "run_file")}


def other_value(parameter: Any) -> Any:
    """Return a value of a parameter that is not its default, as a run file has it, by its annotation."""
    hint = get_args(inspect.signature(run_command).parameters[parameter.name].annotation)[0]
    (hint,) = [each for each in get_args(hint) or (hint,) if each is not type(None)]
    (kind,) = get_args(hint) or (hint,)
    if kind is bool:
        return not parameter.default
    value: Any = {int: 7, float: 0.25, Path: "cluster.toml", str: "7"}.get(kind)
    if value is None:  # one of several words
        value = next(str(each) for each in kind if each != parameter.default)
    return [value] if parameter.multiple else value


def test_every_option_of_run_may_stand_in_a_run_file(hetpipe: Shell):
    """By what typer knows of the verb, so that an option which is added later is tried, too."""
    command, whole = command_of_run()
    given = parameters_of_run()
    lines, words = ['model = "x"\n'], ["--lora", "r=4,targets=q_proj", "--load-in", "7"]
    for name, parameter in given.items():
        if name in ("lora", "adapter", "load_in"):  # which are the [lora] table
            continue
        value = other_value(parameter)
        lines += [] if name == "model" else [f"{name} = {json.dumps(value)}\n"]
        flags = parameter.secondary_opts if value is False else parameter.opts
        words.append(next(flag for flag in flags if flag.startswith("--")))
        words += [] if isinstance(value, bool) else map(str, value if isinstance(value, list) else [value])
    words[words.index("--model") + 1] = "x"
    table = '[lora]\nr = 4\ntargets = "q_proj"\nload_in = "7"\n'
    hetpipe.write("job.toml", "".join([*lines, table]))
    of_file, of_words = (
        command.make_context("run", arguments, parent=whole).params for arguments in (["job.toml"], words)
    )
    assert of_file.pop("job").name == "job.toml" and of_words.pop("job") is None
    lora = of_file.pop("lora"), of_words.pop("lora")
    assert lora[0] == parse_lora(lora[1]).text
    assert of_file == of_words
    defaults = {parameter.name: parameter.default for parameter in given.values()}
    as_before = {name for name in defaults.keys() & of_file.keys() if of_file[name] == defaults[name]}
    assert as_before == {"adapter"} and len(of_file) > 60


NOT_IN_JOB = {
    "profile.json": "dtype sequence_length loss_chunks compile profile_budget remeasure",
    "plan.json": "strategy global_batch_size tokens_per_step microbatch_size gradient_dtype pin exclude "
    "pipelines max_devices thorough shared_network no_proof proof_seconds",
    "its [lora] table": "lora adapter load_in",
    "nowhere: it begins anew, under this plan": "resume override adapt dry_run run_folder",
    "nowhere: it is of one host": "rendezvous node token_file trust_network hosts ssh_config print_launch "
    "wait",
    "nowhere: it is of what is shown": "quiet verbose json",
}
"""Where a run leaves the options that are not in its job.toml."""


def job_of(place: Path, settings: Settings, profile: ModelProfile, **others: Any) -> dict[str, Any]:
    return tomllib.loads(job_text(RunFolder(place), settings, profile, 1, **others))


def test_a_run_leaves_every_option(hetpipe: Shell):
    """What is asked for on the command line is asked for again by the job that is left."""
    place = hetpipe.folder / "left"
    place.mkdir()
    profile = made_up_profile("gpt2-tiny")
    for folder in (hetpipe.folder, place):
        (folder / "cluster.toml").write_text(CPU_CLUSTER)
        (folder / "profile.json").write_text(profile_text(profile))
        (folder / "plan.json").write_text(plan_text(chain_plan("gpt2-tiny", [0, 3, 6], 16)))
    hetpipe.write("text.txt", "a text\n" * 400)
    found: list[Settings] = []
    for options in (
        "--optimizer adam --betas 0.7,0.8 --epsilon 1e-7 --every '3 s' --pack --warmup-steps 2",
        "--optimizer rmsprop --momentum 0.5 --rho 0.8 --every 3 --schedule gpipe --clock cpu --decay cosine",
    ):
        files = "--cluster cluster.toml --profile profile.json --plan plan.json --data text.txt"
        more = "--eval-data text.txt --eval-every 2 --patience 3 --steps 4 --total-steps 9 --seed 5 --no-save"
        rest = "--learning-rate 0.01 --weight-decay 0.2 --clip-norm 0.3 --keep 2 --timeout 2min --dry-run"
        asked = hetpipe(f"run --model gpt2-tiny {files} {options} {more} {rest} --json")
        assert asked.code == 0, asked.err
        values = {key: value for key, value in asked.json["settings"].items() if key != "format"}
        found.append(checked_settings(**values))
        hetpipe.write("job.toml", job_text(RunFolder(place), found[-1], profile, 1))
        assert hetpipe("run job.toml --dry-run --json").json == asked.json
    usual = Settings(steps=1)
    asked_for = {
        entry.name
        for entry in dataclasses.fields(Settings)
        if entry.init and any(getattr(each, entry.name) != getattr(usual, entry.name) for each in found)
    }
    rest = {"best": "f1", "group_by_length": True, "doc_stride": 3, "eval_data": ("x",), "model_folder": "x"}
    settings = Settings(steps=1, **rest)
    of_adapters = {"lora", "adapter", "load_in"}
    every = {entry.name for entry in dataclasses.fields(Settings) if entry.init}
    assert every == asked_for | rest.keys() | of_adapters | {"warmup", "resume_from", "run_id"}, (
        "give it in this test"
    )
    kinds = {"P100-PCIE": profile.kinds["cpu"]}
    slow = dataclasses.replace(profile, dtype="bfloat16-autocast", kinds=kinds)
    left = {*job_of(place, settings, slow, log=(SinkKind.TENSORBOARD,))}
    for each in found:
        left |= job_of(place, each, profile).keys()
    elsewhere = [name for names in NOT_IN_JOB.values() for name in names.split()]
    assert sorted([*left, *elsewhere]) == sorted(parameters_of_run())


def test_a_run_leaves_all_that_its_adapters_are(tmp_path):
    for rslora in (False, True):
        lora = LoraSettings(4, 8.0, ("q_proj",), 0.25, rslora)
        profile = dataclasses.replace(made_up_profile("gpt2-tiny"), model=f"gpt2-tiny{lora.suffix}")
        table = job_of(tmp_path, Settings(steps=1, lora=lora), profile)["lora"]
        assert LoraSettings(**{**table, "targets": tuple(table["targets"])}) == lora


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
    hetpipe.write("stable.toml", f"{RUN}rslora = true\n")
    stable = name("--model llama-tiny --lora r=4,rslora=true,targets=q_proj,v_proj")
    assert name("--run-file stable.toml") == stable != given
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


def test_a_run_on_several_hosts_leaves_no_file_and_takes_that_of_a_run_alone_away(tmp_path):
    folder = RunFolder(tmp_path)
    for text in ("steps = 1", None, None):
        was_there = folder.job.exists()
        told = leaving_job(lambda event: None, folder, text)
        told({"event": "progress"})
        assert folder.job.exists() == was_there  # nothing has begun
        told({"event": "step"})
        assert folder.job.exists() == (text is not None)
