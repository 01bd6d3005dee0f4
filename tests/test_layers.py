"""Who may import whom (docs/design.md), read from the sources; and what must not load torch, tried out."""

import ast
import doctest
import importlib
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("cost_model", "partition", "hetpipe")
LONGEST_FILE = 400

PLANNING_HALF = (
    "hetpipe",
    "hetpipe.calibration",
    "hetpipe.cli",
    "hetpipe.clock_kernel",
    "hetpipe.clockwork",
    "hetpipe.commands.common",
    "hetpipe.commands.demo",
    "hetpipe.commands.explaining",
    "hetpipe.commands.forcing",
    "hetpipe.commands.hosts",
    "hetpipe.commands.measuring",
    "hetpipe.commands.models",
    "hetpipe.commands.pictures",
    "hetpipe.commands.planning",
    "hetpipe.commands.profiles",
    "hetpipe.commands.run",
    "hetpipe.compiled_clock",
    "hetpipe.costs",
    "hetpipe.critical_path",
    "hetpipe.gpus",
    "hetpipe.instructions",
    "hetpipe.list_schedule",
    "hetpipe.lowering",
    "hetpipe.model_folder",
    "hetpipe.model_names",
    "hetpipe.planning",
    "hetpipe.plotting",
    "hetpipe.plotting.plans",
    "hetpipe.plotting.style",
    "hetpipe.plotting.timeline",
    "hetpipe.precision",
    "hetpipe.profiling",
    "hetpipe.report",
    "hetpipe.run_folder",
    "hetpipe.run_report",
    "hetpipe.schedules",
    "hetpipe.settings",
    "hetpipe.simulator",
    "hetpipe.speed_shares",
    "hetpipe.step_clock",
    "hetpipe.trace",
    "hetpipe.verifier",
    "hetpipe.waiting",
)
"""Modules of hetpipe that need no torch, not even through what they import."""


def modules() -> dict[str, Path]:
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


MODULES = modules()


@cache
def imports(path: Path, *, at_top_only: bool = False) -> set[str]:
    """Dotted names that a file imports; those under `if TYPE_CHECKING` do not run and do not count."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    names: set[str] = set()
    for node in tree.body if at_top_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def roots(names: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize("name", [name for name in MODULES if not name.startswith("hetpipe")])
def test_imports_point_down(name: str):
    forbidden = {"hetpipe", "torch", "matplotlib", "transformers"}
    if name.startswith("cost_model"):
        forbidden |= {"partition", "pulp", "highspy"}
    assert not roots(imports(MODULES[name])) & forbidden


def test_each_library_has_its_home():
    homes = {
        "matplotlib": {f"hetpipe.plotting.{name}" for name in ("plans", "style", "timeline")},
        "pulp": {"partition.bounds"},
        "highspy": {"partition.master"},
    }
    for name, path in MODULES.items():
        for library, allowed in homes.items():
            if library in roots(imports(path)):
                inside_a_verb = name.startswith("hetpipe.commands") and library not in roots(
                    imports(path, at_top_only=True)
                )
                assert name in allowed or inside_a_verb, f"{name} imports {library}"


def test_nothing_imports_the_command_line():
    for name, path in MODULES.items():
        if name not in ("hetpipe.__main__", "hetpipe.cli"):
            used = imports(path)
            assert "hetpipe.cli" not in used, name
            if not name.startswith("hetpipe.commands"):
                assert not any(entry.startswith("hetpipe.commands") for entry in used), name


def test_imports_are_not_circular():
    edges = {
        name: imports(path, at_top_only=True) & MODULES.keys() - {name} for name, path in MODULES.items()
    }
    done: set[str] = set()
    while len(done) < len(edges):
        ready = {name for name, used in edges.items() if name not in done and used <= done}
        assert ready, f"a cycle among {sorted(edges.keys() - done)}"
        done |= ready


def test_no_file_grows_too_long():
    lengths = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in MODULES.items()}
    assert {name: length for name, length in lengths.items() if length > LONGEST_FILE} == {}


def test_the_planning_half_is_complete():
    """What torch is not imported by, even through others, is in the list; a new module is put on one side."""
    needs_torch = {
        name for name, path in MODULES.items() if "torch" in roots(imports(path, at_top_only=True))
    }
    grown = True
    while grown:
        users = {name for name in MODULES if imports(MODULES[name], at_top_only=True) & needs_torch}
        grown = not users <= needs_torch
        needs_torch |= users
    assert not needs_torch & set(PLANNING_HALF)
    assert set(PLANNING_HALF) <= MODULES.keys()


def loaded_after(statement: str) -> set[str]:
    """Top-level names of the modules that a fresh interpreter has loaded after a statement."""
    code = f"{statement}\nimport sys; print(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(run.stdout.splitlines()[-1].split())


@pytest.mark.slow
def test_the_planning_half_loads_without_torch():
    loaded = loaded_after("import " + ", ".join([*PLANNING_HALF, "partition.solver"]))
    assert not loaded & {"torch", "transformers", "tokenizers"}


@pytest.mark.slow
def test_the_command_line_loads_nothing_heavy():
    assert not loaded_after("import hetpipe.cli") & {"torch", "numpy", "matplotlib", "pulp", "transformers"}


@pytest.mark.parametrize(
    "name",
    [name for name in MODULES if not name.startswith("hetpipe") or name in PLANNING_HALF],
)
def test_examples_in_docstrings(name: str):
    assert doctest.testmod(importlib.import_module(name)).failed == 0
