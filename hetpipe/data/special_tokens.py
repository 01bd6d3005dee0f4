"""The special tokens of a vocabulary, and the vocabulary that a model's folder brings."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from cost_model.errors import InputError
from hetpipe.models.tasks import Task

SEPARATORS = ("[SEP]", "</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>")
BEGINNINGS, MASKS = ("[CLS]", "<s>"), ("[MASK]", "<mask>")
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
    def of(cls, vocabulary: Tokenizer) -> "SpecialTokens":
        """Find the special tokens of a vocabulary by their usual names.

        Raises: InputError if the vocabulary has no token that ends a text.
        """
        separator = _first(vocabulary, SEPARATORS)
        if separator is None:
            names = ", ".join(SEPARATORS)
            raise InputError(f"the tokenizer has no token that ends a text; add one of {names}")
        added = vocabulary.get_added_tokens_decoder()
        every = {index for index, token in added.items() if token.special}
        found = cls(separator, _first(vocabulary, BEGINNINGS), _first(vocabulary, MASKS), ())
        every |= {index for index in (separator, found.cls, found.mask) if index is not None}
        return replace(found, all=tuple(sorted(every)))


def tokenizer_config_text(said: Mapping[str, Any]) -> str:
    """Return a tokenizer_config.json by which `AutoTokenizer` uses the tokenizer.json beside it as it is.

    Without one transformers takes the class of the model's kind, which splits texts in a way of its own.
    said: what else it says, as which token ends a text.
    """
    return json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **said}, indent=1) + "\n"


def roles_of(vocabulary: Tokenizer) -> dict[str, str | None]:
    """Return the special tokens of a vocabulary by their names in transformers."""
    special = SpecialTokens.of(vocabulary)
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


def adopt_vocabulary(path: Path, task: Task, size: int) -> Tokenizer:
    """Return the tokenizer that a model was trained with, from its tokenizer.json.

    size: of the model's vocabulary.

    Raises: InputError if it is missing, unreadable, without the special tokens of the task, or has larger
    ids.
    """
    try:
        vocabulary = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # NOTE: tokenizers raises bare Exception on a malformed file
        raise InputError(f"{path}: cannot be read ({error}); copy it again") from error
    vocabulary.no_truncation()
    vocabulary.no_padding()
    special = SpecialTokens.of(vocabulary)
    remedy = "give the model's own tokenizer"
    if task == Task.MASKED_LM and None in (special.cls, special.mask):
        raise InputError(f"{path}: has no [CLS] or no [MASK], which {task} needs; {remedy}")
    largest = max(vocabulary.get_vocab().values())
    if largest >= size:
        raise InputError(f"{path}: has ids up to {largest:,}, the model {size:,} entries; {remedy}")
    return vocabulary
