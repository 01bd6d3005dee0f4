"""What tests make of the same texts over and over: vocabularies and tokens, each once in a process."""

from collections.abc import Callable, Iterable
from pathlib import Path

from tokenizers import Tokenizer

from hetpipe.data.dataset import ENDS_FILE, TOKENS_FILE, TOKENS_HEADER, replacing
from hetpipe.data.long_texts import Document
from hetpipe.data.vocabulary import texts_sha256

Train = Callable[[Iterable[Document], int], Tokenizer]
Write = Callable[[Path, Iterable[Document], Tokenizer, int], None]


def trained_once(train: Train) -> Train:
    """Return what trains as it does, and of texts that are held, and were trained on before, gives a copy."""
    trained: dict[tuple[str, int], str] = {}

    def train_vocabulary(documents: Iterable[Document], size: int) -> Tokenizer:
        if not isinstance(documents, list):
            return train(documents, size)
        key = texts_sha256(documents), size
        if key not in trained:
            trained[key] = train(documents, size).to_str()
        found = Tokenizer.from_str(trained[key])
        found.encode_special_tokens = True  # which is not saved
        return found

    return train_vocabulary


def split_once(write: Write) -> Write:
    """Return what writes tokens as it does, and those of texts that are held and were split before again."""
    written: dict[tuple[str, str, int], dict[str, bytes]] = {}

    def write_tokens(
        folder: Path, documents: Iterable[Document], vocabulary: Tokenizer, separator: int
    ) -> None:
        if not isinstance(documents, list):
            write(folder, documents, vocabulary, separator)
            return
        key = texts_sha256(documents), vocabulary.to_str(), separator
        if key not in written:
            write(folder, documents, vocabulary, separator)
            names = ENDS_FILE, TOKENS_FILE, TOKENS_HEADER
            written[key] = {name: (folder / name).read_bytes() for name in names}
            return
        (folder / TOKENS_HEADER).unlink(missing_ok=True)
        for name, content in written[key].items():
            with replacing(folder / name) as file:
                file.write(content)

    return write_tokens
