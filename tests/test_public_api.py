"""What users rely on by name: a change here is a change for them, and goes into CHANGELOG.md."""

import dataclasses
import importlib
import inspect

import pytest

import hetpipe
from hetpipe import cli
from hetpipe.program.instructions import FORMAT as PROGRAM_FORMAT
from hetpipe.reporting.tables import console
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.run_report import RunReport
from hetpipe.runs.settings import Settings
from partition.auto import STRATEGIES
from partition.plan import Figures, Pipeline, Plan, Stage
from places import MODULES


def test_verbs():
    before = "demo init profile plan explain simulate compare check run plot watch export"
    assert list(cli.VERBS) == [*before.split(), "models", "clusters", "cache", "env"]


def test_strategies():
    known = "single ddp poplar gpipe-even torchgpipe memory-proportional speed-proportional pipedream"
    published = "poplar-0 poplar-1 poplar-2 poplar-3 heterog hetpipe-np hetpipe-ed hetpipe-hd whale-dp"
    assert list(STRATEGIES) == f"{known} {published} whale-pp hap cephalo hexiscale zorse auto".split()


@pytest.mark.parametrize("verb", cli.VERBS.values(), ids=cli.VERBS)
def test_every_verb_takes_json_and_has_its_line_in_the_help(verb: cli.Verb):
    function = verb.load()
    assert "json" in inspect.signature(function).parameters
    assert function.__doc__ == verb.help


def test_formats_of_the_files():
    formats = {importlib.import_module(name).FORMAT for name in ("cost_model.profile", "partition.plan")}
    assert formats | {PROGRAM_FORMAT} == {"hetpipe.profile/2", "hetpipe.plan/1", "hetpipe.program/1"}


def test_names_of_the_files_of_a_run():
    folder = RunFolder.__dict__
    files = {name for name, entry in folder.items() if isinstance(entry, property)}
    assert files == {
        *("config", "cluster", "profile", "plan", "program", "metrics", "trace", "report", "recoveries"),
        *(
            "vocabulary",
            "tokenizer_config",
            "tokens",
            "checkpoints",
            "model_config",
            "held_out",
            "chat_template",
            "image_processor",
            "job",
            "page",
        ),
    }


@pytest.mark.parametrize("data", [Plan, Pipeline, Stage, Figures, Settings, RunReport])
def test_data_is_frozen(data: type):
    assert dataclasses.is_dataclass(data)
    assert data.__dataclass_params__.frozen  # type: ignore[attr-defined]


def test_the_package_gives_what_it_says():
    for name in getattr(hetpipe, "__all__", ()):
        assert getattr(hetpipe, name).__doc__, name
        assert not inspect.ismodule(getattr(hetpipe, name)), f"a module hides hetpipe.{name}"


def test_every_module_and_public_class_says_what_it_is():
    missing = []
    for name in MODULES:
        if name == "hetpipe.__main__":
            continue
        module = importlib.import_module(name)
        classes = [
            entry for entry in vars(module).values() if inspect.isclass(entry) and entry.__module__ == name
        ]
        missing += [entry.__qualname__ for entry in classes if not entry.__doc__ and entry.__name__[0] != "_"]
        missing += [] if module.__doc__ else [name]
    assert missing == []


def test_consoles_in_a_pipe_are_wide_and_plain():
    assert not console().is_terminal
