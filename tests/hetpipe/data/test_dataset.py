"""Corpus, vocabulary, tokens and the training order."""

import hashlib
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_model.errors import InputError
from hetpipe.data.data_file import files_of
from hetpipe.data.dataset import IGNORE_LABEL, Dataset, load_tokens, write_tokens
from hetpipe.data.texts import read_corpus
from hetpipe.data.vocabulary import (
    CLS_ID,
    MASK_ID,
    MIN_VOCABULARY,
    SEP_ID,
    SPECIAL_TOKENS,
    load_vocabulary,
    save_vocabulary,
    train_vocabulary,
    vocabulary_sha256,
)
from hetpipe.models.tasks import Task

TEXTS = ["The ship sails.\nThe ship sails far, the sea is grey.\n" * 40, "Grüße, [MASK] 漢字\r\n" * 30]


def dataset(task=Task.MASKED_LM, *, num_tokens=1000, sequence_length=22, seed=7):
    tokens = 5 + np.arange(num_tokens, dtype=np.uint16) % 295
    return Dataset(tokens, task, sequence_length=sequence_length, vocabulary_size=300, seed=seed)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "does not exist"),
        (b"", "is empty"),
        (b" \n\t\n", "is empty"),
        (b"abc\xff", "not UTF-8 at byte 3"),
    ],
)
def test_bad_data_file_is_one_clear_line(tmp_path, content, reason):
    path = tmp_path / "corpus.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=reason) as error:
        read_corpus([path])
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_folder_as_data_file_is_refused(tmp_path):
    with pytest.raises(InputError, match="is a folder"):
        read_corpus([tmp_path])


def test_corpus_is_one_document_per_file_and_by_default_the_language_reference(tmp_path):
    (tmp_path / "a.txt").write_bytes("\ufeffé\n".encode())
    (tmp_path / "b.txt").write_text("b")
    assert read_corpus([tmp_path / "a.txt", tmp_path / "b.txt"]) == ["é\n", "b"]
    assert len(read_corpus()) > 50 and all(read_corpus())


def test_too_short_corpus_names_tokens_there_and_needed():
    with pytest.raises(InputError, match=r"has 19 tokens, a sequence of length 22 needs 20"):
        dataset(num_tokens=19)
    assert dataset(num_tokens=20).num_samples == 1


@pytest.mark.parametrize("bad", [{"sequence_length": 2}, {"seed": -1}])
def test_bad_dataset_cannot_exist(bad):
    with pytest.raises(InputError):
        dataset(**bad)


def test_vocabulary_is_equal_for_equal_texts_and_starts_with_the_special_tokens():
    first, second = train_vocabulary(TEXTS, 300), train_vocabulary(TEXTS, 300)
    assert first.to_str() == second.to_str()
    assert [first.id_to_token(token) for token in range(5)] == list(SPECIAL_TOKENS)
    assert first.get_vocab_size() == 300
    assert vocabulary_sha256(first) != vocabulary_sha256(train_vocabulary(TEXTS, 299))


def test_vocabulary_of_the_default_corpus_is_deterministic():
    hashes = {vocabulary_sha256(train_vocabulary(read_corpus(), 30_000)) for _ in range(2)}
    assert len(hashes) == 1


def test_vocabulary_below_the_bytes_is_refused():
    with pytest.raises(InputError, match=f"needs {MIN_VOCABULARY}"):
        train_vocabulary(TEXTS, MIN_VOCABULARY - 1)


def test_saved_vocabulary_is_the_same_vocabulary(tmp_path):
    vocabulary = train_vocabulary(TEXTS, 300)
    save_vocabulary(vocabulary, tmp_path / "vocabulary.json")
    loaded = load_vocabulary(tmp_path / "vocabulary.json")
    assert vocabulary_sha256(loaded) == vocabulary_sha256(vocabulary)
    assert loaded.encode(TEXTS[1]).ids == vocabulary.encode(TEXTS[1]).ids


@pytest.mark.parametrize("content", [None, "{", '{"model": 1}'])
def test_unreadable_vocabulary_is_refused(tmp_path, content):
    path = tmp_path / "vocabulary.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InputError, match="cannot be read"):
        load_vocabulary(path)


def test_tokens_decode_to_the_texts_and_special_words_in_a_text_stay_text(tmp_path):
    vocabulary = train_vocabulary(TEXTS, 300)
    write_tokens(tmp_path, TEXTS, vocabulary, SEP_ID)
    tokens = load_tokens(tmp_path, vocabulary)
    assert tokens.dtype == np.uint16 and isinstance(tokens, np.memmap) and not tokens.flags.writeable
    ends = np.flatnonzero(tokens < len(SPECIAL_TOKENS))
    assert tokens[ends].tolist() == [SEP_ID, SEP_ID] and ends[-1] == len(tokens) - 1
    documents = [vocabulary.decode(tokens[start + 1 : end].tolist()) for start, end in pairwise([-1, *ends])]
    assert documents == TEXTS
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ends.bin", "tokens.bin", "tokens.json"]


def test_tokens_of_another_vocabulary_or_torn_are_refused(tmp_path):
    vocabulary = train_vocabulary(TEXTS, 300)
    with pytest.raises(InputError, match="cannot be read"):
        load_tokens(tmp_path, vocabulary)
    write_tokens(tmp_path, TEXTS, vocabulary, SEP_ID)
    with pytest.raises(InputError, match="were written with vocabulary"):
        load_tokens(tmp_path, train_vocabulary(TEXTS, 299))
    (tmp_path / "tokens.bin").write_bytes(b"1234")
    with pytest.raises(InputError, match="has 4 bytes"):
        load_tokens(tmp_path, vocabulary)
    (tmp_path / "tokens.json").write_text(json.dumps([1]))
    with pytest.raises(InputError, match="cannot be read"):
        load_tokens(tmp_path, vocabulary)


@settings(deadline=None, max_examples=50)
@given(
    batch_sizes=st.lists(st.integers(1, 40), min_size=1, max_size=30),
    num_sequences=st.integers(1, 30),
    seed=st.integers(0, 2**40),
)
def test_every_sequence_is_seen_once_per_epoch_over_any_batch_sizes(batch_sizes, num_sequences, seed):
    data = dataset(num_tokens=20 * num_sequences + 3, seed=seed)
    assert data.num_samples == num_sequences
    seen, position = [], 0
    for size in batch_sizes:
        seen += data.sequences(position, size).tolist()
        position += size
    epochs = [seen[start : start + num_sequences] for start in range(0, len(seen), num_sequences)]
    for epoch in epochs[:-1]:
        assert sorted(epoch) == list(range(num_sequences))
    assert len(set(epochs[-1])) == len(epochs[-1])


def test_order_differs_between_epochs_and_seeds():
    data = dataset()  # 50 sequences
    first = data.sequences(0, 50).tolist()
    assert first != data.sequences(50, 50).tolist()
    assert first != dataset(seed=8).sequences(0, 50).tolist()


def test_order_and_masks_never_change_between_versions():
    # A resumed run must see the rest of its epoch, with whatever NumPy and hetpipe it resumes.
    step = dataset().step(3, 32)  # straddles epochs 1 and 2
    digest = hashlib.sha256(step.input_ids.tobytes() + step.labels.tobytes()).hexdigest()
    assert digest[:16] == "2e49f6d8f4871010"


@pytest.mark.parametrize("task", list(Task))
def test_slice_of_a_batch_is_a_batch(task):
    data = dataset(task)
    whole, part = data.step(3, 32), data.batch(3 * 32 + 5, 20)
    assert (whole.input_ids[5:25] == part.input_ids).all() and (whole.labels[5:25] == part.labels).all()
    assert part.sample_positions.tolist() == list(range(101, 121))
    assert whole.input_ids.dtype == whole.labels.dtype == np.int64
    assert whole.num_loss_tokens == data.num_loss_tokens(32)


def test_masked_lm_hides_exactly_15_percent_and_keeps_the_rest():
    data = dataset(
        num_tokens=20_000, sequence_length=42
    )  # 40 tokens a sequence, 6 of them masked, 500 sequences
    batch = data.batch(0, data.num_samples)
    hidden = batch.labels != IGNORE_LABEL
    assert (hidden.sum(axis=1) == 6).all() and batch.num_loss_tokens == 6 * 500
    assert (batch.input_ids[:, 0] == CLS_ID).all() and (batch.input_ids[:, -1] == SEP_ID).all()
    assert not hidden[:, [0, -1]].any()
    restored = np.where(hidden, batch.labels, batch.input_ids)[:, 1:-1]
    assert (restored == data.tokens.reshape(500, 40)[data.sequences(0, 500)]).all()

    masked, kept = batch.input_ids[hidden] == MASK_ID, batch.input_ids[hidden] == batch.labels[hidden]
    assert masked.mean() == pytest.approx(0.8, abs=0.03) and kept.mean() == pytest.approx(0.1, abs=0.03)
    assert (batch.input_ids[hidden][~masked] >= len(SPECIAL_TOKENS)).all()


def test_masks_differ_between_epochs():
    data = dataset(num_tokens=20)  # one sequence
    first, second = data.batch(0, 1), data.batch(1, 1)
    assert (first.labels != second.labels).any()


def test_end_of_a_document_is_not_masked():
    tokens = np.tile(np.array([9, SEP_ID], np.uint16), 500)
    data = Dataset(tokens, Task.MASKED_LM, sequence_length=22, vocabulary_size=300, seed=0)
    assert set(data.batch(0, 50).labels.ravel()) == {9, IGNORE_LABEL}


def test_causal_lm_labels_are_the_inputs():
    data = dataset(Task.CAUSAL_LM, num_tokens=100, sequence_length=20)
    batch = data.batch(0, 5)
    assert (batch.input_ids == batch.labels).all() and batch.num_loss_tokens == 5 * 19
    assert sorted(batch.input_ids.ravel()) == sorted(data.tokens)


def test_of_a_folder_the_files_are_taken_by_name(tmp_path: Path):
    for name in ("b.txt", "a.txt", ".hidden"):
        (tmp_path / name).write_text("text")
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "c.txt").write_text("text")
    single = tmp_path / "inner" / "c.txt"
    assert list(files_of([single, tmp_path])) == [single, tmp_path / "a.txt", tmp_path / "b.txt"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="holds no files"):
        list(files_of([tmp_path / "empty"]))
