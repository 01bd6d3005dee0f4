"""Parquet files and data sets of `datasets` are read as JSON lines are: texts, chats, labels."""

import datetime
import importlib.util
import json
import sys

import pytest

from cost_model.errors import InputError
from hetpipe.data.data_file import files_of
from hetpipe.data.kinds import read_data
from hetpipe.data.table_files import rows_of
from hetpipe.models.names import model_entry
from other_folders import save_other
from shell import Shell

GPT2 = model_entry("gpt2-tiny")
needs_datasets = pytest.mark.skipif(
    importlib.util.find_spec("datasets") is None, reason="datasets is missing"
)
CHATS = [
    {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n} ships."}]}
    for n in range(40)
]
TEXTS = [{"text": f"The ship {n} sails over the grey sea.\n" * 9, "id": n} for n in range(40)]


def saved(folder, rows, *, how="disk"):
    """The rows as `datasets` writes them: a folder, or a parquet file."""
    from datasets import Dataset

    made = Dataset.from_list(rows)
    if how == "disk":
        made.save_to_disk(folder, num_shards=2)
        return folder
    made.to_parquet(f"{folder}.parquet")
    return folder.with_name(f"{folder.name}.parquet")


def lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@needs_datasets
@pytest.mark.parametrize("how", ["disk", "parquet"])
@pytest.mark.parametrize("rows", [CHATS, TEXTS])
def test_a_data_set_is_what_the_same_json_lines_are(tmp_path, rows, how):
    place = saved(tmp_path / "data", rows, how=how)
    kind, content = read_data(list(files_of([place])), GPT2)
    other, expected = read_data([lines(tmp_path / "data.jsonl", rows)], GPT2)
    assert kind is other and content == expected and content.sha256 == expected.sha256


@needs_datasets
def test_files_of_feather_are_read_too(tmp_path):
    import pyarrow

    table = pyarrow.Table.from_pylist(TEXTS)
    with (
        pyarrow.OSFile(str(tmp_path / "a.arrow"), "wb") as sink,
        pyarrow.ipc.new_file(sink, table.schema) as out,
    ):
        out.write_table(table)
    assert list(rows_of(tmp_path / "a.arrow")) == TEXTS


def test_json_lines_that_are_called_json_are_told_their_name(tmp_path):
    """The text that they have had been asked for."""
    lines(tmp_path / "data.json", TEXTS)
    with pytest.raises(InputError, match=r'has .*"text".*; call it \.jsonl if each line is an object, or'):
        read_data([tmp_path / "data.json"], GPT2)


@needs_datasets
def test_what_cannot_be_read_is_one_line(tmp_path):
    from datasets import Dataset, DatasetDict

    (tmp_path / "bad.parquet").write_bytes(b"not a table at all")
    with pytest.raises(InputError, match=r"bad\.parquet cannot be read \(.*\); write it again"):
        read_data([tmp_path / "bad.parquet"], GPT2)
    with pytest.raises(InputError, match="does not exist"):
        read_data([tmp_path / "none.parquet"], GPT2)
    Dataset.from_list([{"question": "a", "answer": "b"}]).to_parquet(tmp_path / "other.parquet")
    with pytest.raises(InputError, match=r"row 1: has \[\"answer\", \"question\"\]; give"):
        read_data([tmp_path / "other.parquet"], GPT2)
    DatasetDict({"train": Dataset.from_list(TEXTS), "test": Dataset.from_list(TEXTS)}).save_to_disk(
        tmp_path / "d"
    )
    with pytest.raises(
        InputError, match=r"holds several data sets \(test, train\); give one of them, as .*/d/test"
    ):
        list(files_of([tmp_path / "d"]))


@needs_datasets
@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ([b"abc"], r"row 1: \"text\" is \"b'abc'\"; give a text"),
        ([datetime.date(2020, 2, 1)], r"row 1: \"text\" is \"datetime.date\(2020, 2, 1\)\"; give a text"),
        (["a", None], r"row 2: has \[\], and the first line a text"),
    ],
)
def test_a_column_of_another_type_and_a_missing_value_are_one_line(tmp_path, values, reason):
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"text": values}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=reason):
        read_data([tmp_path / "a.parquet"], GPT2)


@needs_datasets
def test_texts_that_are_not_unicode_and_dates_that_python_has_not_are_one_line(tmp_path):
    import pyarrow
    from pyarrow import parquet

    ends = pyarrow.py_buffer((0).to_bytes(4, "little") + (2).to_bytes(4, "little"))
    text = pyarrow.Array.from_buffers(pyarrow.string(), 1, [None, ends, pyarrow.py_buffer(b"\xff\xfe")])
    late = pyarrow.array([2**60], pyarrow.timestamp("ms"))
    for name, column in (("text", text), ("date", late)):
        path = tmp_path / f"{name}.parquet"
        parquet.write_table(pyarrow.table({name: column}), path)
        with pytest.raises(InputError, match=rf"{name}\.parquet cannot be read \(.+\); write it again"):
            list(rows_of(path))


def test_without_pyarrow_it_is_said_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(InputError, match=r"needs pyarrow; pip install datasets, or give \.jsonl"):
        read_data([tmp_path / "a.parquet"], GPT2)


def labelled(place, names, labels, *, how, tags=None):
    """A data set with a column of labels, or of lists of them, that have names in the file."""
    from datasets import ClassLabel, Dataset, Features, Sequence, Value

    kind = ClassLabel(names=names)
    if tags is None:
        rows = {"text": [f"text {label}" for label in labels], "label": labels}
        features = {"text": Value("string"), "label": kind}
    else:
        rows = {"tokens": [["a"] * len(row) for row in tags], "tags": tags}
        features = {"tokens": Sequence(Value("string")), "tags": Sequence(kind)}
    made = Dataset.from_dict(rows, features=Features(features))
    if how == "disk":
        made.save_to_disk(place)
        return list(files_of([place]))
    made.to_parquet(f"{place}.parquet")
    return [place.with_name(f"{place.name}.parquet")]


def learner(place, architecture, *names):
    save_other(place, architecture, **({"id2label": dict(enumerate(names))} if names else {}))
    return model_entry(str(place))


@needs_datasets
@pytest.mark.parametrize("how", ["disk", "parquet"])
def test_labels_with_names_in_a_table_are_known_by_them(tmp_path, how):
    """The numbers of the file had been taken for the model's: classes were swapped without a word."""
    texts = learner(tmp_path / "mine", "BertForSequenceClassification", "neg", "pos", "mid")
    files = labelled(tmp_path / "data", ["pos", "neg", "mid"], [0, 1, 2], how=how)
    assert [row[2] for row in read_data(files, texts)[1].rows] == [1, 0, 2]
    words = learner(tmp_path / "tags", "BertForTokenClassification", "O", "B-x", "I-x")
    files = labelled(tmp_path / "words", ["B-x", "I-x", "O"], [], how=how, tags=[[0, 1], [2]])
    assert [row[1] for row in read_data(files, words)[1].rows] == [(1, 2), (0,)]
    unnamed = learner(tmp_path / "unnamed", "BertForSequenceClassification")
    files = labelled(tmp_path / "numbers", ["pos", "neg", "mid"], [2, 0, 1], how=how)
    assert [row[2] for row in read_data(files, unnamed)[1].rows] == [2, 0, 1]


@needs_datasets
def test_a_missing_label_of_a_table_and_a_name_of_no_label_are_one_line(tmp_path):
    texts = learner(tmp_path / "mine", "BertForSequenceClassification", "neg", "pos", "mid")
    files = labelled(tmp_path / "data", ["neg", "pos"], [1, -1], how="parquet")
    with pytest.raises(InputError, match=r'row 2: has \["text"\] and no "label"'):
        read_data(files, texts)
    files = labelled(tmp_path / "other", ["neg", "good"], [0, 1], how="parquet")
    with pytest.raises(InputError, match=r'row 2: "good" is no label of the model; its config.json has 0 to'):
        read_data(files, texts)
    words = learner(tmp_path / "tags", "BertForTokenClassification", "O", "B-x", "I-x")
    files = labelled(tmp_path / "words", ["O", "B-x"], [], how="parquet", tags=[[0, -1]])
    with pytest.raises(InputError, match="row 1: null is no label of the model"):
        read_data(files, words)


@needs_datasets
@pytest.mark.slow
def test_from_the_command_line(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shell = Shell(tmp_path, capsys)
    assert shell("init --emulate 0.5,0.3 -o emulated.toml").code == 0
    saved(tmp_path / "chats", CHATS)
    result = shell(
        "run --model gpt2-tiny --cluster emulated.toml --data chats --pack --steps 2 --no-proof "
        "--profile-budget 0.5 --tokens-per-step 512 --run-folder done --json"
    )
    assert result.code == 0, result.err
    assert "40 chats packed into" in result.err
    assert json.loads((tmp_path / "done" / "plan.json").read_text())["global_batch_size"] == 512 // 64
