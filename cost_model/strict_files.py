"""Strict reading of files: a wrong key or value becomes one line that names file, key, value and remedy."""

import difflib
import hashlib
import json
import os
import re
import secrets
import tomllib
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from cost_model.errors import InputError
from cost_model.plain_numbers import plain

T = TypeVar("T")

STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
MAX_FILE_BYTES = 256 * 2**20
MAX_TOML_BYTES = 16 * 2**20
"""People write TOML by hand, and it is read more slowly than JSON."""
_PIECE_BYTES = 2**20
LINE = 100
"""Columns of a line in a file that people read and edit."""
LONGEST_LIST = 200_000
LONGEST_SHOWN, LONGEST_TEXT = 60, 4096
_CONTROL = re.compile("[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f]")
"""What a terminal may take for a command, all but tab and the end of a line."""
_DOTTED = re.compile(r"^(?:[^\n.#=,]{0,60}\.){100}", re.MULTILINE)
"""A key of so many parts, which the parser would take time and memory for that grow as their square."""
_UNKNOWN_KEY = ("extra_forbidden", "unexpected_keyword_argument")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a question naming the nearest of the known words, else the list of all of them.

    >>> did_you_mean("bandwith", ["bandwidth", "latency"])
    'did you mean "bandwidth"?'
    """
    names = [name[:LONGEST_SHOWN] for name in known]
    near = difflib.get_close_matches(word, names, n=1)
    return f'did you mean "{near[0]}"?' if near else f"known: {', '.join(names)}"


def read_text(path: Path, most_bytes: int = MAX_FILE_BYTES, *, pipe: bool = False) -> str:
    """Read a UTF-8 file of at most so many bytes; InputError where there is none.

    pipe: whether it may be a pipe or a device, which is waited for and can be read once.
    """
    try:
        if not pipe and path.exists() and not path.is_file() and not path.is_dir():
            raise InputError(
                f"{path}: is a pipe or a device, which cannot be read more than once; write its content to a "
                "file"
            )
        content = bytearray()
        with open(path, "rb") as file:  # NOTE: the size of a device or a pipe says nothing
            while len(content) <= most_bytes and (piece := file.read(_PIECE_BYTES)):
                content += piece
        if len(content) > most_bytes:
            raise InputError(f"{path}: larger than {most_bytes:,} bytes; is it the right file?")
        text = content.decode("utf-8").removeprefix("\ufeff")  # the mark that some editors put before a text
        return text.replace("\r\n", "\n").replace("\r", "\n")
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None


def read_json(path: Path) -> Any:
    """Return the data of a JSON file.

    Raises: InputError if it cannot be read, is not JSON, or has a key twice with unlike values.
    """
    text = read_text(path)
    try:
        return json.loads(text, object_pairs_hook=each_once)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    except json.JSONDecodeError as error:
        raise InputError(f"{path}: not JSON ({error.msg}, line {error.lineno})") from None
    except RecursionError:
        raise InputError(f"{path}: nested too deeply; is it the right file?") from None
    except ValueError:
        raise InputError(f"{path}: holds a number of thousands of digits; is it the right file?") from None


def each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON; of a key with several values the parser would take the last, unsaid.

    Raises: InputError naming the key whose values are unlike.
    """
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    counts = Counter(key for key, _ in pairs)
    first: dict[str, str] = {}
    for key, value in pairs:
        if counts[key] > 1:
            text = json.dumps(value, sort_keys=True)
            if first.setdefault(key, text) != text:
                raise InputError(f"key {key[:LONGEST_SHOWN]!r} is there twice; leave one of them out")
    return found  # each time the same, as in some configurations that are published


def read_toml(path: Path) -> Any:
    """Return the data of a TOML file.

    Raises: InputError if it cannot be read or is not TOML; says where.
    """
    text = read_text(path, MAX_TOML_BYTES)
    if _DOTTED.search(text):
        raise InputError(f"{path}: nested too deeply; is it the right file?")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path}: not TOML ({error})") from None
    except RecursionError:
        raise InputError(f"{path}: nested too deeply; is it the right file?") from None
    except InputError:
        raise
    except ValueError:
        raise InputError(f"{path}: holds a number of thousands of digits; is it the right file?") from None


def write_atomically(path: Path, text: str) -> None:
    """Write a whole file or nothing: a reader never meets half of it.

    Nobody knows the name that it has meanwhile, so that no link can lie there.

    Raises: OSError if it cannot be written; it names the file itself, not the name of meanwhile.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with suppress(OSError):  # on a disk that cannot be written nothing can be removed
            temporary.unlink()
        if isinstance(error, OSError):
            error.filename, error.filename2 = str(path), None
        raise


def json_text(data: object) -> str:
    """Return JSON for people: what fits into a line of `LINE` columns is in one, all else indented by one.

    >>> print(json_text({"devices": ["big/0"], "layers": [0, 5]}), end="")
    {"devices": ["big/0"], "layers": [0, 5]}
    """
    return _laid_out(data, 0, 0) + "\n"


def _laid_out(data: Any, indent: int, before: int) -> str:
    """Return the text of a value; before: columns of its first line that are taken."""
    line = json.dumps(data)
    if not data or not isinstance(data, dict | list | tuple) or before + len(line) < LINE:
        return line
    if isinstance(data, dict):
        entries = [(f"{json.dumps(key)}: ", value) for key, value in data.items()]
    else:
        entries = [("", value) for value in data]
    inner = indent + 1
    lines = [f"{' ' * inner}{key}{_laid_out(value, inner, inner + len(key))}" for key, value in entries]
    joined = ",\n".join(lines)
    return f"{line[0]}\n{joined}\n{' ' * indent}{line[-1]}"


def canonical_sha256(data: object) -> str:
    """Return a hash of JSON data that does not depend on the order of keys or on white space."""
    return hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def check_format(data: Any, expected: str, source: str) -> dict[str, Any]:
    """Return an object without its "format" key; InputError if it is not of the expected format."""
    if not isinstance(data, dict):
        raise InputError(f"{source}: holds a {type(data).__name__}, not an object of format {expected!r}")
    found = data.get("format")
    if found != expected:
        shown = repr(found)[:LONGEST_SHOWN]
        raise InputError(f"{source}: format is {shown}, this version reads {expected!r}")
    return {key: value for key, value in data.items() if key != "format"}


def validate(adapter: TypeAdapter[T], data: object, source: str) -> T:
    """Return data of a TOML or JSON file as the adapter's type.

    Raises: InputError with file, key, value and remedy of the first mistake.
    """
    try:
        _check_plain(data, source)
    except RecursionError:
        raise InputError(f"{source}: nested too deeply; is it the right file?") from None
    try:
        return adapter.validate_json(json.dumps(data, default=plain), strict=True)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        # a misspelt key is missing under its right name too; name the misspelling
        first = next((mistake for mistake in errors if mistake["type"] in _UNKNOWN_KEY), errors[0])
        raise InputError(f"{source}: {_describe(first, adapter)}") from None


def _check_plain(data: object, source: str) -> None:
    """Check that data has no list that is too long to tell each mistake of it, and no codes for a terminal.

    Raises: InputError naming what it has.
    """
    if isinstance(data, str):
        if len(data) > LONGEST_TEXT:
            raise InputError(f"{source}: has a text of {len(data):,} characters; is it the right file?")
        if found := _CONTROL.search(data):
            raise InputError(f"{source}: the text {data[:LONGEST_SHOWN]!r} holds {found[0]!r}; take it out")
    elif isinstance(data, dict):
        for key, value in data.items():
            _check_plain(key, source)
            _check_plain(value, source)
    elif isinstance(data, list | tuple):
        if len(data) > LONGEST_LIST:
            raise InputError(f"{source}: has a list of {len(data):,} entries; is it the right file?")
        for value in data:
            _check_plain(value, source)


def _describe(error: Any, adapter: TypeAdapter[Any]) -> str:
    location = tuple(error["loc"])
    key = _dotted(location)
    key = key if len(key) <= 2 * LONGEST_SHOWN else f"{key[: 2 * LONGEST_SHOWN]}..."
    kind = error["type"]
    if kind in _UNKNOWN_KEY:
        known = _known_keys(adapter.json_schema(), location[:-1])
        return f'unknown key "{key}"; {did_you_mean(str(location[-1]), known)}'
    if kind in ("missing", "missing_argument"):
        return f'key "{key}" is missing'
    message = str(error["msg"]).removeprefix("Value error, ")
    if kind == "value_error":
        return f"{key}: {message}" if key else message
    found = json.dumps(error["input"], default=str)
    shown = found if len(found) < 60 else found[:57] + "..."
    return f"{f'{key}: ' * bool(key)}{message[0].lower() + message[1:]}, found {shown}"


def _dotted(location: tuple[int | str, ...]) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return text.removeprefix(".")


def _known_keys(schema: dict[str, Any], location: tuple[int | str, ...]) -> list[str]:
    definitions = schema.get("$defs", {})

    def resolve(part: dict[str, Any]) -> dict[str, Any]:
        options = [part, *part.get("anyOf", ())]
        for option in options:
            if "$ref" in option:
                target: dict[str, Any] = definitions[option["$ref"].rsplit("/", 1)[-1]]
                return target
        return next((option for option in options if "properties" in option or "items" in option), part)

    here = resolve(schema)
    for step in location:
        if isinstance(step, int):
            here = resolve(here.get("items", {}))
        else:
            here = resolve(here.get("properties", {}).get(step) or here.get("additionalProperties") or {})
    return list(here.get("properties", {}))
