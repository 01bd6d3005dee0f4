"""Write chats about Python's own library: what a function does, answered by the first lines of its docstring.

    python examples/tasks/python_chats.py train.jsonl held-out.jsonl

Every tenth function is held out.
"""

import importlib
import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path

MODULES = (
    "builtins", "collections", "datetime", "decimal", "fractions", "functools", "heapq", "itertools", "json",
    "math", "os", "os.path", "pathlib", "random", "re", "shutil", "statistics", "string", "textwrap", "time",
)  # fmt: skip
MOST_CHARACTERS = 300


def documented(module: object, name: str, seen: set[str]) -> Iterator[tuple[str, str]]:
    """Yield the public functions and methods with their first paragraph, each text once."""
    for key, value in sorted(vars(module).items()):
        if key.startswith("_") or not (callable(value) or inspect.ismethoddescriptor(value)):
            continue
        text = " ".join((inspect.getdoc(value) or "").partition("\n\n")[0].split())
        if 20 < len(text) <= MOST_CHARACTERS and text not in seen:
            seen.add(text)
            yield f"{name}{key}", text
        if inspect.isclass(value) and not issubclass(value, BaseException):
            yield from documented(value, f"{name}{key}.", seen)


def main() -> None:
    """Write both files."""
    seen: set[str] = set()
    chats = [
        {
            "messages": [
                {"role": "user", "content": f"What does {function} do?"},
                {"role": "assistant", "content": text},
            ]
        }
        for name in MODULES
        for function, text in documented(
            importlib.import_module(name), "" if name == "builtins" else f"{name}.", seen
        )
    ]
    train, held_out = map(Path, sys.argv[1:])
    for path, part in (
        (train, [chat for index, chat in enumerate(chats) if index % 10]),
        (held_out, chats[::10]),
    ):
        path.write_text("".join(json.dumps(chat) + "\n" for chat in part), encoding="utf-8")
        print(f"{path}: {len(part)} chats")


if __name__ == "__main__":
    main()
