"""Write pieces of Python's own library with the package that each is of, and the folder of a BERT for them.

    python examples/tasks/packages_in_python.py train.jsonl held-out.jsonl bert-packages

A piece is ten lines of a file; every fifth file of a package is held out.
"""

import json
import sys
import sysconfig
from pathlib import Path

from transformers import BertConfig

PACKAGES = ("asyncio", "concurrent", "email", "http", "importlib", "json", "logging", "multiprocessing",
            "sqlite3", "unittest", "urllib", "xml")  # fmt: skip
LINES_A_PIECE = 10


def pieces_of(path: Path) -> list[str]:
    """Return the file in pieces, without lines that are empty."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return ["\n".join(lines[at : at + LINES_A_PIECE]) for at in range(0, len(lines), LINES_A_PIECE)]


def main() -> None:
    """Write files and folder."""
    train, held_out, folder = map(Path, sys.argv[1:])
    rows: dict[bool, list[dict[str, str]]] = {False: [], True: []}
    for package in PACKAGES:
        for at, path in enumerate(sorted((Path(sysconfig.get_path("stdlib")) / package).rglob("*.py"))):
            rows[at % 5 == 2] += [{"text": piece, "label": package} for piece in pieces_of(path)]
    for target, chosen in ((train, rows[False]), (held_out, rows[True])):
        target.write_text("".join(json.dumps(row) + "\n" for row in chosen), encoding="utf-8")
        print(f"{target}: {len(chosen):,} pieces")
    BertConfig(
        architectures=["BertForSequenceClassification"], id2label=dict(enumerate(PACKAGES)), vocab_size=4000,
        hidden_size=96, num_hidden_layers=3, num_attention_heads=4, intermediate_size=192,
        max_position_embeddings=160, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    ).save_pretrained(folder)  # fmt: skip
    print(f"{folder}: a BERT of 3 blocks")


if __name__ == "__main__":
    main()
