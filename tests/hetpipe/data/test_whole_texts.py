"""Tokens of text files are those that the tokenizer gives the whole text, as transformers' does."""

import textwrap
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer

from hetpipe.data import long_texts
from hetpipe.data.dataset import load_ends, load_tokens, write_tokens
from hetpipe.data.long_texts import LongText, pieces_in
from hetpipe.data.special_tokens import tokenizer_config_text

CODE = Path(textwrap.__file__).read_text(encoding="utf-8")[6000:13000]
TEXT = CODE + "\n\n\n" + "  Grüße,\r\n\tsaid she.  \r\n\r\n\r\nAnd\n\n  left \n\n\n \n" * 9
SPECIAL = ["<unk>", "</s>"]
LLAMA_3 = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def spaced(scheme: str) -> pre_tokenizers.Metaspace:
    return pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)


def of_words(change: Callable[[Tokenizer], None]) -> Tokenizer:
    """A BPE whose entries are parts of words with the space before them, as Llama-2's."""
    made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    special = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=special, show_progress=False)
    made.train_from_iterator(CODE.split("\n"), trainer)
    made.pre_tokenizer = None
    change(made)
    return made


def llama_2(made: Tokenizer) -> None:
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])


def metaspace_first(made: Tokenizer) -> None:
    made.pre_tokenizer = spaced("first")


def of_bytes(*before: pre_tokenizers.PreTokenizer, **options: bool) -> Tokenizer:
    """A BPE of bytes that has several ends of lines as one token."""
    made = Tokenizer(models.BPE())
    last = pre_tokenizers.ByteLevel(**options)
    made.pre_tokenizer = pre_tokenizers.Sequence([*before, last]) if before else last
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([TEXT], trainer)
    return made


def word_pieces() -> Tokenizer:
    made = Tokenizer(models.WordPiece(unk_token="<unk>"))
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=SPECIAL, show_progress=False)
    made.train_from_iterator([CODE], trainer)
    return made


TOKENIZERS = {
    "llama-2": lambda: of_words(llama_2),
    "metaspace-first": lambda: of_words(metaspace_first),
    "gpt-2": lambda: of_bytes(add_prefix_space=False),
    "bytes-with-a-space-before": lambda: of_bytes(add_prefix_space=True),
    "llama-3": lambda: of_bytes(
        pre_tokenizers.Split(Regex(LLAMA_3), "isolated"), add_prefix_space=False, use_regex=False
    ),
    "word-pieces": word_pieces,
}


@pytest.mark.parametrize("longest", [1 << 17, 1000, 400], ids=["whole", "pieces", "tiny-pieces"])
@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokens_of_a_text_are_those_of_transformers(tmp_path, monkeypatch, name, longest):
    """A line at a time Llama-2's put a space before each, and GPT-2's never met two ends of lines."""
    vocabulary = TOKENIZERS[name]()
    vocabulary.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(tokenizer_config_text({"eos_token": "</s>"}))
    monkeypatch.setattr(long_texts, "LONGEST_PIECE", longest)
    (tmp_path / "a.txt").write_text(TEXT, newline="")
    texts = ["One.\n", LongText(tmp_path / "a.txt"), "  last\n\nx"]
    end = vocabulary.token_to_id("</s>")
    write_tokens(tmp_path, texts, vocabulary, end)
    tokens = load_tokens(tmp_path, vocabulary)
    ends = load_ends(tmp_path, len(tokens)).tolist()
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text, begin, stop in zip(("One.\n", TEXT, "  last\n\nx"), [0, *ends], ends, strict=False):
        expected = theirs(text, add_special_tokens=False)["input_ids"]
        assert tokens[begin:stop].tolist() == [*expected, end]
    lines = [vocabulary.encode(line, add_special_tokens=False).ids for line in TEXT.splitlines(True)]
    by_lines = list(chain.from_iterable(lines))
    assert (by_lines == tokens[ends[0] : ends[1] - 1].tolist()) == (name == "word-pieces")


def test_a_long_text_is_cut_where_a_line_begins_else_a_word(monkeypatch):
    monkeypatch.setattr(long_texts, "LONGEST_PIECE", 12)
    assert list(pieces_in(["The ship\nsails far away\n\nx"])) == ["The ship\n", "sails far", " away\n\nx"]
    assert list(pieces_in(["x" * 20])) == ["x" * 12, "x" * 8]
    assert list(pieces_in([])) == [""]  # a document of nothing ends, too
