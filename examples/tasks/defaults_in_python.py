"""Write questions for the default values in signatures of Python's own library, and the folder of a BERT.

    python examples/tasks/defaults_in_python.py train.jsonl held-out.jsonl bert-defaults

The context is a signature, the question the name of one of its parameters, the answer its default value;
every tenth file is held out.
"""

import ast
import json
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from transformers import BertConfig

NUM_FILES, LONGEST = 150, 120


def questions_in(path: Path) -> Iterator[dict[str, object]]:
    """Yield the questions of a file, in the form of SQuAD."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.FunctionDef):
            continue
        given = node.args
        by_place = [*given.posonlyargs, *given.args]
        pairs = [*zip(by_place[len(by_place) - len(given.defaults) :], given.defaults, strict=True)]
        pairs += [
            (name, value) for name, value in zip(given.kwonlyargs, given.kw_defaults, strict=True) if value
        ]
        context = f"{node.name}({ast.unparse(given)})"
        if len(pairs) < 2 or len(context) > LONGEST:
            continue
        for name, value in pairs:
            answer = ast.unparse(value)
            found = re.search(rf"[( ]{name.arg}=({re.escape(answer)})", context)
            if found:
                answers = [{"text": answer, "answer_start": found.start(1)}]
                yield {"context": context, "question": name.arg, "answers": answers}


def main() -> None:
    """Write files and folder."""
    train, held_out, folder = map(Path, sys.argv[1:])
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:NUM_FILES]
    for target, chosen in (
        (train, [path for at, path in enumerate(paths) if at % 10]),
        (held_out, paths[::10]),
    ):
        rows = [row for path in chosen for row in questions_in(path)]
        target.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        print(f"{target}: {len(rows):,} questions of {len(chosen)} files")
    BertConfig(
        architectures=["BertForQuestionAnswering"], vocab_size=600,
        hidden_size=96, num_hidden_layers=4, num_attention_heads=4, intermediate_size=192,
        max_position_embeddings=96, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    ).save_pretrained(folder)  # fmt: skip
    print(f"{folder}: a BERT of 4 blocks")


if __name__ == "__main__":
    main()
