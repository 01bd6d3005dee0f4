"""The tokenizer beside an exported model is the one that it was trained with."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, BertTokenizerFast

from cost_model.errors import InputError
from hetpipe import cli
from hetpipe.data.task import prepare_data
from hetpipe.models.names import model_entry
from hetpipe.models.tasks import Task
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.settings import Settings, TaskSettings
from other_folders import save_other
from runs import chain_plan, made_up_profile, run

LENGTH = 12
TEXTS = [
    {"text": "The ship sails far away.", "label": 0},
    {"text": "A long day at sea, and a longer night.", "text_pair": "Who?", "label": "LABEL_2"},
    {"text": "Grey.", "label": 1},
] * 6
WORDS = "Ada and ada saw The Ship, the ship"
BERT, CAUSAL = "BertForSequenceClassification", "BioGptForCausalLM"


def exported(folder: Path, model: Path, **changes: Any) -> tuple[Path, RunFolder]:
    """Train a step of a model's folder, and return what is exported, and the run."""
    entry = model_entry(str(model))
    data = folder / "data.jsonl"
    if entry.task is Task.SEQUENCE_CLASSIFICATION:
        data.write_text("".join(json.dumps(row) + "\n" for row in TEXTS))
    else:
        data = folder / "data.txt"
        data.write_text((WORDS + "\n") * 60)
    settings = Settings(steps=1, total_steps=2, model_folder=entry.place, data=(str(data),), **changes)
    profile = replace(made_up_profile(str(model)), model=entry.name, sequence_length=LENGTH)
    run(folder, chain_plan(entry.name, [0, profile.num_layers], 4), settings, profile)
    assert cli.main(["export", str(folder / "run"), "-o", str(folder / "exported")]) == 0
    return folder / "exported", RunFolder(folder / "run")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*(filling|longer than)")
@pytest.mark.parametrize("architecture", [BERT, CAUSAL])
def test_a_vocabulary_that_was_trained_here_is_loaded_as_it_is(tmp_path: Path, architecture: str):
    save_other(tmp_path / "mine", architecture)
    folder, done = exported(tmp_path, tmp_path / "mine")
    ours = tokenizers.Tokenizer.from_file(str(done.vocabulary))
    theirs = AutoTokenizer.from_pretrained(folder)
    for text in (WORDS, TEXTS[1]["text"]):
        assert theirs(text)["input_ids"] == ours.encode(text).ids
    pair = theirs(TEXTS[1]["text"], TEXTS[1]["text_pair"])
    expected = ours.encode(TEXTS[1]["text"], TEXTS[1]["text_pair"])
    assert pair["input_ids"] == expected.ids
    if architecture == BERT:
        assert pair["token_type_ids"] == expected.type_ids and 1 in expected.type_ids
        assert (theirs.cls_token, theirs.mask_token) == ("[CLS]", "[MASK]")
    else:
        assert "token_type_ids" not in pair
    assert (theirs.pad_token, theirs.eos_token) == ("[PAD]", "[SEP]")


def cased(folder: Path) -> BertTokenizerFast:
    """Write a tokenizer for which capitals are other letters."""
    made = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=False)
    made.pre_tokenizer, made.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    texts = [WORDS, *(row["text"] for row in TEXTS)]
    made.train_from_iterator(texts * 9, trainers.WordPieceTrainer(vocab_size=400, special_tokens=special))
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    found = BertTokenizerFast(tokenizer_object=made, do_lower_case=False, model_max_length=48)
    found.save_pretrained(folder)
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*(filling|longer than)")
def test_what_a_folder_says_of_its_tokenizer_is_kept(tmp_path: Path):
    save_other(tmp_path / "mine", BERT)
    before = cased(tmp_path / "mine")
    folder, done = exported(tmp_path, tmp_path / "mine")
    after = AutoTokenizer.from_pretrained(folder)
    assert after(WORDS)["input_ids"] == before(WORDS)["input_ids"]
    assert after.tokenize("Ada") == ["Ada"] and after.tokenize("ada") != ["Ada"]
    assert after.model_max_length == 48
    # a run that goes on elsewhere has it from its checkpoint
    (tmp_path / "mine" / "tokenizer_config.json").unlink()
    (tmp_path / "more").mkdir()
    newest = done.checkpoints / "step-000001"
    entry = model_entry(str(tmp_path / "mine"))
    settings = Settings(
        steps=2, model_folder=entry.place, data=(str(tmp_path / "data.jsonl"),), resume_from=str(newest)
    )
    profile = replace(made_up_profile(str(tmp_path / "mine")), model=entry.name, sequence_length=LENGTH)
    run(tmp_path / "more", chain_plan(entry.name, [0, profile.num_layers], 4), settings, profile)
    assert cli.main(["export", str(tmp_path / "more" / "run"), "-o", str(tmp_path / "again")]) == 0
    assert AutoTokenizer.from_pretrained(tmp_path / "again").model_max_length == 48


def test_a_text_that_the_normalizer_empties_is_refused_with_its_line(tmp_path: Path):
    """It had been learned as [CLS] [SEP], with its label."""
    save_other(tmp_path / "mine", BERT)
    cased(tmp_path / "mine")
    entry = model_entry(str(tmp_path / "mine"))
    data = tmp_path / "data.jsonl"
    for text, pair in (("\u200b", {}), ("\u0007", {"text_pair": "Who?"})):
        rows = [TEXTS[0], {"text": text, "label": 1, **pair}]
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        settings = Settings(steps=1, model_folder=entry.place, data=(str(data),))
        with pytest.raises(InputError, match=r"data\.jsonl, line 2: \"text\" is \"\\u.*makes no token; take"):
            prepare_data(RunFolder(tmp_path / "run"), TaskSettings(entry.name, LENGTH, run=settings))
