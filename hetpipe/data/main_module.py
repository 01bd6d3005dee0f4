"""What code of the main module, a script or a notebook, sees there: its globals, by name."""

import ast
import dis
import io
import pickle
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import _lru_cache_wrapper, cached_property
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
from torch import Tensor

MAIN = "__main__"
LARGEST_BYTES = 1 << 24
"""Of a global that is sent to the ranks; what is larger, as data are, each rank makes by itself."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What functions and classes of the main module reach there.

    code: these and the ones that they use. values: all of its globals that they name, but for modules.
    """

    code: list[Any]
    values: dict[str, object]


def seen_in_main(starts: Iterable[object]) -> Seen:
    """Return what is reached from functions and classes; those of other modules reach nothing here."""
    there, found = vars(sys.modules[MAIN]), Seen([], {})
    waiting = [start for start in starts if _is_of_main(start)]
    while waiting:
        start = waiting.pop(0)
        if any(start is each for each in found.code):
            continue
        found.code.append(start)
        for name in [name for code in codes_of(start) for name in _globals_of(code)]:
            value = there.get(name, sys)
            if name not in found.values and not isinstance(value, ModuleType):
                found.values[name] = value
                waiting += pickled(value)[1]
        for value in held_by(start):
            waiting += pickled(value)[1]
        if isinstance(start, type):
            waiting += [base for base in start.__mro__ if _is_of_main(base)]
    return found


def pickled(value: object, largest: int | None = None) -> tuple[bytes | None, list[object]]:
    """Return the bytes of a value, and the functions and classes of the main module that it holds.

    largest: bytes, `LARGEST_BYTES` if not given. Returns: None for what cannot be pickled or is larger, with
    what was found up to there.
    """
    file = _Limited(LARGEST_BYTES if largest is None else largest)
    pickler = _Listing(file)
    try:
        pickler.dump(value)
    except Exception:  # what objects of somebody else raise is of many kinds
        return None, pickler.of_main
    return file.getvalue(), pickler.of_main


def codes_of(value: Any) -> Iterator[CodeType]:
    """Yield the code of a function, or of the methods of a class, with what is defined inside."""
    waiting = [function.__code__ for function in _functions_of(value)]
    while waiting:
        code = waiting.pop()
        yield code
        waiting += [each for each in code.co_consts if isinstance(each, CodeType)]


def held_by(value: Any) -> list[object]:
    """Return what functions, or those of a class, have from where they are defined, and what a class has."""
    found = [*attributes_of(value).values()]
    for function in _functions_of(value):
        found += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # an empty one
                found.append(cell.cell_contents)
    return found


def attributes_of(value: Any) -> dict[str, object]:
    """Return the attributes of a class that may be set, which are no methods; none of an enumeration."""
    if not isinstance(value, type) or issubclass(value, Enum):
        return {}
    return {
        name: each
        for name, each in vars(value).items()
        if not name.startswith("__") and next(_functions_of(each), None) is None
    }


def are_importable(found: Iterable[Any]) -> bool:
    """Return whether another process has functions and classes of the main module, which it imports anew.

    It has none of a notebook or of stdin, and none that a script defines under `if __name__ == "__main__":`.
    """
    own = {each.__qualname__.partition(".")[0] for each in found}
    script = file_of(MAIN)
    return not own or (script is not None and not own & _under_the_guard(script))


def globals_for_ranks(starts: Iterable[object]) -> bytes:
    """Return, pickled, the globals of a script that its functions and classes see, as they are now.

    A rank imports the script anew, and so has those that are set under `if __name__ == "__main__":` as they
    were before, or not at all; and attributes of its classes likewise. What cannot be pickled or is too large
    is left out.
    """
    seen = seen_in_main(starts)
    own = [(each, _sendable(attributes_of(each))) for each in seen.code if pickled(each)[0] is not None]
    return pickle.dumps((_sendable(seen.values), [pair for pair in own if pair[1]]))


def set_globals(packed: bytes) -> None:
    """Let the main module of this process have the globals of the one that sent them.

    NOTE: multiprocessing imports a script by runpy, and so the globals of its functions are others than those
    of the module, which has copies.
    """
    values, own = pickle.loads(packed)
    there = vars(sys.modules[MAIN])
    functions = [each for value in there.values() for each in (*_functions_of(value), *held_by(value))]
    for seen in (there, *(getattr(function, "__globals__", {}) for function in functions)):
        if seen.get("__name__") in (MAIN, "__mp_main__"):
            seen.update(values)
    for each, attributes in own:
        for name, value in attributes.items():
            setattr(each, name, value)


def _sendable(values: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in values.items() if pickled(value)[0] is not None}


def file_of(module: str) -> Path | None:
    """Return the file of a loaded module, None if it is in none, as a notebook or what stdin gave."""
    path = getattr(sys.modules.get(module), "__file__", None)
    return Path(path).resolve() if isinstance(path, str) and Path(path).is_file() else None


def _under_the_guard(script: Path) -> set[str]:
    """Return the names of what a script defines under its guard, if its text can be read."""
    try:
        text = ast.parse(script.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return set()
    ifs = [each for each in text.body if isinstance(each, ast.If)]
    guarded = [part for each in ifs if "__name__" in ast.unparse(each.test) for part in each.body]
    inside = [each for part in guarded for each in ast.walk(part)]
    return {each.name for each in inside if isinstance(each, ast.FunctionDef | ast.ClassDef)}


class _Listing(pickle.Pickler):
    def __init__(self, file: "_Limited") -> None:
        super().__init__(file)
        self.of_main: list[object] = []
        self._largest = file.largest

    def persistent_id(self, value: object) -> None:
        if _is_of_main(value):
            self.of_main.append(value)
        elif isinstance(value, Tensor | np.ndarray) and value.nbytes > self._largest:
            raise OverflowError  # before it is copied


class _Limited(io.BytesIO):
    def __init__(self, largest: int) -> None:
        super().__init__()
        self.largest = largest

    def write(self, data: Any) -> int:
        if self.tell() + memoryview(data).nbytes > self.largest:
            raise OverflowError
        return super().write(data)


def _is_of_main(value: object) -> bool:
    return (isinstance(value, type) or _has_code(value)) and getattr(value, "__module__", None) == MAIN


def _has_code(value: object) -> bool:
    return isinstance(value, FunctionType | _lru_cache_wrapper)


def _functions_of(value: Any) -> Iterator[Any]:
    for member in vars(value).values() if isinstance(value, type) else (value,):
        match member:
            case FunctionType():
                yield member
            case staticmethod() | classmethod() | _lru_cache_wrapper():
                yield from _functions_of(member.__wrapped__)
            case property():
                yield from filter(_has_code, (member.fget, member.fset, member.fdel))
            case cached_property():
                yield member.func


def _globals_of(code: CodeType) -> list[str]:
    reading = ("LOAD_GLOBAL", "LOAD_NAME")
    return list(dict.fromkeys(each.argval for each in dis.get_instructions(code) if each.opname in reading))
