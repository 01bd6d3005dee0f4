"""Write the words of Python's own library, each tagged with what it is, and the folder of a BERT for them.

    python examples/tasks/names_in_python.py train.jsonl held-out.jsonl bert-names

Each name is a function, a class, a parameter, an attribute, a module or something else (by `ast`); what is no
name is tagged "O". A line is a logical line of the source; every tenth file is held out.
"""

import ast
import io
import json
import keyword
import sys
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path

from transformers import BertConfig

TAGS = ("O", "function", "class", "parameter", "attribute", "module", "name")
NUM_FILES, MOST_WORDS = 100, 60


def kinds_in(tree: ast.AST) -> dict[tuple[int, int], str]:
    """Return the kind of names by (line, column); those after `def`, `class` and `from` have no column."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found[node.lineno, -1] = "function"
        elif isinstance(node, ast.ClassDef):
            found[node.lineno, -1] = "class"
        elif isinstance(node, ast.arg):
            found[node.lineno, node.col_offset] = "parameter"
        elif isinstance(node, ast.Attribute) and node.end_lineno is not None:
            found[node.end_lineno, (node.end_col_offset or 0) - len(node.attr)] = "attribute"
        elif isinstance(node, ast.Import):
            for name in node.names:
                found[name.lineno, name.col_offset] = "module"
        elif isinstance(node, ast.ImportFrom):
            found[node.lineno, -2] = "module"
    return found


def lines_of(path: Path) -> Iterator[dict[str, list[str]]]:
    """Yield the logical lines of a file, without comments: words and their tags; of a text its quotes."""
    source = path.read_text(encoding="utf-8")
    kinds = kinds_in(ast.parse(source))
    words: list[str] = []
    tags: list[str] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        before = words[-1] if words else ""
        if token.type in (tokenize.NUMBER, tokenize.OP):
            words, tags = [*words, token.string], [*tags, "O"]
        elif token.type == tokenize.STRING:
            words, tags = [*words, "''"], [*tags, "O"]
        elif token.type == tokenize.NAME:
            line, column = token.start
            special = {"def": -1, "class": -1, "from": -2}.get(before)
            kind = kinds.get((line, column if special is None else special), "name")
            words, tags = [*words, token.string], [*tags, "O" if keyword.iskeyword(token.string) else kind]
        elif token.type == tokenize.NEWLINE:
            if 3 <= len(words) <= MOST_WORDS:
                yield {"tokens": words, "tags": tags}
            words, tags = [], []


def main() -> None:
    """Write files and folder."""
    train, held_out, folder = map(Path, sys.argv[1:])
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:NUM_FILES]
    for target, chosen in (
        (train, [path for at, path in enumerate(paths) if at % 10]),
        (held_out, paths[::10]),
    ):
        rows = [row for path in chosen for row in lines_of(path)]
        target.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        print(f"{target}: {len(rows):,} lines of {len(chosen)} files")
    BertConfig(
        architectures=["BertForTokenClassification"], id2label=dict(enumerate(TAGS)), vocab_size=2000,
        hidden_size=96, num_hidden_layers=4, num_attention_heads=4, intermediate_size=192,
        max_position_embeddings=128, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    ).save_pretrained(folder)  # fmt: skip
    print(f"{folder}: a BERT of 4 blocks")


if __name__ == "__main__":
    main()
