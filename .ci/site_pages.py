"""A hook of mkdocs: what lies outside docs/ and is linked to from there is part of the site, below project/.

So links are written as a code host shows them, and lead to pages of the site there. `FieldLists` shows what a
docstring says of fields and parameters as a list.
"""

import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
OUTSIDE = "project/"
LINK = re.compile(r"(\]\()([^)\s#:]+)((?:#[^)\s]*)?\))")
FIELD = re.compile(r"(^|[.)] )((?:\w+, )*\w+): ", re.MULTILINE)
EXAMPLE = re.compile(r"^(>>>.*(?:\n.+)*)", re.MULTILINE)
FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def on_files(files: Any, config: Any) -> Any:
    """Add what pages link to outside of docs/, and what those pages link to."""
    waiting = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    waiting += [name for entry in _leaves(config["nav"]) if (name := _place(entry)) is not None]
    known = set(waiting)
    while waiting:
        path = waiting.pop()
        if not path.startswith("docs/"):
            files.append(File.generated(config, OUTSIDE + path, abs_src_path=str(ROOT / path)))
        if path.endswith(".md"):
            found = {_target(path, link) for _, link, _ in LINK.findall((ROOT / path).read_text())}
            waiting += sorted({one for one in found if one is not None} - known)
            known.update(waiting)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Give links to files of the project the places that these have in the site."""
    place = page.file.src_uri
    path = place.removeprefix(OUTSIDE) if place.startswith(OUTSIDE) else f"docs/{place}"

    def moved(match: re.Match[str]) -> str:
        target = _target(path, match[2])
        if target is None:
            return match[0]
        new = target.removeprefix("docs/") if target.startswith("docs/") else OUTSIDE + target
        return f"{match[1]}{posixpath.relpath(new, posixpath.dirname(place) or '.')}{match[3]}"

    return _outside_of_code(markdown, lambda text: LINK.sub(moved, text))


def _outside_of_code(markdown: str, change: Callable[[str], str]) -> str:
    parts = FENCED.split(markdown)
    return "".join(part if number % 2 else change(part) for number, part in enumerate(parts))


def _target(path: str, link: str) -> str | None:
    """Return the path from the root of the project of what a page links to; None if it is no file of it."""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link))
    if (ROOT / target).is_dir():
        target = f"{target}/README.md"
    return target if not target.startswith("..") and (ROOT / target).is_file() else None


def _place(entry: str) -> str | None:
    return entry.removeprefix(OUTSIDE) if entry.startswith(OUTSIDE) else None


def _leaves(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    for child in nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else ():
        yield from _leaves(child)


class FieldLists(griffe.Extension):
    """Makes lists of what docstrings say of fields and parameters by name, and code of their examples."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        for described in _all_in(pkg):
            names = {*described.members, "Raises"}
            if isinstance(described, griffe.Function | griffe.Class):
                names |= {parameter.name for parameter in described.parameters}
            if described.docstring is not None:
                described.docstring.value = _listed(described.docstring.value, names)


def _all_in(described: griffe.Object) -> Iterator[griffe.Object]:
    yield described
    for member in described.members.values():
        if isinstance(member, griffe.Object):
            yield from _all_in(member)


def _listed(text: str, names: set[str]) -> str:
    def item(match: re.Match[str]) -> str:
        words = match[2].split(", ")
        if not set(words) <= names:
            return match[0]
        return f"{match[1].rstrip()}\n\n* {', '.join(f'`{word}`' for word in words)}: "

    text = EXAMPLE.sub(r"\n```pycon\n\1\n```\n", text)
    return FIELD.sub(item, text).replace("* `Raises`:", "*Raises*:")
