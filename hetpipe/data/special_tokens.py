"""The special tokens of a vocabulary, and the vocabulary that a model's folder brings."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from cost_model.errors import InputError
from cost_model.strict_files import read_json
from hetpipe.models.huggingface_folder import TOKENIZER_CONFIG_FILE, ModelFolder
from hetpipe.models.tasks import Task

SEPARATORS = ("[SEP]", "</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>")
"""Where a model's folder does not say which token ends a text."""
BEGINNINGS, MASKS = ("[CLS]", "<s>"), ("[MASK]", "<mask>")
MOST_NAMED = 3
_NEVER = "(?!)"
"""A pattern that nothing matches."""
PADDINGS, UNKNOWNS = ("[PAD]", "<pad>"), ("[UNK]", "<unk>")


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """The ids of a vocabulary's special tokens that training needs; all: of every one, rising.

    separator: between documents, and at the end of a masked sequence. cls, mask: None where there are none.
    """

    separator: int
    cls: int | None
    mask: int | None
    all: tuple[int, ...]

    @classmethod
    def of(cls, vocabulary: Tokenizer, end: str | None = None) -> "SpecialTokens":
        """Find the special tokens of a vocabulary by their usual names; end: as `own_end` has found it.

        Raises: InputError if the vocabulary has no token that ends a text.
        """
        separator = _first(vocabulary, SEPARATORS if end is None else (end, *SEPARATORS))
        if separator is None:
            names = ", ".join(SEPARATORS)
            raise InputError(f"the tokenizer has no token that ends a text; add one of {names}")
        added = vocabulary.get_added_tokens_decoder()
        every = {index for index, token in added.items() if token.special}
        found = cls(separator, _first(vocabulary, BEGINNINGS), _first(vocabulary, MASKS), ())
        every |= {index for index in (separator, found.cls, found.mask) if index is not None}
        return replace(found, all=tuple(sorted(every)))


def own_end(vocabulary: Tokenizer, folder: ModelFolder | None, tokenizer_config: Path) -> str | None:
    """Return the token that ends a text as a model's folder says: by its tokenizer, else by its model.

    folder: None if the vocabulary is of no folder. tokenizer_config: the file, of the folder or copied from
    it. None where no token of the vocabulary is named. The end of a masked sequence is asked for first where
    masked words are learned.
    """
    if folder is None:
        return None
    said = _object_in(tokenizer_config)
    for role in ("sep_token", "eos_token") if folder.task == Task.MASKED_LM else ("eos_token",):
        token = said.get(role)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str) and vocabulary.token_to_id(token) is not None:
            return token
    # NOTE: configurations have ids by default, which mean anything in a vocabulary of another's making
    special = {at: token for at, token in vocabulary.get_added_tokens_decoder().items() if token.special}
    for config in (_object_in(folder.path / "generation_config.json"), folder.config):
        index = config.get("eos_token_id")
        index = index[0] if isinstance(index, list) and index else index
        if isinstance(index, int) and index in special:
            return str(special[index].content)
    return None


def cuts_left(tokenizer_config: Path) -> bool:
    """Return whether a tokenizer cuts texts that are too long at their beginning, as its file says."""
    return _object_in(tokenizer_config).get("truncation_side") == "left"


def _object_in(path: Path) -> Mapping[str, Any]:
    content = read_json(path) if path.is_file() else {}
    return content if isinstance(content, dict) else {}


class WrittenOut:
    """Counts the special tokens that texts have in letters, as they go by."""

    def __init__(self, vocabulary: Tokenizer) -> None:
        special = {token.content for token in vocabulary.get_added_tokens_decoder().values() if token.special}
        longest_first = map(re.escape, sorted(special, key=len, reverse=True))
        self._token = re.compile("|".join(longest_first) or _NEVER)
        self._in_text: set[str] = set()
        self._times: Counter[str] = Counter()
        self._texts: Counter[str] = Counter()

    def counting(self, pieces: Iterable[tuple[str, bool]]) -> Iterator[tuple[str, bool]]:
        """Give pieces of texts, of each whether a text begins with it."""
        for piece, begins in pieces:
            if begins:
                self._in_text = set()
            found = self._token.findall(piece)
            self._times.update(found)
            self._texts.update(new := set(found) - self._in_text)
            self._in_text |= new
            yield piece, begins

    @property
    def said(self) -> dict[str, tuple[int, int]]:
        """Return how often each is there, and in how many texts, the most frequent first."""
        return {token: (times, self._texts[token]) for token, times in self._times.most_common()}


def written_out_notes(said: Mapping[str, tuple[int, int]], num_texts: int) -> list[str]:
    """Return that special tokens which are written out are text, if there are any; said: by `WrittenOut`."""
    if not said:
        return []
    named = [
        f"{token} {times:,} time{'s' * (times > 1)} in {texts:,} of {num_texts:,} text{'s' * (num_texts > 1)}"
        for token, (times, texts) in list(said.items())[:MOST_NAMED]
    ]
    more = ["..."] if len(said) > MOST_NAMED else []
    return [
        f"special tokens are written out ({', '.join([*named, *more])}): they are read as text, and not as "
        "the tokens; a document ends where its file or its line of .jsonl does, so give each one of its own"
    ]


def tokenizer_config_text(said: Mapping[str, Any]) -> str:
    """Return a tokenizer_config.json by which `AutoTokenizer` uses the tokenizer.json beside it as it is.

    Without one transformers takes the class of the model's kind, which splits texts in a way of its own.
    said: what else it says, as which token ends a text.
    """
    return json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **said}, indent=1) + "\n"


def roles_of(vocabulary: Tokenizer, end: str | None) -> dict[str, str | None]:
    """Return the special tokens of a vocabulary by their names in transformers; end: as `own_end` says."""
    special = SpecialTokens.of(vocabulary, end)
    ids = {
        "pad_token": _first(vocabulary, PADDINGS),
        "unk_token": _first(vocabulary, UNKNOWNS),
        "bos_token": special.cls,
        "eos_token": special.separator,
        "cls_token": special.cls,
        "sep_token": special.separator,
        "mask_token": special.mask,
    }
    return {role: vocabulary.id_to_token(index) for role, index in ids.items() if index is not None}


def _first(vocabulary: Tokenizer, names: Iterable[str]) -> int | None:
    return next((found for name in names if (found := vocabulary.token_to_id(name)) is not None), None)


def adopt_vocabulary(path: Path, task: Task, size: int, folder: ModelFolder | None = None) -> Tokenizer:
    """Return the tokenizer that a model was trained with, from its tokenizer.json.

    size: of the model's vocabulary. folder: of the model, where the file is of it.

    Raises: InputError if it is missing, unreadable, without the special tokens of the task, or has larger
    ids.
    """
    try:
        vocabulary = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # NOTE: tokenizers raises bare Exception on a malformed file
        raise InputError(f"{path}: cannot be read ({error}); copy it again") from error
    vocabulary.no_truncation()
    vocabulary.no_padding()
    special = SpecialTokens.of(vocabulary, own_end(vocabulary, folder, path.with_name(TOKENIZER_CONFIG_FILE)))
    remedy = "give the model's own tokenizer"
    if task == Task.MASKED_LM and None in (special.cls, special.mask):
        raise InputError(f"{path}: has no [CLS] or no [MASK], which {task} needs; {remedy}")
    largest = max(vocabulary.get_vocab().values())
    if largest >= size:
        raise InputError(f"{path}: has ids up to {largest:,}, the model {size:,} entries; {remedy}")
    return vocabulary
