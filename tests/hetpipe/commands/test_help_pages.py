"""Help in groups with an example each, strategies and schedules by name, and completion."""

import os
import shlex
import subprocess
import sys

import pytest

from hetpipe import cli
from hetpipe.commands.help_pages import EXAMPLES
from hetpipe.commands.options import PUBLISHED_NAMES, STRATEGY_NAMES, WELL_KNOWN_NAMES
from hetpipe.program.instructions import Schedule
from partition.baselines.catalogue import PUBLISHED, WELL_KNOWN
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
    ("words", "completions"), [("pl", ["plan", "plot"]), ("plan --obj", ["--objective"])]
)
def test_a_shell_completes_verbs_and_options(words: str, completions: list[str]):
    line = f"hetpipe {words}"
    asked = {
        "_HETPIPE_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(line.count(" ")),
    }
    command = [sys.executable, "-c", "import sys; from hetpipe.cli import main; sys.exit(main([]))"]
    done = subprocess.run(command, env={**os.environ, **asked}, capture_output=True, text=True, check=False)
    assert done.stdout.split() == completions, done.stderr
