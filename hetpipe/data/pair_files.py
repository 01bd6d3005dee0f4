"""Texts and their translations in files: JSON lines, gettext catalogues, two columns, two texts in step."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cost_model.errors import InputError
from hetpipe.data.data_file import read_file, read_lines
from hetpipe.data.json_lines import first_line, has_rows, json_lines, shown, text_of

_SOURCE, _TARGET, _LANGUAGES = "source", "target", "translation"
_CATALOGUES, _COLUMNS = (".po", ".mo"), ".tsv"
FORM = (
    f'JSON lines with "{_SOURCE}" and "{_TARGET}" (or "{_LANGUAGES}" of two languages), gettext catalogues '
    "(.po, .mo), .tsv of two columns, or two texts whose lines are each other's translation"
)

Pair = tuple[str, str]
"""A text and its translation."""


def may_hold_pairs(path: Path) -> bool:
    """Return whether `read_pairs` may read a file: JSON lines by their first line, others in any case."""
    if not has_rows(path):
        return True
    keys = first_line(path).keys()
    return {_SOURCE, _TARGET} <= keys or _LANGUAGES in keys


def read_pairs(paths: Sequence[Path]) -> list[Pair]:
    """Return the pairs of all files; of those that hold one side alone, two after one another are a couple.

    Raises: InputError naming file and line of what is none.
    """
    found: list[Pair] = []
    sides: list[Path] = []
    languages: tuple[str, ...] = ()
    for path in paths:
        suffix = path.suffix.lower()
        if has_rows(path):
            more, theirs = _of_lines(path)
            if languages and theirs and theirs != languages:
                raise InputError(
                    f"{path} is from {' to '.join(theirs)}, another file from {' to '.join(languages)}; "
                    "write the languages of each line in one order"
                )
            languages = theirs or languages
            found += more
        elif suffix in _CATALOGUES:
            found += _of_catalogue(path)
        elif suffix == _COLUMNS:
            found += _of_columns(path)
        else:
            sides.append(path)
    if len(sides) % 2:
        raise InputError(
            f"data file {sides[-1]} has one side of a translation; give the file with the other after it, or "
            f"one kind of {FORM}"
        )
    for source, target in zip(sides[::2], sides[1::2], strict=True):
        found += _in_step(source, target)
    if not found:
        raise InputError(f"{', '.join(map(str, paths))}: nothing in it is translated; give {FORM}")
    return found


def _of_lines(path: Path) -> tuple[list[Pair], tuple[str, ...]]:
    """Return the pairs of JSON lines, and from which language to which where lines name them."""
    found: list[Pair] = []
    languages: tuple[str, ...] = ()
    for place, data in json_lines(path, FORM):
        if _LANGUAGES in data:
            texts = data[_LANGUAGES]
            if not isinstance(texts, dict) or len(texts) != 2:
                raise InputError(f'{place}: "{_LANGUAGES}" is {shown(texts)}; give texts in two languages')
            languages = languages or tuple(texts)
            (first, second), given = languages, texts
        else:
            first, second, given = _SOURCE, _TARGET, data
        if missing := [key for key in (first, second) if key not in given]:
            raise InputError(f'{place}: has {shown(list(given))} and no "{missing[0]}"; give {FORM}')
        found.append(_pair(text_of(given, first, place), text_of(given, second, place), place))
    return found, languages


def _pair(source: str, target: str, place: str) -> Pair:
    if not source.strip() or not target.strip():
        raise InputError(f"{place}: one of the two texts is empty; give both, or leave the line out")
    return source, target


def _of_catalogue(path: Path) -> list[Pair]:
    """Return what a gettext catalogue translates.

    Entries that are fuzzy, obsolete or not translated are left out. Of one with a plural the singular and,
    where the language has two forms, the plural are pairs; of more forms none is that of English.
    """
    read_file(path)
    return list(_messages(path))


def _messages(path: Path) -> Iterator[Pair]:
    try:
        import polib
    except ImportError:
        raise InputError(
            f"data file {path} is a gettext catalogue, which polib reads; pip install 'hetpipe[translation]'"
        ) from None
    try:
        read: Any = polib.mofile if path.suffix.lower() == ".mo" else polib.pofile
        entries = read(str(path)).translated_entries()
    except Exception as error:  # polib raises what it meets, struct.error, UnicodeDecodeError, OSError, ...
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"data file {path} is no gettext catalogue, or damaged ({reason})") from None
    for entry in entries:
        forms = [text for _, text in sorted(entry.msgstr_plural.items())] or [entry.msgstr]
        sources = [entry.msgid, entry.msgid_plural][: len(forms) if len(forms) < 3 else 1]
        for source, target in zip(sources, forms, strict=False):
            if source.strip() and target.strip():
                yield source, target


def _of_columns(path: Path) -> list[Pair]:
    found = []
    for number, line in enumerate(read_lines(path), start=1):
        if not line.strip():
            continue
        place, columns = f"data file {path}, line {number}", line.split("\t")
        if len(columns) != 2:
            raise InputError(f"{place}: has {len(columns)} columns; give a text, a tab and its translation")
        found.append(_pair(columns[0], columns[1], place))
    return found


def _in_step(source: Path, target: Path) -> list[Pair]:
    """Return the lines of two files, of which those that are empty in both are left out."""
    lines = [read_lines(path) for path in (source, target)]
    if len(lines[0]) != len(lines[1]):
        raise InputError(
            f"data file {source} has {len(lines[0]):,} lines and {target} {len(lines[1]):,}; give two whose "
            "lines are each other's translation, the source first"
        )
    return [
        _pair(first, second, f"data files {source} and {target}, line {number}")
        for number, (first, second) in enumerate(zip(*lines, strict=True), start=1)
        if first.strip() or second.strip()
    ]
