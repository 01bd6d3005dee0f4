"""Who may import whom: one ordered list of chapters, read from the sources; and what must not load torch."""

import ast
import doctest
import importlib
import subprocess
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from places import MODULES, PACKAGES, ROOT

LONGEST_FILE = 400

ORDER = (
    "cost_model",
    "partition.plan",
    "partition.plan_file",
    "partition.problem",
    "partition.estimates",
    "partition.column_generation",
    "partition.constraints",
    "partition.exact",
    "partition.baselines",
    "partition.shared_devices",
    "partition.local_search",
    "partition.bounds",
    "partition.auto",
    "partition.solver",
    "partition.explanation",
    "partition",
    "hetpipe.program",
    "hetpipe.simulation",
    "hetpipe.runs",
    "hetpipe.reporting",
    "hetpipe.models",
    "hetpipe.data",
    "hetpipe.trust",
    "hetpipe.runtime",
    "hetpipe.profiling",
    "hetpipe.training",
    "hetpipe.hosts",
    "hetpipe",
    "hetpipe.commands",
    "hetpipe.cli",
    "hetpipe.__main__",
)
"""The chapters, from the first to the last: a file imports from its own chapter and from earlier ones."""

TORCH_CHAPTERS = (
    "hetpipe.models",
    "hetpipe.data",
    "hetpipe.runtime",
    "hetpipe.profiling",
    "hetpipe.training",
)
"""The running half. All other chapters load no torch, not even through what they import."""

LIBRARY_HOMES = {
    "peft": ("hetpipe.models.adapters",),
    "matplotlib": ("hetpipe.reporting.plots",),
    "pulp": ("partition.bounds.best_bound", "partition.bounds.host_bound"),
    "highspy": ("partition.column_generation.master_problem",),
}
MOST_ROOMS = {"hetpipe": 16, "partition": 14}


def is_within(name: str, place: str) -> bool:
    return name == place or name.startswith(f"{place}.")


def chapter_of(name: str) -> str:
    return max((chapter for chapter in ORDER if is_within(name, chapter)), key=len)


PLANNING_HALF = tuple(name for name in MODULES if chapter_of(name) not in TORCH_CHAPTERS)


@cache
def imports(path: Path, *, at_top_only: bool = False) -> set[str]:
    """Dotted names that a file imports, also in functions, for types alone, and by `import_module("...")`.

    at_top_only: those that are loaded with the file.
    """
    names: set[str] = set()
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    if at_top_only:
        nodes = list(_loaded_nodes(path))
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names |= {str(arg.value) for arg in node.args if isinstance(arg, ast.Constant)}
    return names


def _loaded_nodes(path: Path) -> list[ast.stmt]:
    """The statements at the top of a file, without those under `if TYPE_CHECKING`."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [
        node
        for node in tree.body
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    ]


def roots(names: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


def used_modules(name: str, *, at_top_only: bool = False) -> set[str]:
    """Modules of ours that a module imports, without the packages that they lie in."""
    return imports(MODULES[name], at_top_only=at_top_only) & MODULES.keys() - {name}


def test_every_module_is_in_a_chapter():
    assert {chapter_of(name) for name in MODULES} == set(ORDER)


def test_chapters_import_from_earlier_ones_only():
    upwards = [
        (name, used)
        for name in MODULES
        for used in used_modules(name)
        if ORDER.index(chapter_of(used)) > ORDER.index(chapter_of(name)) and name != "hetpipe"
    ]
    assert upwards == []


def test_no_circle_even_by_lazy_imports():
    """The public face of a package, its `__init__`, names modules by string and is left out."""
    edges = {name: used_modules(name) - set(PACKAGES) for name in MODULES if name not in PACKAGES}
    done: set[str] = set()
    while len(done) < len(edges):
        ready = {name for name, used in edges.items() if name not in done and used <= done}
        assert ready, f"a circle among {sorted(edges.keys() - done)}"
        done |= ready


def test_the_check_finds_a_circle_and_an_arrow_upwards(tmp_path: Path):
    lazy = tmp_path / "lazy.py"
    lazy.write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import a.b\n"
        "def f():\n    from c import d\n    importlib.import_module('e.f')\n"
    )
    assert imports(lazy) == {"typing", "typing.TYPE_CHECKING", "a.b", "c", "c.d", "e.f"}
    assert imports(lazy, at_top_only=True) == {"typing", "typing.TYPE_CHECKING"}


def test_the_order_is_that_of_the_packages():
    firsts = [chapter.partition(".")[0] for chapter in ORDER]
    assert [first for first, after in pairwise([*firsts, ""]) if first != after] == list(PACKAGES)


@pytest.mark.parametrize("package", MOST_ROOMS)
def test_the_house_has_few_rooms(package: str):
    found = {name.split(".")[1] for name in MODULES if name.startswith(f"{package}.")} | {"__init__"}
    assert len(found) <= MOST_ROOMS[package] + 1, sorted(found)


def test_each_library_has_its_home():
    for name, path in MODULES.items():
        for library, homes in LIBRARY_HOMES.items():
            if library in roots(imports(path)):
                at_home = any(is_within(name, home) for home in homes)
                in_a_verb = name.startswith("hetpipe.commands") and library not in roots(
                    imports(path, at_top_only=True)
                )
                assert at_home or in_a_verb, f"{name} imports {library}"


def test_planning_packages_know_nothing_of_running():
    for name, path in MODULES.items():
        if not name.startswith("hetpipe"):
            assert not roots(imports(path)) & {"torch", "transformers"}, name


def test_no_file_grows_too_long():
    lengths = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in MODULES.items()}
    assert {name: length for name, length in lengths.items() if length > LONGEST_FILE} == {}


def loaded_after(statement: str) -> set[str]:
    """Top-level names of the modules that a fresh interpreter has loaded after a statement."""
    code = f"{statement}\nimport sys; print(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(run.stdout.splitlines()[-1].split())


@pytest.mark.slow
def test_the_planning_half_loads_without_torch():
    loaded = loaded_after("import " + ", ".join(name for name in PLANNING_HALF if name[-8:] != "__main__"))
    assert not loaded & {"torch", "transformers", "tokenizers"}


@pytest.mark.slow
def test_small_plans_load_no_compiler():
    planned = (
        "sys.path.insert(0, 'tests/support'); from wish_cases import step_s, wish_case; step_s(wish_case(4))"
    )
    loaded = loaded_after(f"import sys; {planned}; import partition.solver, hetpipe.commands.plan")
    assert "highspy" in loaded and "numba" not in loaded


@pytest.mark.slow
def test_the_command_line_loads_nothing_heavy():
    assert not loaded_after("import hetpipe.cli") & {"torch", "numpy", "matplotlib", "pulp", "transformers"}


@pytest.mark.slow
def test_the_help_loads_no_verb_and_none_of_the_large_libraries():
    heavy = {"torch", "numpy", "numba", "matplotlib", "pulp", "transformers", "pydantic", "rich"}
    assert not loaded_after("from hetpipe.cli import main; main(['--help'])") & heavy
    code = (
        "import sys; from hetpipe.cli import main; main(['--help']); print('hetpipe.commands' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert run.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize("name", [name for name in PLANNING_HALF if name != "hetpipe.__main__"])
def test_examples_in_docstrings(name: str):
    assert doctest.testmod(importlib.import_module(name)).failed == 0
