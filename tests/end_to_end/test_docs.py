"""The docs name files, verbs and options that exist."""

import json
import re
import shlex
from collections.abc import Iterator
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import typer

from hetpipe.cli import VERBS, app, main
from places import ROOT

PAGES = [
    *sorted((ROOT / "docs").rglob("*.md")),
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG")),
]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)
INLINE = re.compile(r"`(hetpipe [a-z]+(?: [^`]*)?)`")
WRAPPERS = ("python -m ", "python3 -m ", "torchrun ", "srun ", "mpirun ")
IN_YAML = "command: ["
pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = HEADING.findall(without_code(page.read_text(encoding="utf-8")))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def commands(page: Path) -> Iterator[str]:
    """Command lines in code blocks, fenced or indented."""
    fenced = False
    for line in re.sub(r" *\\\n *", " ", page.read_text(encoding="utf-8")).splitlines():
        fenced ^= line.startswith("```")
        if not fenced and not line.startswith("    "):
            continue
        for part in map(str.strip, line.split("&&")):
            part = part.removeprefix("$ ")  # of a transcript
            if part.startswith(WRAPPERS) and " hetpipe " in part:
                part = part[part.index(" hetpipe ") + 1 :]
            if part.startswith(IN_YAML):
                part = shlex.join(json.loads(part.removeprefix(IN_YAML[:-1])))
            if part.startswith("hetpipe "):
                yield part.removesuffix(" &")


@cache
def verbs() -> dict[str, Any]:
    """The verbs as typer has them once they are loaded."""
    group: Any = typer.main.get_command(app)
    return {name: group.get_command(None, name) for name in VERBS}


def parse(command: str) -> None:
    """Parse a command as the program would, without running it; files need not exist."""
    verb, *words = shlex.split(command.partition(" #")[0])[1:]
    assert verb in verbs(), f"no verb {verb!r}"
    if "--run-file" in words:  # which gives what is needed
        place = words.index("--run-file")
        words[place : place + 2] = ["--model", "m", "--cluster", "c.toml"]
    verbs()[verb].make_context(verb, words)


@pages
def test_relative_links_lead_to_files_and_headings(page):
    for target in LINK.findall(without_code(page.read_text(encoding="utf-8"))):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(path), f"{page.name}: {target} is no heading"


@pages
def test_tables_have_a_head_and_rows_of_as_many_cells(page):
    lines = without_code(page.read_text(encoding="utf-8")).splitlines()
    for is_table, group in groupby(lines, lambda line: line.startswith("|")):
        if not is_table:
            continue
        rows = list(group)
        assert re.fullmatch(r"\|(?: ?:?-+:? ?\|)+", "".join(rows[1:2])), f"{page.name}: {rows[0]}"
        assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1, f"{page.name}: {rows[0]}"


@pages
def test_commands_have_verbs_and_options_that_exist(page):
    for command in commands(page):
        try:
            parse(command)
        except typer.TyperException as error:
            pytest.fail(f"{page.name}: `{command}`: {error.format_message()}")


@pages
def test_verbs_and_options_named_in_the_text_exist(page):
    for mention in INLINE.findall(page.read_text(encoding="utf-8")):
        verb, *words = shlex.split(mention)[1:]
        assert verb in verbs(), f"{page.name}: `{mention}`"
        known = {option for entry in verbs()[verb].params for option in entry.opts + entry.secondary_opts}
        assert {word for word in words if word.startswith("-")} <= known, f"{page.name}: `{mention}`"


def test_commands_are_found_and_wrong_ones_refused():
    assert any(command.startswith("hetpipe run ") for page in PAGES for command in commands(page))
    with pytest.raises(typer.TyperException, match="No such option"):
        parse("hetpipe env --colour")
    with pytest.raises(AssertionError, match="no verb"):
        parse("hetpipe fly")


def test_every_verb_and_option_is_documented():
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    for name, verb in verbs().items():
        assert f"## hetpipe {name}\n" in text
        words = [word for entry in verb.params for word in entry.opts + entry.secondary_opts]
        options = {word for word in words if word.startswith("-")}
        assert "--json" in options
        assert {word for word in options if f"`{word}" not in text} == set()


@pytest.mark.slow
def test_the_picture_of_the_readme_is_what_plot_draws_today(tmp_path):
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    (line,) = [line for line in page.splitlines() if "plot examples/plans/" in line]
    words = [str(ROOT / word) if "/" in word else word for word in shlex.split(line)[1:-1]]
    assert main([*words, str(tmp_path)]) == 0
    drawn, kept = (
        path.read_text() for path in (tmp_path / "beside-even.svg", ROOT / "docs" / "even-and-uneven.svg")
    )
    without_day = re.compile(r", 20\d\d-\d\d-\d\d<")
    texts = [re.findall(r">([^<>]+)</text>", without_day.sub("<", svg)) for svg in (drawn, kept)]
    assert texts[0] == texts[1] and "this plan: predicted 142 ms a step, 2.95 times as fast" in texts[0]
    assert len(kept) < 150 * 2**10


def test_the_table_at_the_top_of_the_readme_is_that_of_the_benchmark():
    """The last column of each cluster's table, where the row of the README has the contender."""
    contenders = {
        "as Poplar": "DDP, Poplar", "HexiScale": "as HexiScale", "fastest device": "one device",
        "equal samples": "DDP, equal", "Schedule1F1B": "torch 1F1B, even",
    }  # fmt: skip
    benchmark = (ROOT / "examples" / "benchmarks" / "peers" / "README.md").read_text(encoding="utf-8")
    top, _, _ = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Try it")
    rows = [line.strip("|").split("|") for line in top.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == len(contenders)
    for name, *factors in rows:
        (contender,) = (theirs for part, theirs in contenders.items() if part in name)
        found = re.findall(rf"^\| {contender} \|.* (\d\.\d\d) \|$", benchmark, re.MULTILINE)
        assert [factor.strip() for factor in factors] == found, name
