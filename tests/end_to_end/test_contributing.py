"""What CONTRIBUTING and the docs name exists; changelog, citation and licence agree with the package."""

import ast
import configparser
import re
from functools import cache
from pathlib import Path

import pytest

from places import ROOT

CONTRIBUTING = ROOT / "CONTRIBUTING.md"
PLACE = re.compile(r"`([\w/]+\.py):([\w.]+)`")
PAGES = [CONTRIBUTING, *sorted((ROOT / "docs").glob("*.md"))]
KINDS = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]
RELEASE = re.compile(r"\[?\d+\.\d+\.\d+\]? - \d{4}-\d{2}-\d{2}")


@cache
def names_in(path: Path) -> frozenset[str]:
    """Return the names that a file defines at its top, and `Class.name` for what a class holds."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = set(_defined(tree.body))
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{name}" for name in _defined(node.body)}
    return frozenset(found)


def _defined(body: list[ast.stmt]) -> list[str]:
    names: list[str] = []
    for node in body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names.append(node.name)
            case ast.Assign():
                names += [target.id for target in node.targets if isinstance(target, ast.Name)]
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.append(name)
    return names


def chapters_in_order() -> list[str]:
    """Return the chapters of `tests/test_layers.py`, by their last name."""
    tree = ast.parse((ROOT / "tests" / "test_layers.py").read_text(encoding="utf-8"))
    [order] = [
        node.value for node in tree.body if isinstance(node, ast.Assign) and _defined([node]) == ["ORDER"]
    ]
    names = [name for name in ast.literal_eval(order) if "." in name]
    return [name.partition(".")[2] for name in names if name != "hetpipe.__main__"]


def answers() -> list[str]:
    """Return the numbered questions, each with its answer as one line."""
    section = CONTRIBUTING.read_text(encoding="utf-8").partition("## Where is it?")[2].partition("\n## ")[0]
    lines = re.split(r"\n(?=\d+\. )", section)[1:]
    return [" ".join(line.split()) for line in lines]


def test_twenty_questions_have_answers_that_name_a_place():
    asked = answers()
    assert [int(line.partition(".")[0]) for line in asked] == list(range(1, 21))
    assert [line for line in asked if not PLACE.search(line)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_places_exist(page: Path):
    missing = [
        f"{file}:{name}"
        for file, name in PLACE.findall(page.read_text(encoding="utf-8"))
        if not (ROOT / file).is_file() or name not in names_in(ROOT / file)
    ]
    assert missing == []


def test_the_check_knows_methods_and_constants_and_misses_others():
    names = names_in(ROOT / "hetpipe" / "simulation" / "simulator.py")
    assert {"simulate", "_Simulation", "_Simulation.run"} <= names
    assert "run" not in names
    assert "KINDS" in names_in(Path(__file__))


def test_the_maps_have_every_chapter_in_order():
    """In CONTRIBUTING's table and in the list of the architecture page."""
    chapters = chapters_in_order()
    table = CONTRIBUTING.read_text(encoding="utf-8").partition("## The map")[2].partition("\n## ")[0]
    cells = " ".join(line.split("|")[1] for line in table.splitlines() if line.startswith("| `"))
    assert [name for name in re.findall(r"\w+", cells.replace(".py", "")) if name in chapters] == chapters
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").partition("## The chapters")[2]
    listed = [line[:36] for line in text.splitlines() if re.match(r" {6}\w", line)]
    assert re.findall(r"\w+", " ".join(listed)) == chapters


def test_the_changelog_keeps_its_form():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert text.startswith("# Changelog\n")
    releases = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert releases[0] == "Unreleased"
    assert [name for name in releases[1:] if not RELEASE.fullmatch(name)] == []
    for release in re.split(r"^## .+$", text, flags=re.MULTILINE)[1:]:
        kinds = re.findall(r"^### (.+)$", release, re.MULTILINE)
        assert kinds, "entries are under Added, Changed, ..."
        assert set(kinds) <= set(KINDS)
        assert len(kinds) == len(set(kinds)), "each kind once"
        loose = [line for line in release.splitlines() if line and not re.match(r"- \S|### |[\w ,]+:$", line)]
        assert loose == [], "an entry is one line"


def test_citation_and_licence_are_those_of_the_package():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    metadata = setup["metadata"]
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {metadata['version']}\n" in citation
    assert f"\nlicense: {metadata['license']}\n" in citation
    licence = (ROOT / metadata["license_files"]).read_text(encoding="utf-8")
    assert licence.split()[:4] == ["Apache", "License", "Version", "2.0,"]
