"""Help in groups with an example each, strategies and schedules by name, and completion."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hetpipe import cli
from hetpipe.commands.help_pages import EXAMPLES
from hetpipe.commands.options import PUBLISHED_NAMES, STRATEGY_NAMES, WELL_KNOWN_NAMES
from hetpipe.program.instructions import Schedule
from partition.baselines.catalogue import PUBLISHED, WELL_KNOWN
from places import ROOT
from shell import Shell


def sections(text: str) -> list[str]:
    return [line.rstrip(":") for line in text.splitlines() if line.endswith(":") and line[0] != " "]


@pytest.mark.parametrize(
    ("verb", "groups"),
    [
        ("env", ["Options"]),
        ("check", ["Options", "Adapters and run files"]),
        ("explain", ["Options", "Adapters and run files", "What is trained", "What is measured"]),
        (
            "run",
            [
                "Options",
                "Adapters and run files",
                "What is trained",
                "What is measured",
                "What the plan must be like",
                "Training",
                "The optimizer",
                "Held-out data",
                "Several hosts",
            ],
        ),
    ],
)
def test_options_are_in_groups_and_each_once(hetpipe: Shell, verb: str, groups: list[str]):
    text = hetpipe(f"{verb} --help").out
    (usage, *found, example) = sections(f"Usage:\n{text}")
    assert (usage, found, example) == ("Usage", groups, "Example")
    options = [line.split()[0].rstrip(",") for line in text.splitlines() if line.startswith("  -")]
    assert len(options) == len(set(options))


def test_the_group_of_an_option_does_not_depend_on_which_verb_was_loaded_before(hetpipe: Shell):
    for _ in range(2):
        for verb, group in (("plan", "What the plan must be like"), ("profile", "What is measured")):
            text = hetpipe(f"{verb} --help").out
            assert "--allow-slow" in text.partition(f"\n{group}:\n")[2].partition("\n\n")[0], verb


@pytest.mark.parametrize("verb", cli.VERBS)
def test_every_verb_has_an_example_that_it_takes(hetpipe: Shell, verb: str):
    assert f"Example:\n  {EXAMPLES[verb]}\n" in hetpipe(f"{verb} --help").out
    name, first, *words = shlex.split(EXAMPLES[verb])
    command = cli.typer.main.get_command(cli.app).get_command(None, verb)
    assert (name, first) == ("hetpipe", verb) and command.make_context(verb, words)


def test_strategies_and_schedules_are_listed(hetpipe: Shell):
    assert WELL_KNOWN_NAMES.split(", ") == [*WELL_KNOWN]
    assert PUBLISHED_NAMES.split(", ") == [*PUBLISHED]
    text = " ".join(hetpipe("plan --help").out.split())
    assert STRATEGY_NAMES in text.replace("- ", "-") and "|".join(Schedule) in text
    assert "--json One JSON object" in text  # a flag takes no value


@pytest.mark.parametrize(
    ("words", "completions"),
    [
        ("pl", ["plan", "plot"]),
        ("plan --obj", ["--objective"]),
        ("run --strategy pip", ["pipedream"]),
        ("compare --strategy a", ["auto", "all"]),
        ("run --model bert-", ["bert-base", "bert-large", "bert-medium-24", "bert-tiny"]),
        ("check --model ./m", ["./mine"]),
        ("plan --cluster f", ["four-unequal", "four.toml"]),
        ("run --schedule li", ["list"]),
    ],
)
def test_a_shell_completes_verbs_options_and_their_values(tmp_path: Path, words: str, completions: list[str]):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    (tmp_path / "more").mkdir()  # no model
    (tmp_path / "four.toml").write_text("")
    line = f"hetpipe {words}"
    asked = {
        "_HETPIPE_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(line.count(" ")),
    }
    command = [sys.executable, "-c", "import sys; from hetpipe.cli import main; sys.exit(main([]))"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **asked}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.stdout.split() == completions, done.stderr


def test_an_option_that_is_near_to_nothing_is_not_taken_for_help(hetpipe: Shell):
    result = hetpipe("env --json --heap")
    assert (result.code, result.err) == (2, "error: No such option: --heap; see --help\n")
    assert "--help" not in hetpipe("simulate plan.json --steps 3").err
    assert "--profile" in hetpipe("simulate plan.json --profil x").err


def test_bash_takes_the_completion_that_is_shown(tmp_path: Path):
    """bash itself runs what `--show-completion` prints, and completes a word by it."""
    (tmp_path / "hetpipe").write_text(f"#!{sys.executable}\nfrom hetpipe.cli import main\nmain()\n")
    (tmp_path / "hetpipe").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": path, "HOME": str(tmp_path)}
    script = (
        'eval "$(_HETPIPE_COMPLETE=source_bash hetpipe)"\n'
        'complete=$(complete -p hetpipe | sed "s/.*-F //; s/ .*//")\n'
        "COMP_WORDS=(hetpipe compare --strategy zo) COMP_CWORD=3\n"
        '$complete hetpipe; echo "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "-c", script], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["zorse"], done.stderr
