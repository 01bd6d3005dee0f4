"""What a chapter's `__init__` says that others may use is there, and so is what the examples import."""

import ast
import importlib
import re

import pytest

from places import EXAMPLES, MODULES, PACKAGES

CHAPTERS = (
    "program",
    "simulation",
    "runs",
    "reporting",
    "models",
    "data",
    "runtime",
    "profiling",
    "training",
)


def names_for_others(text: str) -> dict[str, list[str]]:
    """Return the names that a chapter lists below "Others use:", by module."""
    listed = text.partition("Others use:\n")[2].replace("\n        ", " ")
    rows = [line.strip().partition(": ") for line in listed.splitlines() if line.strip()]
    return {module: re.findall(r"\b\w+\b", names.partition(", and ")[0]) for module, _, names in rows}


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_chapter_names_what_others_may_use(chapter: str):
    text = importlib.import_module(f"hetpipe.{chapter}").__doc__ or ""
    listed = names_for_others(text)
    assert listed
    for module, names in listed.items():
        found = importlib.import_module(f"hetpipe.{chapter}.{module}")
        assert names and [name for name in names if not hasattr(found, name)] == [], module


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_chapter_speaks_of_its_own_modules(chapter: str):
    """Every name in backticks is a module of the chapter, or a name in one of them."""
    text = importlib.import_module(f"hetpipe.{chapter}").__doc__ or ""
    modules = [name for name in MODULES if name.startswith(f"hetpipe.{chapter}.")]
    known = {name.rpartition(".")[2] for name in modules}
    for name in modules:
        known |= set(vars(importlib.import_module(name)))
    quoted = set(re.findall(r"`(\w+)`", text))
    assert quoted and quoted <= known, quoted - known


def test_what_the_examples_import_is_there():
    """Benchmarks take too long to run with every change; a name that moved is found here."""
    missing, num_names = [], 0
    for path in sorted(EXAMPLES.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in PACKAGES:
                found = importlib.import_module(str(node.module))
                num_names += len(node.names)
                missing += [
                    f"{path.relative_to(EXAMPLES)}: {node.module}.{alias.name}"
                    for alias in node.names
                    if not hasattr(found, alias.name) and f"{node.module}.{alias.name}" not in MODULES
                ]
    assert missing == [] and num_names > 100
