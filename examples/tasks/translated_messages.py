"""Write messages of installed packages with their translations, and the folder of a Marian for them.

    pip install Django jupyterlab-language-pack-fr-FR polib
    python examples/tasks/translated_messages.py train.po held-out.po marian-messages

The gettext catalogues of these packages are a parallel corpus: English and, here, French. Messages that read
alike but for what is not a letter are kept together; every twentieth of them is held out.
"""

import sys
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

import polib
from transformers import MarianConfig

PACKAGES = ("Django", "jupyterlab-language-pack-fr-FR")
LANGUAGES = ("fr", "fr_FR")
MOST_CHARACTERS, HELD_OUT = 60, 20
PAD, END = 0, 3
"""Tokens of the vocabularies that hetpipe trains: [PAD] and [SEP]."""


def catalogues(package: str) -> list[Path]:
    """Return the catalogues of a package in the language."""
    try:
        found = files(package) or []
    except PackageNotFoundError:
        sys.exit(f"{package} is not installed, whose catalogues are the data: pip install {package}")
    return sorted(
        Path(str(path.locate()))
        for path in found
        if path.suffix == ".mo" and path.parts[-2] == "LC_MESSAGES" and path.parts[-3] in LANGUAGES
    )


def messages() -> dict[str, str]:
    """Return messages with their translation, the first where there are several."""
    found: dict[str, str] = {}
    for package in PACKAGES:
        for path in catalogues(package):
            for entry in polib.mofile(str(path)).translated_entries():
                if entry.msgstr and len(entry.msgid) <= MOST_CHARACTERS:
                    found.setdefault(entry.msgid, entry.msgstr)
    return found


def main() -> None:
    """Write files and folder."""
    train, held_out, folder = map(Path, sys.argv[1:])
    alike: dict[str, list[polib.POEntry]] = {}
    for source, target in messages().items():
        letters = "".join(character for character in source.casefold() if character.isalpha())
        alike.setdefault(letters, []).append(polib.POEntry(msgid=source, msgstr=target))
    groups = [entries for _, entries in sorted(alike.items())]
    chosen = {
        train: [group for at, group in enumerate(groups) if at % HELD_OUT],
        held_out: groups[::HELD_OUT],
    }
    for path, picked in chosen.items():
        catalogue = polib.POFile()
        catalogue.metadata = {"Content-Type": "text/plain; charset=utf-8", "Language": LANGUAGES[0]}
        catalogue.extend(entry for group in picked for entry in group)
        catalogue.save(str(path))
        print(f"{path}: {len(catalogue):,} messages")
    MarianConfig(
        architectures=["MarianMTModel"], vocab_size=2000, d_model=96, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=192, decoder_ffn_dim=192,
        max_position_embeddings=128, dropout=0.0, scale_embedding=True, pad_token_id=PAD, eos_token_id=END,
        decoder_start_token_id=PAD, forced_eos_token_id=None,
    ).save_pretrained(folder)  # fmt: skip
    print(f"{folder}: a Marian of 2 + 2 blocks")


if __name__ == "__main__":
    main()
