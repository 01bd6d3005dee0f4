"""Texts and their translations in files: JSON lines, gettext catalogues, two columns, two texts in step."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from cost_model.errors import InputError
from hetpipe.data.data_file import read_file, read_lines
from hetpipe.data.json_lines import first_line, has_rows, json_lines, shown, text_of

_SOURCE, _TARGET, _LANGUAGES = "source", "target", "translation"
_COLUMNS = ".tsv"
_WHOLE = (".po", ".mo", _COLUMNS)
"""Ends of names of files that hold both sides; other than those with rows."""
FORM = (
    f'JSON lines with "{_SOURCE}" and "{_TARGET}" (or "{_LANGUAGES}" of two languages), gettext catalogues '
    "(.po, .mo), .tsv of two columns, or two texts whose lines are each other's translation"
)

Pair = tuple[str, str]
"""A text and its translation."""


def may_hold_pairs(path: Path) -> bool:
    """Return whether `read_pairs` may read a file: JSON lines by their first line, all others but JSON."""
    if not has_rows(path):
        return path.suffix.lower() != ".json"
    keys = first_line(path).keys()
    return {_SOURCE, _TARGET} <= keys or _LANGUAGES in keys


def read_pairs(paths: Sequence[Path], languages: "Languages | None" = None) -> Iterator[Pair]:
    """Yield the pairs of all files; of those that hold one side alone, two after one another are a couple.

    One line of a file is held at a time, of catalogues one file. languages: takes those that lines name, or
    says the direction.

    Raises: InputError naming file and line of what is none.
    """
    languages = Languages() if languages is None else languages
    sides = [path for path in paths if not has_rows(path) and path.suffix.lower() not in _WHOLE]
    if len(sides) % 2:
        raise InputError(
            f"data file {sides[-1]} has one side of a translation; give the file with the other after it, or "
            f"one kind of {FORM}"
        )
    whole = (_of_file(path, languages) for path in paths if path not in sides)
    couples = zip(sides[::2], sides[1::2], strict=True)
    is_any = False
    for pair in chain.from_iterable((*whole, *(_in_step(source, target) for source, target in couples))):
        is_any = True
        yield pair
    if not is_any:
        raise InputError(f"{', '.join(map(str, paths))}: nothing in it is translated; give {FORM}")


@dataclass(slots=True)
class Languages:
    """From which language to which the lines read so far name; () for none yet.

    are_given: whether names are those of the training data, whose direction held-out ones take.
    """

    names: tuple[str, ...] = ()
    are_given: bool = False

    def told(self, path: Path, names: tuple[str, ...]) -> tuple[str, ...]:
        """Take the languages of a file; return them in the direction that it is read in.

        Raises: InputError if those of another file, or of the training data, are others.
        """
        if self.are_given:
            if set(names) != set(self.names):
                raise InputError(
                    f"{path} is from {' to '.join(names)}, and the training data from "
                    f"{' to '.join(self.names)}; give held-out translations between these"
                )
            return self.names
        if self.names and names != self.names:
            raise InputError(
                f"{path} is from {' to '.join(names)}, another file from {' to '.join(self.names)}; "
                "write the languages of each line in one order"
            )
        self.names = names
        return names


def _of_file(path: Path, languages: Languages) -> Iterator[Pair]:
    """Yield the pairs of a file that holds both sides."""
    if has_rows(path):
        return _of_lines(path, languages)
    return _of_columns(path) if path.suffix.lower() == _COLUMNS else _of_catalogue(path)


def _of_lines(path: Path, languages: Languages) -> Iterator[Pair]:
    """Yield the pairs of JSON lines, whose first one with languages says which is the source of all."""
    named: tuple[str, ...] = ()
    for place, data in json_lines(path, FORM):
        if _LANGUAGES in data:
            texts = data[_LANGUAGES]
            if not isinstance(texts, dict) or len(texts) != 2:
                raise InputError(f'{place}: "{_LANGUAGES}" is {shown(texts)}; give texts in two languages')
            if not named:
                named = languages.told(path, tuple(texts))
            (first, second), given = named, texts
        else:
            first, second, given = _SOURCE, _TARGET, data
        if missing := [key for key in (first, second) if key not in given]:
            raise InputError(f'{place}: has {shown(list(given))} and no "{missing[0]}"; give {FORM}')
        yield _pair(text_of(given, first, place), text_of(given, second, place), place)


def _pair(source: str, target: str, place: str) -> Pair:
    if not source.strip() or not target.strip():
        raise InputError(f"{place}: one of the two texts is empty; give both, or leave the line out")
    return source, target


def _of_catalogue(path: Path) -> Iterator[Pair]:
    """Yield what a gettext catalogue translates.

    Entries that are fuzzy, obsolete or not translated are left out. Of one with a plural the singular and,
    where the language has two forms, the plural are pairs; of more forms none is that of English.
    """
    read_file(path)
    yield from _messages(path)


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


def _of_columns(path: Path) -> Iterator[Pair]:
    for number, line in enumerate(read_lines(path), start=1):
        if not line.strip():
            continue
        place, columns = f"data file {path}, line {number}", line.split("\t")
        if len(columns) != 2:
            raise InputError(f"{place}: has {len(columns)} columns; give a text, a tab and its translation")
        yield _pair(columns[0], columns[1], place)


def _in_step(source: Path, target: Path) -> Iterator[Pair]:
    """Yield the lines of two files, of which those that are empty in both are left out."""
    sides = read_lines(source), read_lines(target)
    for number, lines in enumerate(zip_longest(*sides), start=1):
        first, second = lines
        if first is None or second is None:
            counts = [
                number - (line is None) + sum(1 for _ in side)
                for line, side in zip(lines, sides, strict=True)
            ]
            raise InputError(
                f"data file {source} has {counts[0]:,} lines and {target} {counts[1]:,}; give two whose "
                "lines are each other's translation, the source first"
            )
        if first.strip() or second.strip():
            yield _pair(first, second, f"data files {source} and {target}, line {number}")
