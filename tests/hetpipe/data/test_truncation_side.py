"""Texts are cut at the side that the model's folder says, as transformers cuts them."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer

from hetpipe.data.answers import CONTEXTS_FILE
from hetpipe.data.dataset import IGNORE_LABEL
from hetpipe.data.special_tokens import tokenizer_config_text
from hetpipe.data.task import prepare_data, registered_task
from hetpipe.models.names import model_entry
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.settings import Settings, TaskSettings
from other_folders import save_other

LENGTH = 16
SHORT, LONG, LONGER = "abc", "the ship sails far away", "a long day at sea, and a longer night"


def batch_of(tmp_path: Path, side: str, architecture: str, rows: list[dict[str, Any]], **options: Any):
    """The first batch of rows, by a tokenizer of which each letter is a token; it; and what is told."""
    place = tmp_path / side
    save_other(place, architecture, **options.pop("sizes", {}))
    entries = ["[PAD]", "[CLS]", "[SEP]", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    made = Tokenizer(models.BPE({token: at for at, token in enumerate(entries)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.add_special_tokens(entries[:3])
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    made.save(str(place / "tokenizer.json"))
    said = {"pad_token": "[PAD]", "truncation_side": side}
    (place / "tokenizer_config.json").write_text(tokenizer_config_text(said))
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    entry, folder = model_entry(str(place)), RunFolder(tmp_path / "run")
    run = Settings(steps=1, model_folder=entry.place, data=(str(data),), **options)
    settings = TaskSettings(entry.name, LENGTH, run=run)
    told = prepare_data(folder, settings)
    samples = registered_task(folder, settings)
    return samples, AutoTokenizer.from_pretrained(place), told, folder


sides = pytest.mark.parametrize("side", ["left", "right"])


def kept(inputs: Any, row: int) -> list[int]:
    ids, mask = inputs["input_ids"][row].tolist(), inputs["attention_mask"][row].tolist()
    return ids[: sum(mask)]


@sides
def test_texts_and_pairs_with_a_label(tmp_path, side):
    """They were cut at their end, though the exported tokenizer cuts where the folder says."""
    texts = [(SHORT,), (LONG,), (SHORT, LONG), (LONG, SHORT), (LONGER, LONG)]
    rows = [
        {"text": text, "label": at} | ({"text_pair": pair[0]} if pair else {})
        for at, (text, *pair) in enumerate(texts)
    ]
    sizes = {"num_labels": len(texts)}
    samples, theirs, told, _ = batch_of(tmp_path, side, "BertForSequenceClassification", rows, sizes=sizes)
    inputs, labels = samples.batch(0, len(texts))
    assert sorted(labels.tolist()) == list(range(len(texts)))
    for row, label in enumerate(labels.tolist()):
        expected = theirs(*texts[label], truncation=True, max_length=LENGTH)["input_ids"]
        assert kept(inputs, row) == expected
    assert ("and cut at their beginning" in told[0]) == (side == "left") and "4 of 5 texts" in told[0]


@sides
def test_words_with_tags_are_learned_by_their_own_first_token(tmp_path, side):
    words = ["far", "away", "sails", "a", "ship"]
    rows = [{"tokens": words, "tags": [0, 1, 2, 0, 1]}]
    samples, theirs, *_ = batch_of(tmp_path, side, "BertForTokenClassification", rows)
    inputs, labels = samples.batch(0, 1)
    expected = theirs(words, is_split_into_words=True, truncation=True, max_length=LENGTH)
    assert kept(inputs, 0) == expected["input_ids"]
    # 14 of 17 letters: of "far" none is left, or of "ship" the first alone
    first = {"left": {1: 1, 5: 2, 10: 0, 11: 1}, "right": {1: 0, 4: 1, 8: 2, 13: 0, 14: 1}}[side]
    assert {at: tag for at, tag in enumerate(labels[0].tolist()) if tag != IGNORE_LABEL} == first


def test_a_word_that_is_cut_in_two_is_not_learned(tmp_path):
    rows = [{"tokens": ["fararaway", "sails", "aship"], "tags": [1, 2, 0]}]
    samples, *_ = batch_of(tmp_path, "left", "BertForTokenClassification", rows)
    _, labels = samples.batch(0, 1)
    learned = {at: tag for at, tag in enumerate(labels[0].tolist()) if tag != IGNORE_LABEL}
    assert learned == {5: 2, 10: 0}  # 4 letters of the first word are left


@sides
def test_both_sides_of_a_translation(tmp_path, side):
    sizes = {"eos_token_id": 2}
    rows = [{"source": LONG, "target": LONGER}]
    samples, theirs, told, _ = batch_of(tmp_path, side, "MarianMTModel", rows, sizes=sizes)
    inputs, labels = samples.batch(0, 1)
    for text, ids in ((LONG, kept(inputs, 0)), (LONGER, labels[0].tolist())):
        assert ids == theirs(text, truncation=True, max_length=LENGTH)["input_ids"]
    assert ("cut at its beginning" in told[0]) == (side == "left")


@sides
@pytest.mark.parametrize("stride", [None, 4])
def test_contexts_and_their_windows(tmp_path, side, stride):
    answers = {"text": ["sails"], "answer_start": [9]}
    rows = [{"context": LONG, "question": "ab", "answers": answers}]
    if side == "left" and stride is None:  # the last 11 letters
        rows[0]["answers"] = {"text": ["far"], "answer_start": [15]}
    elif stride is None:  # the first 11
        rows[0]["answers"] = {"text": ["ship"], "answer_start": [4]}
    samples, theirs, _, folder = batch_of(tmp_path, side, "BertForQuestionAnswering", rows, doc_stride=stride)
    expected = theirs(
        "ab", LONG, truncation="only_second", max_length=LENGTH, stride=stride or 0,
        return_overflowing_tokens=stride is not None,
    )["input_ids"]  # fmt: skip
    windows = [expected] if stride is None else expected
    inputs, labels = samples.batch(0, len(windows))
    found = sorted(kept(inputs, row) for row in range(len(windows)))
    assert found == sorted(windows)
    answer = theirs(rows[0]["answers"]["text"][0], add_special_tokens=False)["input_ids"]
    told = [kept(inputs, row)[first : last + 1] for row, (first, last, _) in enumerate(labels.tolist())]
    assert answer in told and all(each in (answer, [1]) for each in told)
    whole = [answer == ids[at : at + len(answer)] for ids in windows for at in range(len(ids))]
    assert told.count(answer) == sum(whole) and (folder.path / CONTEXTS_FILE).exists()
