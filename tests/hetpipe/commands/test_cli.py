import errno
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cost_model.cluster_file import read_cluster
from cost_model.errors import DivergedError, InputError
from cost_model.profile import profile_text, read_profile
from hetpipe import cli
from hetpipe.commands import env, init
from hetpipe.models import split_check
from hetpipe.runtime.gpus import gpu_kind
from hetpipe.runtime.processes import WorkerLostError
from shell import Shell
from small_case import CLUSTER_TOML as CLUSTER
from small_case import small_profile


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("plan --cluster cluster.toml", "neither --model nor --profile is given"),
        ("plan --cluster cluster.toml --model bert-tniy", "did you mean 'bert-tiny'?"),
        (
            "plan --cluster cluster.toml --model bert-tiny --profile profile.json",
            "a profile of 'made-up', not of",
        ),
        ("plan --cluster no.toml --profile profile.json", "no.toml: no such file"),
        ("plan --cluster profile.json --profile profile.json", "not TOML"),
        ("plan --cluster cluster.toml --profile cluster.toml", "cluster.toml: not JSON"),
        ("plan --cluster cluster.toml --profile profile.json --strategy ato", 'did you mean "auto"?'),
        (
            "plan --cluster cluster.toml --profile profile.json --global-batch-size 0",
            "global_batch_size is 0",
        ),
        ("plan --cluster cluster.toml --profile profile.json --microbatch-size 0", "microbatch sizes [0]"),
        (
            "plan --cluster cluster.toml --profile profile.json -o no/plan.json",
            "no/plan.json: cannot be written",
        ),
        (
            "plan --cluster cluster.toml --profile profile.json --global-batch-size x",
            "Invalid value for '--global-batch-size'",
        ),
        ("plan --cluster other.toml --profile profile.json", "no kind 'fats'; did you mean \"fast\"?"),
        ("plan --profile profile.json", "Missing option '--cluster'"),
        ("plan --clutser cluster.toml", "No such option"),
        ("paln", "No such command 'paln'"),
        *[
            (f"{verb} --cluster cluster.toml --profile profile.json {options}", message)
            for verb in ("plan", "compare", "run --model made-up")
            for options, message in (("--exclude c/0", "no such device or node"),)
        ],
        *[
            (f"plan --cluster cluster.toml --profile profile.json {options}", message)
            for options, message in (
                ("--pin a/0", "names no device and layers"),
                ("--pin c/0=0", "unknown device 'c/0'"),
                ("--pin a/0=0-4", "has layers 0 to 3"),
                ("--pin a/0=1", "layers 0 and 2-3 to 1 free device"),
                ("--exclude a --exclude b/0", "leaves none of the 2 devices"),
                ("--pipelines 3", "3 pipelines need 3 devices"),
                ("--pipelines 2 --max-devices 1", "more than max_devices = 1"),
                ("--max-devices 1 --strategy single", "is for --strategy auto"),
                ("--exclude a --pin a/0=0", "unknown device 'a/0'"),
            )
        ],
        (
            "run --model made-up --cluster cluster.toml --plan plan.json --pipelines 1",
            "--plan decides everything",
        ),
        ("explain no.json --profile profile.json --cluster cluster.toml", "no.json: no such file"),
        ("explain plan.json --cluster cluster.toml", "neither --model nor --profile"),
        ("explain plan.json --profile profile.json --cluster other.toml", "no kind 'fats'"),
        ("simulate no.json --profile profile.json --cluster cluster.toml", "no.json: no such file"),
        ("plot plan.json --cluster cluster.toml", "--profile or --model is needed too"),
        ("plot .", "no run folder"),  # though a plan lies in it
        ("check --model gtp2-tiny", "did you mean 'gpt2-tiny'?"),
        ("run --model made-up --cluster cluster.toml", "unknown model 'made-up'"),
        ("run --model bert-tiny --cluster cluster.toml --clock sundial", "'sundial'"),
        ("run --model bert-tiny --cluster cluster.toml --strategy ato", 'did you mean "auto"?'),
        ("init", "cluster.toml: exists already"),
        ("init -o new.toml --emulate fast", "--emulate 'fast' is no list of speeds"),
        ("init -o new.toml --emulate 0.5,0", "speeds must be above zero"),
        ("export no-run -o out", "no-run: no such folder"),
        ("export . -o .", "is not an empty folder"),
        ("demo -o .", "exists already"),
    ],
)
def test_bad_input_is_one_plain_line_and_exit_code_2(hetpipe: Shell, line: str, message: str):
    result = hetpipe(line)
    assert result.code == 2
    assert result.out == ""
    assert result.err.startswith("error: ") and result.err.count("\n") == 1
    assert message in result.err


def test_what_does_not_fit_is_exit_code_3_with_the_missing_bytes(hetpipe: Shell):
    hetpipe.write("cluster.toml", CLUSTER.replace("10 kB", "1 kB"))
    files = "--profile profile.json --cluster cluster.toml"
    for line in (f"plan {files}", f"plan {files} --json", f"simulate plan.json {files}", f"compare {files}"):
        result = hetpipe(line)
        assert result.code == 3, line
        assert result.out == ""
        assert result.err.startswith("error: ") and result.err.count("\n") == 1
        assert "bytes" in result.err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InputError("bad"), 2),
        (WorkerLostError("rank 1 (b/0) was killed"), 5),
        (KeyboardInterrupt(), 130),
        (DivergedError("training diverged"), 4),
        (OSError(errno.ENOSPC, "No space left on device"), 2),
    ],
)
def test_failures_have_exit_codes(
    hetpipe: Shell, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int
):
    def fail() -> None:
        raise error

    monkeypatch.setattr(env, "environment", fail)
    result = hetpipe("env")
    assert result.code == code
    assert result.err.startswith("error: ") or code == 130


def test_a_bug_keeps_its_traceback(hetpipe: Shell, monkeypatch: pytest.MonkeyPatch):
    def fail() -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(env, "environment", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        hetpipe("env")


def test_init_writes_a_cluster_of_emulated_devices(hetpipe: Shell, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(init.os, "cpu_count", lambda: 2)
    result = hetpipe("init -o new.toml --emulate 0.6,0.4,0.2 --json")
    cluster = read_cluster(hetpipe.folder / "new.toml")
    assert [device.speed for device in cluster] == [0.6, 0.4, 0.2]
    assert {device.kind for device in cluster} == {"emulated"}
    assert sum(device.memory_bytes for device in cluster) <= init.host_memory_bytes()
    assert result.json["cluster"]["name"] == "emulated"
    assert result.err == ""


def test_init_warns_of_more_speed_than_the_host_has(hetpipe: Shell, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(init.os, "cpu_count", lambda: 2)
    result = hetpipe("init -o new.toml --emulate 1,0.6")
    assert result.code == 0
    assert result.err.startswith("warning: speeds add up to 1.6, more than 0.75 x 2 cores")


def test_init_without_a_gpu_writes_one_cpu_and_with_force_overwrites(
    hetpipe: Shell, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(init, "gpus_here", list)
    result = hetpipe("init --force")
    assert result.code == 0
    assert "hetpipe init --emulate 0.6,0.4,0.2 -o emulated.toml" in result.out  # what one device lacks
    (device,) = read_cluster(hetpipe.folder / "cluster.toml")
    assert device.kind == "cpu"


def test_init_lists_gpus_by_name_and_free_memory(hetpipe: Shell, monkeypatch: pytest.MonkeyPatch):
    kinds, free = ["NVIDIA A100-PCIE-40GB", "NVIDIA Tesla T4"], [30.6 * 2**30, 15e9]
    monkeypatch.setattr(init, "gpus_here", lambda: list(map(gpu_kind, kinds)))
    monkeypatch.setattr(init, "free_memory_here", lambda: free)
    assert hetpipe("init -o new.toml").code == 0
    cluster = read_cluster(hetpipe.folder / "new.toml")
    assert [device.kind for device in cluster] == ["NVIDIA-A100-PCIE-40GB", "NVIDIA-Tesla-T4"]
    for device, num_bytes in zip(cluster, free, strict=True):
        assert num_bytes - 0.01 * 2**30 <= device.memory_bytes <= num_bytes


@pytest.mark.slow
def test_env_names_versions_and_no_folders(hetpipe: Shell):
    facts = hetpipe("env --json").json
    assert {"hetpipe", "torch", "python", "cores", "memory", "gpus"} <= facts.keys()
    assert str(Path.home()) not in json.dumps(facts)
    assert "torch: " in hetpipe("env").out
    assert hetpipe("--version").out == f"hetpipe {facts['hetpipe']}\n"


def test_run_refuses_what_does_not_match_before_it_starts(hetpipe: Shell):
    text = profile_text(small_profile()).replace('"made-up"', '"bert-tiny"')
    hetpipe.write("profile.json", text)
    files = "run --model bert-tiny --cluster cluster.toml --profile profile.json"
    result = hetpipe(f"{files} --plan plan.json")
    assert result.code == 2 and "the plan is for 'made-up', the profile for 'bert-tiny'" in result.err
    assert "profile again" in hetpipe(f"{files} --sequence-length 9").err
    assert "plan again" in hetpipe(f"{files} --plan plan.json --global-batch-size 9").err
    assert "nothing to resume" in hetpipe(f"{files} --resume auto --steps 1").err


@pytest.mark.slow
def test_a_dry_run_plans_and_trains_nothing(hetpipe: Shell):
    hetpipe.write("profile.json", profile_text(small_profile()).replace('"made-up"', '"bert-tiny"'))
    line = "run --model bert-tiny --cluster cluster.toml --profile profile.json --dry-run --seed 3"
    result = hetpipe(f"{line} --json")
    assert result.json["settings"]["seed"] == 3
    assert result.json["plan"]["model"] == "bert-tiny"
    shown = hetpipe(line)
    assert "auto: bert-tiny" in shown.out
    assert "note: attention_probs_dropout_prob of bert-tiny is 0.1" in shown.err
    assert len(hetpipe(f"{line} --json --pipelines 2 --no-proof").json["plan"]["pipelines"]) == 2
    excluded = hetpipe(f"{line} --json --exclude a").json["plan"]
    assert list(excluded["predicted"]["devices"]) == ["b/0"]
    assert excluded["cluster_sha256"] == result.json["plan"]["cluster_sha256"]
    assert not (hetpipe.folder / "runs").exists()


def test_help_names_every_verb(hetpipe: Shell):
    result = hetpipe("--help")
    assert result.code == 0
    for verb in cli.VERBS:
        assert re.search(rf"\b{verb}\b", result.out)
        assert hetpipe(f"{verb} --help").code == 0


def test_without_arguments_help_is_printed(hetpipe: Shell):
    result = hetpipe("")
    assert result.code == 2
    assert "Usage" in result.out + result.err


@pytest.mark.slow
def test_the_module_runs_as_a_program_without_torch(hetpipe: Shell):
    code = (
        "import sys; from hetpipe.cli import main; "
        "code = main('simulate plan.json --profile profile.json --cluster cluster.toml --json'.split()); "
        "code = code or main('plan --profile profile.json --cluster cluster.toml -o new.json'.split()); "
        "sys.exit(9 if 'torch' in sys.modules else code)"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=hetpipe.folder).returncode == 0
    )
    command = [sys.executable, "-m", "hetpipe", "plan", "--cluster", "no.toml", "--profile", "x"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=hetpipe.folder)
    assert (run.returncode, run.stdout, run.stderr) == (2, "", "error: no.toml: no such file\n")


@pytest.mark.slow
def test_check_proves_that_split_equals_whole(hetpipe: Shell):
    result = hetpipe("check --model gpt2-tiny --json")
    assert result.code == 0
    assert result.json["passed"] is True
    assert "split equals whole" in hetpipe("check --model gpt2-tiny").out


def test_a_failed_check_is_exit_code_4(hetpipe: Shell, monkeypatch: pytest.MonkeyPatch):
    report = split_check.CheckReport(
        "gpt2-tiny", ((0, 2),), float("nan"), 1.0, "head.bias", False, "head.bias is off"
    )
    monkeypatch.setattr(split_check, "check_split", lambda *_, **__: report)
    result = hetpipe("check --model gpt2-tiny")
    assert (result.code, result.out, result.err) == (4, "", "error: gpt2-tiny: head.bias is off\n")
    assert hetpipe("check --model gpt2-tiny --json").json["loss_difference"] is None


@pytest.mark.slow
def test_profile_run_plot_and_export(hetpipe: Shell):
    assert hetpipe("init -o cluster.toml --force --emulate 0.5,0.3").code == 0
    profiled = hetpipe(
        "profile --model bert-tiny --cluster cluster.toml --sequence-length 16 --profile-budget 2 -o p.json "
        "--show"
    )
    assert profiled.code == 0, profiled.err
    assert "block0" in profiled.out
    assert read_profile(hetpipe.folder / "p.json").model == "bert-tiny"
    run = hetpipe(
        "run --model bert-tiny --cluster cluster.toml --profile p.json --global-batch-size 4 --steps 2 --save"
    )
    assert run.code == 0, run.err
    assert "step 2/2" in run.out and "measured" in run.out
    folder = "runs/bert-tiny-001"
    assert f"run folder: {folder}" in run.out
    plotted = hetpipe(f"plot {folder} --json")
    names = {Path(name).name for name in plotted.json["files"]}
    assert {"predicted-and-measured.png", "loss.svg", "memory.png"} <= names
    exported = hetpipe(f"export {folder} -o exported --json")
    assert exported.code == 0, exported.err
    assert exported.json["step"] == 2
    assert (hetpipe.folder / "exported" / "config.json").exists()
    more = hetpipe(
        "run --model bert-tiny --cluster cluster.toml --profile p.json --global-batch-size 4 --steps 3 "
        "--total-steps 3 --resume auto -q --json"
    )
    assert more.code == 0, more.err
    assert more.json["run_folder"] == folder


STRANGE_TEXT = '{"format": "hetpipe.plan/1", "model": "\\ud800", "global_batch_size": 1, "pipelines": []}'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "strange.json: nested too deeply"),
        ('{"format": ' + "9" * 5000 + "}", "strange.json: holds a number of thousands of digits"),
        (STRANGE_TEXT, "strange.json: invalid JSON"),
    ],
    ids=["deep", "long", "half a letter"],
)
def test_strange_json_is_refused_in_one_line(hetpipe: Shell, text: str, message: str):
    hetpipe.write("strange.json", text)
    result = hetpipe("simulate strange.json --profile profile.json --cluster cluster.toml")
    assert (result.code, result.err.count("\n")) == (2, 1) and message in result.err


@pytest.mark.parametrize(("key", "value"), [("num_samples", 10**9), ("microbatch_size", 10**15)])
def test_a_plan_of_far_too_many_samples_is_refused(hetpipe: Shell, key: str, value: int):
    plan = json.loads((hetpipe.folder / "plan.json").read_text())
    plan["pipelines"][0][key] = value
    hetpipe.write("large.json", json.dumps(plan))
    result = hetpipe("simulate large.json --profile profile.json --cluster cluster.toml")
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert "give at most 1,048,576" in result.err


def test_a_batch_of_far_too_many_samples_is_refused(hetpipe: Shell):
    result = hetpipe(f"plan --profile profile.json --cluster cluster.toml --global-batch-size {10**18}")
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert "global_batch_size is 1,000,000,000,000,000,000; give at most 8,388,608" in result.err


def test_a_place_that_cannot_be_written_to_is_one_line(hetpipe: Shell):
    result = hetpipe("demo -o plan.json/picture")
    assert (result.code, result.err.count("\n")) == (2, 1), result.err
    assert "plan.json" in result.err and "Not a directory" in result.err


def test_a_folder_that_takes_no_file_is_named_before_anything_is_planned(hetpipe: Shell):
    # in /proc not even root can make one; there is no such profile, which would be read next
    result = hetpipe("plan --profile none.json --cluster cluster.toml -o /proc/plan.json")
    assert (result.code, result.err.count("\n")) == (2, 1), result.err
    assert result.err.startswith("error: /proc/plan.json: cannot be written (no file can be made in /proc")


def test_a_file_is_written_where_its_link_leads(hetpipe: Shell):
    (hetpipe.folder / "link.json").symlink_to("plan.json")
    before = (hetpipe.folder / "plan.json").read_text()
    files = "--profile profile.json --cluster cluster.toml --global-batch-size 4"
    assert hetpipe(f"plan {files} -o link.json").code == 0
    assert (hetpipe.folder / "link.json").is_symlink()
    assert (hetpipe.folder / "plan.json").read_text() != before


@pytest.mark.slow
def test_where_nobody_reads_what_is_printed_a_plan_is_written_all_the_same(hetpipe: Shell):
    line = f"{sys.executable} -m hetpipe plan --profile profile.json --cluster cluster.toml -o new.json"
    done = subprocess.run(f"{line} >&- 2>&-", shell=True, cwd=hetpipe.folder, check=False)
    assert done.returncode == 0
    assert (hetpipe.folder / "new.json").is_file()


def test_what_does_not_fit_is_not_explained(hetpipe: Shell):
    hetpipe.write("tight.toml", (hetpipe.folder / "cluster.toml").read_text().replace("10 kB", "10 B"))
    result = hetpipe("explain plan.json --profile profile.json --cluster tight.toml")
    assert result.code == 3 and "need" in result.err
