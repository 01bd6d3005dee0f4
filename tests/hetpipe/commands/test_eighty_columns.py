"""Every table of every verb in a terminal of 80 columns, with devices and kinds of long names."""

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO

import pytest
from rich.console import Console

from cost_model.cluster_file import read_cluster
from cost_model.profile import ModelProfile, profile_text, read_profile
from hetpipe import cli
from hetpipe.reporting import tables
from hetpipe.reporting.memory_tables import memory_table
from hetpipe.reporting.run_tables import measured_table, run_report_tables
from hetpipe.runs.cache import profiles_folder
from hetpipe.runs.run_report import DeviceReport, RunReport, StageReport
from partition.plan import Pipeline, Plan, Stage
from partition.plan_file import plan_text
from planned_once import each_plan_once
from run_folders import made_up_run
from runs import made_up_profile
from shell import Shell
from small_case import small_profile
from terminal import lines_in_terminal

WIDTH = 80
BIG, SMALL = "NVIDIA-A100-PCIE-40GB", "NVIDIA-GeForce-RTX-2080-Ti"
CLUSTER = f"""
reserve = "0 B"
driver_memory = "0 B"
[network]
bandwidth = "320 bit/s"
latency = "0.25 s"
[[nodes]]
name = "lab-server-one"
devices = [{{ kind = "{BIG}", memory = "10 kB", price_per_hour = 12.25, watts = 300 }}]
[[nodes]]
name = "lab-server-two"
devices = [
  {{ kind = "{SMALL}", memory = "3 kB", speed = 0.95, price_per_hour = 1.75, watts = 250 }},
  {{ kind = "{SMALL}", memory = "4 kB", price_per_hour = 1.75, watts = 250 }},
]
"""
FILES = "--profile profile.json --cluster cluster.toml"
QUICK = "--global-batch-size 4 --no-proof"


def long_profile() -> ModelProfile:
    """Return the small profile on kinds of long names, its layers with names of a real model."""
    profile = small_profile()
    fast, slow = (replace(profile.kinds[name], standard_error=None) for name in ("fast", "slow"))
    return replace(profile, model="bert-large-uncased", kinds={BIG: fast, SMALL: slow}, links={})


def two_pipelines() -> Plan:
    shared = Stage(("lab-server-one/0",), (0, 3), 2), Stage(("lab-server-two/0",), (3, 4), 1)
    alone = Stage(("lab-server-two/1",), (0, 4), 1, recompute=True)
    pipelines = Pipeline(1, 12, shared), Pipeline(1, 4, (alone,))
    return Plan("auto", "bert-large-uncased", 16, pipelines)


@pytest.fixture
def lines(hetpipe: Shell, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    """Give what a verb prints, line by line, in a terminal of 80 columns."""
    hetpipe.write("cluster.toml", CLUSTER)
    hetpipe.write("profile.json", profile_text(long_profile()))
    hetpipe.write("plan.json", plan_text(two_pipelines()))
    monkeypatch.setattr(tables, "console", terminal)

    def printed(line: str) -> list[str]:
        result = hetpipe(line)
        assert result.code == 0, result.err
        return [text.rstrip() for text in result.out.splitlines()]

    return printed


def terminal(file: IO[str] | None = None, width: int = WIDTH) -> Console:
    return Console(
        file=file or sys.stdout, width=width, force_terminal=True, color_system=None, highlight=False
    )


def numbers_in(lines: list[str]) -> set[str]:
    return set(re.findall(r"\d[\d,.]*\d|\d", " ".join(lines)))


def too_wide(lines: list[str]) -> list[str]:
    return [line for line in lines if len(line) > WIDTH]


AT_ONCE = (
    (f"plan {FILES} {QUICK}", "does not fit"),
    (f"plan {FILES} {QUICK} --objective money", "an hour"),
    (f"compare {FILES} {QUICK} -v", "are missing"),
    (f"explain plan.json {FILES}", "limited by"),
    (f"simulate plan.json {FILES}", "waiting for"),
    ("profile --profile profile.json --show", "parameters"),
    ("cache", "precision"),
    ("init -o new.toml --emulate 0.3,0.2", "emulated"),
    ("models", "question-answering"),
    ("clusters", "four-unequal"),
    ("env", "torch"),
)
SEARCHED = (
    (f'compare {FILES} {QUICK} --what-if "add 1 {SMALL} to lab-server-one"', "cost/1,000"),
    (f"compare {FILES} {QUICK} --pareto", "Wh/1,000"),
)
OF_A_RUN = (
    ("init --emulate 0.5,0.3 -o emulated.toml", "wrote"),
    ("check --model bert-tiny", "split equals whole"),
    ("run --model bert-tiny --cluster emulated.toml --profile profile.json --steps 2", "measured"),
    ("plot runs/bert-tiny-001", "report.html"),
    ("export runs/bert-tiny-001 -o out", "out"),
)
IN_A_TERMINAL = {"watch", "demo"}
"""The one below, the other where it runs anyway, in tests/end_to_end/test_package.py."""


def test_no_verb_is_left_out():
    shown = {line.split()[0] for line, _ in (*AT_ONCE, *SEARCHED, *OF_A_RUN)}
    assert shown | IN_A_TERMINAL == set(cli.VERBS)


@pytest.fixture(autouse=True, scope="module")
def _each_plan_once() -> Iterator[None]:
    """What is printed at two widths is planned once."""
    with each_plan_once():
        yield


@pytest.mark.parametrize(
    ("line", "shown"), [*AT_ONCE, *(pytest.param(*case, marks=pytest.mark.slow) for case in SEARCHED)]
)
def test_what_a_verb_prints_fits_and_no_cell_is_cut(
    lines, monkeypatch: pytest.MonkeyPatch, line: str, shown: str
):
    if line == "cache":
        profiles_folder().mkdir(parents=True)
        (profiles_folder() / "one.json").write_text(profile_text(long_profile()))
    found = lines(line)
    assert too_wide(found) == []
    assert shown in " ".join(found)
    assert not any("…" in text for text in found)
    monkeypatch.setattr(tables, "console", lambda file=None: terminal(file, 300))
    wide = lines(f"{line} --force" if line.startswith("init") else line)
    assert numbers_in(wide) <= numbers_in(found), "a number is broken at 80 columns"


def test_words_and_figures_of_the_plan_table_stay_whole(lines):
    text = "\n".join(lines(f"simulate plan.json {FILES}"))
    whole = ("lab-server-one/0", "embeddings,", "A100-PCIE-40GB", "RTX-2080-Ti", "x 0.95", "(estimated)")
    for part in (*whole, "9.77", "memory, KiB"):
        assert all(word in text for word in part.split()), part


def test_the_tables_of_a_run_fit(hetpipe: Shell, capsys: pytest.CaptureFixture[str], lines):
    names = two_pipelines().device_names
    report = RunReport(
        model="bert-large-uncased", strategy="memory-proportional, edited", clock="cpu", emulated=True,
        steps=1000, predicted_step_s=31.123, measured_step_s=32.456, step_s_all=(32.0,) * 5,
        predicted_bubble=0.123, measured_bubble=0.456, foreign_cores=1.37,
        stages=tuple(StageReport(1, place, name, 123.4, 125.6) for place, name in enumerate(names)),
        devices={
            name: DeviceReport(123e9, 122e9, 40e9, 80e9, 0.001, reserved_bytes=121e9, driver_bytes=12e9)
            for name in names
        },
        global_batch_size=1024, samples_per_s=1234.5, between_steps=0.123, gradient_dtype="bf16",
        shared_step_s=33.456,
    )  # fmt: skip
    hetpipe("--version")
    tables.show([*run_report_tables(report), measured_table([report, report])])
    found = capsys.readouterr().out.splitlines()
    assert too_wide([line.rstrip() for line in found]) == []
    assert "measured" in " ".join(found)


def test_the_table_of_memory_fits(capsys: pytest.CaptureFixture[str], lines, tmp_path: Path):
    cluster, profile = read_cluster(tmp_path / "cluster.toml"), read_profile(tmp_path / "profile.json")
    tables.show([memory_table(two_pipelines(), profile, cluster)])
    found = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert too_wide(found) == [] and any("frozen" in line for line in found)


@pytest.mark.parametrize("verb", ["", *cli.VERBS])
def test_help_fits(hetpipe: Shell, monkeypatch: pytest.MonkeyPatch, verb: str):
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    monkeypatch.setenv("TERMINAL_WIDTH", str(WIDTH))
    result = hetpipe(f"{verb} --help")
    assert result.code == 0
    assert too_wide([line.rstrip() for line in result.out.splitlines()]) == []


@pytest.mark.parametrize(("given", "width"), [("80", 80), ("120", 120), ("", 160), ("no", 160), ("0", 160)])
def test_a_pipe_is_as_wide_as_columns_says(monkeypatch: pytest.MonkeyPatch, given: str, width: int):
    monkeypatch.setenv("COLUMNS", given)
    assert tables.console().width == width


def test_a_table_in_a_pipe_of_80_columns_fits(hetpipe: Shell, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    hetpipe.write("cluster.toml", CLUSTER)
    hetpipe.write("profile.json", profile_text(long_profile()))
    hetpipe.write("plan.json", plan_text(two_pipelines()))
    out = hetpipe(f"simulate plan.json {FILES}").out.splitlines()
    assert any(re.search("─{9}", line) for line in out)
    assert too_wide([line.rstrip() for line in out]) == []


def test_a_sentence_in_a_pipe_is_wrapped_where_columns_says_so_alone(capsys, monkeypatch):
    sentence = "auto: bert-large, " + ", ".join(f"microbatch {size} x 2" for size in range(1, 12))
    tables.show([sentence])
    assert capsys.readouterr().out == f"{sentence}\n"
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    tables.show([sentence])
    found = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert len(found) > 1 and too_wide(found) == [] and " ".join(found) == sentence


def alike_pipelines(count: int) -> Plan:
    """Return a plan of pipelines alike, each on a large and a small device."""
    pipelines = tuple(
        Pipeline(
            1, 4, (Stage((f"lab-server-one/{at}",), (0, 3), 2), Stage((f"lab-server-two/{at}",), (3, 4), 1))
        )
        for at in range(count)
    )
    return Plan("auto", "bert-large-uncased", 4 * count, pipelines)


@pytest.mark.parametrize(
    ("verb", "count"), [("simulate", 23), ("simulate", 500), ("explain", 23), ("explain", 150)]
)
def test_many_devices_fit_too(lines, hetpipe: Shell, verb: str, count: int):
    one = f'devices = [{{ kind = "{BIG}", count = {count}, memory = "10 kB" }}]'
    two = f'devices = [{{ kind = "{SMALL}", count = {count}, memory = "4 kB", speed = 0.95 }}]'
    head, first, second = CLUSTER.split("[[nodes]]")
    nodes = (first.partition("devices")[0] + one, second.partition("devices")[0] + two)
    hetpipe.write("cluster.toml", "\n[[nodes]]".join([head, *nodes]))
    hetpipe.write("plan.json", plan_text(alike_pipelines(count)))
    found = lines(f"{verb} plan.json {FILES}")
    assert too_wide(found) == []
    assert 3 < len(found) < 60, f"{2 * count} devices are told of one by one"


@pytest.mark.slow
def test_a_run_and_what_is_done_with_it_fit(hetpipe: Shell, lines):
    hetpipe.write("profile.json", profile_text(made_up_profile("bert-tiny", kind="emulated", layer_s=3e-4)))
    for line, shown in OF_A_RUN:
        found = lines(line)
        text = " ".join(found)
        assert too_wide(found) == [] and shown in text and "…" not in text


@pytest.mark.slow
def test_where_a_run_is_watched_fits_and_the_address_is_whole(tmp_path: Path):
    run = made_up_run(tmp_path / "-".join(["bert-large-uncased"] * 4), ended=False)
    watch = [sys.executable, "-m", "hetpipe", "watch", str(run.path)]
    found = lines_in_terminal(watch, tmp_path, until="Ctrl-C")
    assert too_wide(found) == []
    assert re.match(r"http://127\.0\.0\.1:\d+/(?: |$)", found[0])
