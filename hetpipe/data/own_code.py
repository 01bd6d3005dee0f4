"""What the times of a user's own model depend on: its modules, and the code that they are made of."""

import functools
import hashlib
import json
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from torch import nn

from hetpipe.data.main_module import MAIN, Seen, codes_of, file_of, held_by, seen_in_main

_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib")})
_OURS = ("hetpipe", "partition", "cost_model")


def own_code_sha256(model: nn.Module, *functions: object) -> str:
    """Return the hash of a model as it computes, and of functions that compute beside it, as a loss.

    Of the model: the names, classes and plain attributes of its modules, and its parameters but for their
    values. Of the code: the files that define them, with those that these import, but for what is installed,
    whose versions are known; of a notebook, which is in no file, the functions and classes, and the globals
    that they see.
    """
    described = [_module(model), *map(_described, functions)]
    starts = [*(type(module) for module in model.modules()), *map(_code_of, functions)]
    code = hashlib.sha256(json.dumps(described).encode())
    homes = dict.fromkeys(str(getattr(start, "__module__", None)) for start in starts)
    if file_of(MAIN) is None:
        code.update(json.dumps(_of_main(seen_in_main(starts))).encode())
    for path in sorted(_own_files(list(homes))):
        code.update(path.read_bytes())
    return code.hexdigest()


def _of_main(seen: Seen) -> Any:
    """Return what code of a notebook does as JSON, the same when its cell is run again."""
    codes = [code for start in seen.code for code in codes_of(start)]
    held = [held_by(start) for start in seen.code]
    steps = [[code.co_code.hex(), code.co_names, code.co_varnames] for code in codes]
    constants = [each for code in codes for each in code.co_consts if not isinstance(each, CodeType)]
    return [steps, _described(constants), _described(held), _described(seen.values)]


def _module(model: nn.Module) -> list[Any]:
    modules = [
        [name, type(module).__qualname__, {key: _described(value) for key, value in _plain(module).items()}]
        for name, module in model.named_modules()
    ]
    parameters = [
        [name, str(value.dtype), list(value.shape), value.requires_grad]
        for name, value in model.named_parameters(remove_duplicate=False)
    ]
    return [modules, parameters]


def _plain(module: nn.Module) -> Mapping[str, Any]:
    return {key: value for key, value in vars(module).items() if not key.startswith("_")}


def _described(value: object) -> Any:
    """Return a value as JSON, of what is no number or text its type or its name."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_described(each) for each in value]
    if isinstance(value, Mapping):
        return {str(key): _described(each) for key, each in value.items()}
    if isinstance(value, functools.partial):
        return [_described(value.func), _described(value.args), _described(value.keywords)]
    if isinstance(value, nn.Module):
        return _module(value)
    if hasattr(value, "to_json_string"):  # a configuration of transformers
        return value.to_json_string()
    return getattr(value, "__qualname__", type(value).__qualname__)


def _code_of(value: object) -> Any:
    """Return the class or function that a value computes by."""
    while isinstance(value, functools.partial):
        value = value.func
    return value if isinstance(value, type) or hasattr(value, "__code__") else type(value)


def _own_files(homes: list[str]) -> set[Path]:
    """Return the files of modules and, of those that are the user's, of what they import."""
    found: dict[str, Path] = {}
    while homes:
        home = homes.pop()
        path = file_of(home)
        if home in found or path is None or not _is_own(home, path):
            continue
        found[home] = path
        for value in list(vars(sys.modules[home]).values()):
            named = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
            if isinstance(named, str):
                homes.append(named)
    return set(found.values())


def _is_own(home: str, path: Path) -> bool:
    if home.partition(".")[0] in _OURS or {"site-packages", "dist-packages"} & set(path.parts):
        return False
    return not any(path.is_relative_to(place) for place in _INSTALLED)
