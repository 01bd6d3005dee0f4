"""The token that ends a text is the one that the model's folder names."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from hetpipe.data.task import prepare_data, registered_task
from hetpipe.models.names import model_entry
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.settings import Settings, TaskSettings
from other_folders import save_other

SPECIAL = ["</s>", "<|endoftext|>", "<|im_end|>", "[SEP]"]
WORDS = ["user", ":", "assistant", "a", "b"]
CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer_config.json"
LENGTH = 8


def model_folder(place: Path, said: dict[str, dict[str, Any]], special: list[str] = SPECIAL) -> Path:
    """A model whose vocabulary has several tokens that end a text in some model; said: by its files."""
    save_other(place, "StableLmForCausalLM")
    entries = {token: at for at, token in enumerate([*special, *WORDS, "<unk>"])}
    vocabulary = Tokenizer(models.WordLevel(entries, unk_token="<unk>"))
    vocabulary.add_special_tokens(special)
    vocabulary.pre_tokenizer = pre_tokenizers.Whitespace()
    vocabulary.save(str(place / "tokenizer.json"))
    (place / GENERATION).unlink(missing_ok=True)
    config = {**json.loads((place / CONFIG).read_text()), "eos_token_id": None}
    for name, content in {CONFIG: {}, **said}.items():
        (place / name).write_text(json.dumps({**(config if name == CONFIG else {}), **content}))
    return place


def prepared(tmp_path: Path, folder: Path, rows: list[dict[str, str]], **options: bool):
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    entry, place = model_entry(str(folder)), RunFolder(tmp_path / "run")
    run = Settings(steps=1, model_folder=entry.place, data=(str(data),), **options)
    settings = TaskSettings(entry.name, LENGTH, run=run)
    return place, settings, prepare_data(place, settings)


@pytest.mark.parametrize(
    ("said", "end"),
    [
        ({TOKENIZER: {"eos_token": "<|endoftext|>"}, CONFIG: {"eos_token_id": 0}}, "<|endoftext|>"),
        ({TOKENIZER: {"eos_token": {"content": "<|im_end|>"}}}, "<|im_end|>"),
        ({TOKENIZER: {"eos_token": "<none>"}, GENERATION: {"eos_token_id": [2, 1]}}, "<|im_end|>"),
        ({GENERATION: {"eos_token_id": 1}, CONFIG: {"eos_token_id": 0}}, "<|endoftext|>"),
        ({CONFIG: {"eos_token_id": 1}}, "<|endoftext|>"),
        ({CONFIG: {"eos_token_id": 7}}, "[SEP]"),  # "a" is no token that ends a text
        ({CONFIG: {"eos_token_id": 50_256}}, "[SEP]"),
        ({TOKENIZER: {"eos_token": None}}, "[SEP]"),
    ],
)
def test_texts_end_as_the_folder_of_the_model_says(tmp_path, said, end):
    """</s>, which Phi-3's vocabulary has too, had come before <|endoftext|> in a list of names."""
    folder = model_folder(tmp_path / "mine", said)
    place, *_ = prepared(tmp_path, folder, [{"text": "a b"}] * 9)
    tokens = np.fromfile(place.path / "tokens.bin", "<u2").tolist()
    a, b = (len(SPECIAL) + WORDS.index(word) for word in "ab")
    assert tokens == [a, b, SPECIAL.index(end)] * 9


def test_a_token_that_no_other_model_ends_texts_with_will_do(tmp_path):
    folder = model_folder(tmp_path / "mine", {TOKENIZER: {"eos_token": "<|im_end|>"}}, ["<|im_end|>"])
    place, settings, _ = prepared(tmp_path, folder, [{"text": "a b"}] * 9)
    assert registered_task(place, settings).batch(0, 1)[0]["input_ids"].tolist()[0].count(0) >= 2


@pytest.mark.parametrize("pack", [False, True])
def test_chats_end_and_are_filled_up_by_it(tmp_path, pack):
    folder = model_folder(tmp_path / "mine", {TOKENIZER: {"eos_token": "<|endoftext|>"}})
    rows = [{"prompt": "a", "completion": "b"}] * 3
    place, settings, _ = prepared(tmp_path, folder, rows, pack=pack)
    assert json.loads(place.chat_template.read_text())["special_tokens"] == {"eos_token": "<|endoftext|>"}
    inputs, labels = registered_task(place, replace(settings)).batch(0, 1)
    ids, learned = inputs["input_ids"][0], labels[0][labels[0] >= 0].tolist()
    assert learned == [len(SPECIAL) + WORDS.index("b"), 1]
    assert ids.tolist()[6:] == [1, 1] and 0 not in ids


@pytest.mark.filterwarnings("ignore:.*in the cache")
@pytest.mark.parametrize("most_held", [1 << 24, 0])
def test_special_tokens_that_are_written_out_are_told_to_be_text(tmp_path, monkeypatch, most_held):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("hetpipe.data.file_states.MOST_HELD_BYTES", most_held)
    folder = model_folder(tmp_path / "mine", {TOKENIZER: {"eos_token": "<|endoftext|>"}})
    rows = [{"text": "a<|endoftext|>b <|endoftext|>"}, {"text": "a </s> <|endoftext|>"}, {"text": "b a"}]
    for _ in range(2):  # taken from the cache too
        place, _, told = prepared(tmp_path, folder, rows)
        tokens = np.fromfile(place.path / "tokens.bin", "<u2").tolist()
        assert tokens.count(SPECIAL.index("<|endoftext|>")) == 3  # one ends each text
        (said,) = [line for line in told if "written out" in line]
        assert "(<|endoftext|> 3 times in 2 of 3 texts, </s> 1 time in 1 of 3 texts): they are" in said
    *_, told = prepared(tmp_path, folder, [{"text": "a b"}] * 9)
    assert not any("written out" in line for line in told)
