"""Special tokens of pairs of texts: the code of a language is told, what ends a text is none of its words."""

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from hetpipe.data.bleu import References
from hetpipe.data.pairs import PairDataset
from hetpipe.data.task import prepare_data
from hetpipe.models.names import model_entry
from hetpipe.models.task_inputs import InputShape
from hetpipe.models.tasks import Task
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.settings import Settings, TaskSettings
from other_folders import save_other


@pytest.mark.parametrize(
    ("architecture", "is_told"),
    [("MBartForConditionalGeneration", True), ("BartForConditionalGeneration", False)],
)
def test_a_tokenizer_that_tells_one_language_for_both_sides_is_named(tmp_path, architecture, is_told):
    """As those of mBART-50 and NLLB do; of Bart a token before the text says nothing of a language."""
    place = tmp_path / "mine"
    save_other(place, architecture, eos_token_id=2, pad_token_id=1)
    words = {word: at for at, word in enumerate(("en_XX", "<pad>", "</s>", "<unk>", "one", "eins"))}
    vocabulary = Tokenizer(WordLevel(words, unk_token="<unk>"))
    vocabulary.add_special_tokens(["en_XX", "<pad>", "</s>"])
    vocabulary.pre_tokenizer = Whitespace()
    marks = [("en_XX", 0), ("</s>", 2)]
    vocabulary.post_processor = TemplateProcessing(single="en_XX $A </s>", special_tokens=marks)
    vocabulary.save(str(place / "tokenizer.json"))
    data = tmp_path / "pairs.jsonl"
    data.write_text(3 * (json.dumps({"source": "one", "target": "eins"}) + "\n"))
    entry = model_entry(str(place))
    settings = Settings(steps=1, model_folder=entry.place, data=(str(data),))
    told = prepare_data(RunFolder(tmp_path / "run"), TaskSettings(entry.name, 14, run=settings))
    assert any("marks sources and targets alike, as en_XX; where" in line for line in told) == is_told


def test_the_end_of_a_translation_is_none_of_its_words():
    """Some vocabularies hold </s> as a word, which decoding does not leave out."""
    shape = InputShape(Task.TRANSLATION, padding=0, start=0, end=1)
    pairs = PairDataset(np.array([2, 1, 3, 1], np.uint16), np.array([2, 4]), Path(), shape, 4, 0)
    vocabulary = Tokenizer(WordLevel({"<pad>": 0, "</s>": 1, "a": 2, "b": 3}, unk_token="a"))
    assert References.of(pairs, vocabulary).text_of([2, 3, 1]) == "a b"
