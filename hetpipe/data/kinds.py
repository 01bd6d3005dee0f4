"""The kinds of data, and which of them given files are for a model."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from cost_model.errors import InputError
from cost_model.strict_files import read_json, write_atomically
from hetpipe.data.chats import CHATS
from hetpipe.data.data_file import check_regular, read_file
from hetpipe.data.images import IMAGE_KIND
from hetpipe.data.json_lines import SUFFIX, json_lines, shown
from hetpipe.data.kind import Content, DataKind, Learner, Reading, Samples
from hetpipe.data.labelled_texts import LABELLED_TEXTS
from hetpipe.data.pairs import PAIRS
from hetpipe.data.questions import QUESTIONS
from hetpipe.data.table_files import is_table
from hetpipe.data.tagged_words import TAGGED_WORDS
from hetpipe.data.texts import TEXTS
from hetpipe.data.token_files import TOKEN_FILES

KINDS: tuple[DataKind, ...] = (
    *(CHATS, LABELLED_TEXTS, TAGGED_WORDS, QUESTIONS, IMAGE_KIND),
    *(TOKEN_FILES, TEXTS, PAIRS),
)
"""In the order in which a file is tried: what takes any file comes last."""

DATA_FILE = "data.json"
"""Says of a folder with data which kind they are, and the hash of what was read."""


def kind_of(paths: Sequence[Path], model: Learner) -> DataKind:
    """Return the kind of files; of none the one that brings its own.

    Raises: InputError if they are of several kinds, or of none that the model learns from.
    """
    fitting = [kind for kind in KINDS if model.task in kind.tasks]
    if not paths:
        return next((kind for kind in fitting if kind.is_brought), fitting[0])
    found: dict[str, tuple[Path, DataKind]] = {}
    for path in paths:
        check_regular(path)
        kind = next((kind for kind in fitting if kind.holds(path)), None)
        if kind is None:
            raise InputError(_refusal(path, model, fitting))
        found.setdefault(kind.name, (path, kind))
    if len(found) > 1:
        (first, kind), (other, another) = list(found.values())[:2]
        raise InputError(f"{first} holds {kind.name} and {other} {another.name}; give one kind in a run")
    return next(iter(found.values()))[1]


def read_data(paths: Sequence[Path | str], model: Learner) -> tuple[DataKind, Content]:
    """Return the kind of files and what they hold; of no files, the data that hetpipe brings.

    Raises: InputError if they cannot be used for the model.
    """
    places = [Path(path) for path in paths]
    kind = kind_of(places, model)
    return kind, kind.read(places, model)


def check_given(paths: Sequence[Path | str], model: Learner) -> None:
    """Check that there is something to train on.

    Raises: InputError if no files are given, and hetpipe brings none.
    """
    if not paths and not (kind := kind_of([], model)).is_brought:
        raise InputError(f"{model.name} learns {model.task}; give --data: {kind.form}")


def check_packed(paths: Sequence[Path | str], model: Learner) -> None:
    """Check that samples of files can share a row.

    Raises: InputError if they cannot.
    """
    kind = kind_of([Path(path) for path in paths], model)
    if not kind.packs:
        others = " and ".join(each.name for each in KINDS if each.packs)
        raise InputError(f"--pack is for {others}, and {paths[0]} holds {kind.name}; leave it out")


def check_grouped(paths: Sequence[Path | str], model: Learner) -> None:
    """Check that samples of files are of unlike lengths.

    Raises: InputError if they are not.
    """
    kind = kind_of([Path(path) for path in paths], model)
    if not kind.fills:
        others = ", ".join(each.name for each in KINDS if each.fills)
        what = paths[0] if paths else "the reference manual"
        raise InputError(
            f"--group-by-length is for {others}; samples of {what} ({kind.name}) are all as long; "
            "leave it out"
        )


def held_bytes(paths: Sequence[Path | str], model: Learner) -> int:
    """Return the bytes of files that are held whole while they are read; 0 of kinds that are read in pieces.

    Raises: InputError as `kind_of`.
    """
    places = [Path(path) for path in paths]
    if not kind_of(places, model).is_held:
        return 0
    return sum(path.stat().st_size for path in places if path.is_file())


def write_data(place: Path, kind: DataKind, content: Content, reading: Reading) -> list[str]:
    """Write data into a folder, `data.json` last; return what a user should know.

    Raises: InputError if they cannot be written for this model.
    """
    place.mkdir(parents=True, exist_ok=True)
    (place / DATA_FILE).unlink(missing_ok=True)  # it never stands beside data of another kind
    told = content.write(place, reading)
    write_atomically(place / DATA_FILE, json.dumps({"kind": kind.name, "sha256": content.sha256}) + "\n")
    return told


def load_data(place: Path, reading: Reading) -> Samples:
    """Return the samples that `write_data` wrote.

    Raises: InputError if they cannot be read, or there is none.
    """
    return _kind_in(place).load(place, reading)


def data_sha256(place: Path) -> str:
    """Return the hash of what the data in a folder were read from."""
    return str(_header(place)["sha256"])


def written_sha256(place: Path) -> str:
    """Return the hash of the files with the data in a folder."""
    found = hashlib.sha256()
    for name in _kind_in(place).files:
        with (place / name).open("rb") as file:
            while block := file.read(1 << 20):
                found.update(block)
    return found.hexdigest()


def _kind_in(place: Path) -> DataKind:
    name = _header(place)["kind"]
    return next(kind for kind in KINDS if kind.name == name)


def _header(place: Path) -> dict[str, str]:
    data = read_json(place / DATA_FILE)
    if not isinstance(data, dict) or data.get("kind") not in {kind.name for kind in KINDS}:
        raise InputError(f"{place / DATA_FILE}: names no kind of data; train into a new folder")
    return data


def _refusal(path: Path, model: Learner, fitting: Sequence[DataKind]) -> str:
    """Return why a file is none of the fitting kinds.

    Raises: InputError if it cannot be read, or is of no kind at all.
    """
    if not path.is_file() or not is_table(path):
        read_file(path)
    forms = " or ".join(kind.form for kind in fitting)
    other = next((kind for kind in KINDS if kind not in fitting and kind.holds(path)), None)
    if other is None:
        place, data = next(json_lines(path, forms))  # which other kinds leave to no one
        called = f"call it {SUFFIX} if each line is an object, or " if path.suffix.lower() == ".json" else ""
        return f"{place}: has {shown(sorted(data))}; {called}give {forms}"
    tasks = " or ".join(other.tasks)
    return (
        f"{path} holds {other.name}, and {model.name} learns {model.task}; give {forms}, or a model for "
        f"{tasks}"
    )
