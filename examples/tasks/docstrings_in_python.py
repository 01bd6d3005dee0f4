"""Write the docstrings of Python's own library, a document a file, for a model that fills in masked words.

    python examples/tasks/docstrings_in_python.py train.jsonl held-out.jsonl

Every tenth file is held out.
"""

import ast
import json
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}


def docstrings(path: Path) -> Iterator[str]:
    """Yield the docstrings of a file in their order."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
            yield text


def main() -> None:
    """Write both files."""
    train, held_out = map(Path, sys.argv[1:])
    library = Path(sysconfig.get_path("stdlib"))
    documents = [
        text
        for path in sorted(library.rglob("*.py"))
        if not LEFT_OUT.intersection(path.relative_to(library).parts)
        and len(text := "\n\n".join(docstrings(path))) > 200
    ]
    for target, part in (
        (train, [text for index, text in enumerate(documents) if index % 10 != 5]),
        (held_out, documents[5::10]),
    ):
        target.write_text("".join(json.dumps({"text": text}) + "\n" for text in part), encoding="utf-8")
        print(f"{target}: {len(part):,} documents, {sum(map(len, part)):,} characters")


if __name__ == "__main__":
    main()
