"""Structured mutations of the texts that readers read, and what a reader may answer to them."""

import json
import random
import resource
import time
import tomllib
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

from cost_model.errors import InfeasibleError, InputError

ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 10**18, 10**400, -(10**30), 0.0, -0.0, 1e-320, 1e308, -1.5,
    float("nan"), float("inf"), "", "x", "0", "-1 GiB", "1e400 GiB", "1e9999999 GiB", "1e-999999999 s", "NaN",
    "../x", "/dev/zero", "\x1b[31m", "\ud800".encode("utf-8", "surrogatepass").decode("utf-8", "replace"),
    "a" * 5000, [], {}, [[]], {"": 0}, [0] * 300, {"format": 1},
)  # fmt: skip
"""Values to put in the place of others."""

MOST_S, MOST_BYTES = 20.0, 1 << 30
"""What reading one mutation may take: generous, since hosts are busy."""


def mutations(valid: Any, seed: int, count: int, text_of: Callable[[Any], str]) -> Iterator[bytes]:
    """Give mutated texts of a tree: nine in ten with changed values, the others with changed bytes."""
    draw = random.Random(seed)
    text = text_of(valid).encode()
    for _ in range(count):
        if draw.random() < 0.1:
            yield _bytes_changed(text, draw)
            continue
        tree = json.loads(json.dumps(valid))
        for _ in range(draw.choice((1, 1, 1, 2, 4))):
            _change(tree, draw)
        yield text_of(tree).encode("utf-8", "replace")


def _places(tree: Any) -> list[tuple[Any, Any]]:
    """Return each place of a tree: its list or object, and its index or key there."""
    if isinstance(tree, dict):
        pairs = list(tree.items())
    else:
        pairs = list(enumerate(tree)) if isinstance(tree, list) else []
    return [(tree, key) for key, _ in pairs] + [place for _, value in pairs for place in _places(value)]


def _change(tree: Any, draw: random.Random) -> None:
    places = _places(tree)
    if not places:
        return
    holder, key = draw.choice(places)
    match draw.randrange(6):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[draw.choice(("x", "", str(key) + "s", "format"))] = holder.pop(key)
        case 1:
            holder.insert(key, json.loads(json.dumps(holder[key])))
        case 2:
            other, there = draw.choice(places)
            holder[key] = json.loads(json.dumps(other[there]))
        case 3 if isinstance(holder[key], int | float) and not isinstance(holder[key], bool):
            holder[key] = holder[key] * draw.choice((-1, 0, 2, 10**9)) + draw.choice((0, 1, -1))
        case _:
            holder[key] = deepcopy(draw.choice(ODD))


def _bytes_changed(text: bytes, draw: random.Random) -> bytes:
    changed = bytearray(text)
    for _ in range(draw.randint(1, 4)):
        place = draw.randrange(len(changed))
        match draw.randrange(3):
            case 0:
                changed[place] ^= 1 << draw.randrange(8)
            case 1:
                del changed[place : place + draw.randint(1, 40)]
            case _:
                changed[place:place] = changed[: draw.randint(1, 60)]
        if not changed:
            return bytes(changed)
    return bytes(changed)


def toml_text(tree: Any) -> str:
    """Return the TOML of an object of plain values: objects and lists inline."""
    return "".join(f"{json.dumps(str(key))} = {_toml_value(value)}\n" for key, value in tree.items())


def _toml_value(value: Any) -> str:
    match value:
        case dict():
            return "{" + ", ".join(f"{json.dumps(str(k))} = {_toml_value(v)}" for k, v in value.items()) + "}"
        case list():
            return "[" + ", ".join(map(_toml_value, value)) + "]"
        case None:
            return "{}"
        case float():
            return repr(value)
    return json.dumps(value)


def survive(read: Callable[[], object], what: bytes) -> bool:
    """Check that a reader gives a value, or an error of one short line; return whether a value."""
    begin_s, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    is_value = True
    try:
        read()
    except (InputError, InfeasibleError) as error:
        is_value = False
        text = str(error)
        assert text and "\n" not in text and "\x1b" not in text and len(text) < 4000, (what, text[:4000])
    except BaseException as error:
        raise AssertionError(f"{type(error).__name__}: {error}"[:300], what[:3000]) from error
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert time.monotonic() - begin_s < MOST_S, what[:3000]
    assert grown < MOST_BYTES, what[:3000]
    return is_value


def toml_tree(text: str) -> Any:
    """Return the tree of a TOML text."""
    return tomllib.loads(text)
