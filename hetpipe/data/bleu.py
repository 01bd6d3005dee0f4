"""BLEU, of translations that a model wrote by itself, as sacrebleu computes it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from tokenizers import Tokenizer

from cost_model.errors import InputError
from hetpipe.data.pairs import PairDataset

BLEU = "bleu"
_REMEDY = "pip install 'hetpipe[translation]'"


def has_sacrebleu() -> bool:
    """Return whether BLEU can be computed."""
    return find_spec("sacrebleu") is not None


def check_installed() -> None:
    """Check that BLEU can be computed.

    Raises: InputError if it cannot.
    """
    if not has_sacrebleu():
        raise InputError(f"--best is {BLEU!r}, which sacrebleu computes, and it is not installed; {_REMEDY}")


def missing_note() -> list[str]:
    """Return what to say of held-out pairs where BLEU cannot be computed."""
    if has_sacrebleu():
        return []
    return [f"of held-out pairs there is the loss alone, no BLEU: sacrebleu is not installed; {_REMEDY}"]


@dataclass(frozen=True, slots=True)
class References:
    """What translations of held-out samples are compared with.

    texts: (first sample, number) -> the targets as they were given. text_of: tokens -> their text, without
    special tokens. end, padding: the tokens that end a translation, and that fill it up.
    """

    texts: Callable[[int, int], list[str]]
    text_of: Callable[[Sequence[int]], str]
    end: int
    padding: int

    @classmethod
    def of(cls, samples: PairDataset, vocabulary: Tokenizer) -> "References":
        """Return those of pairs."""
        end, padding = samples.shape.end, samples.shape.padding

        def text_of(tokens: Sequence[int]) -> str:
            kept = [token for token in tokens if token not in (end, padding)]  # special there or not
            text: str = vocabulary.decode(kept, skip_special_tokens=True)
            return text

        return cls(samples.references, text_of, end, padding)


def bleu_of(texts: Sequence[str], references: Sequence[str]) -> float:
    """Return the BLEU of a corpus, from 0 to 100, with a reference each (Post, WMT 2018; 13a, exp)."""
    import sacrebleu

    return float(sacrebleu.corpus_bleu(list(texts), [list(references)]).score)
