"""Files of tokens: mapped and not read, the same losses under any plan and on resume; refused in one line."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cost_model.errors import InputError
from hetpipe.data.dataset import load_tokens, write_tokens
from hetpipe.data.kinds import read_data
from hetpipe.data.texts import read_corpus
from hetpipe.data.token_files import JoinedTokens, open_tokens, partial_sha256
from hetpipe.data.vocabulary import SEP_ID, load_vocabulary, save_vocabulary, train_vocabulary
from hetpipe.models.names import model_entry
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.settings import Settings
from runs import chain_plan, made_up_profile, run
from shell import Shell

GPT2 = model_entry("gpt2-tiny")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """A folder with tokenizer.json, and tokens.bin of the reference manual's first pages."""
    folder = tmp_path_factory.mktemp("corpus")
    documents = read_corpus()[:40]
    vocabulary = train_vocabulary(documents, 1024)
    save_vocabulary(vocabulary, folder / "tokenizer.json")
    write_tokens(folder, documents, load_vocabulary(folder / "tokenizer.json"), SEP_ID)
    return folder


def size_of(corpus: Path) -> int:
    return int(load_vocabulary(corpus / "tokenizer.json").get_vocab_size())


def test_a_file_is_mapped_in_whatever_form_its_ids_are(tmp_path, corpus):
    tokens = np.asarray(load_tokens(corpus, load_vocabulary(corpus / "tokenizer.json")))
    np.save(tmp_path / "wide.npy", tokens.astype(np.int64))
    tokens.astype("<u4").tofile(tmp_path / "wide.bin")
    for path, size in (
        (corpus / "tokens.bin", 1024),
        (tmp_path / "wide.npy", 1024),
        (tmp_path / "wide.bin", 70_000),
    ):
        found = open_tokens(path, size)
        assert isinstance(found, np.memmap) and (found == tokens).all()


def test_files_are_one_after_the_other(tmp_path):
    parts = [np.arange(5), np.arange(5, 7), np.arange(7, 20)]
    paths = [tmp_path / f"{index}.npy" for index in range(3)]
    for path, part in zip(paths, parts, strict=True):
        np.save(path, part)
    joined = JoinedTokens(paths, 20)
    places = np.array([[3, 4, 5, 6], [7, 19, 0, 6]])
    assert len(joined) == 20 and (joined[places] == places).all()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*tokens of .* files")
def test_the_samples_are_those_of_the_same_texts(tmp_path, corpus):
    """Two halves of a corpus's tokens train as the corpus does."""
    tokens = np.fromfile(corpus / "tokens.bin", "<u2")
    data = tmp_path / "halves"
    data.mkdir()
    (data / "tokenizer.json").write_bytes((corpus / "tokenizer.json").read_bytes())
    tokens[:5_001].tofile(data / "a.bin")
    np.save(data / "b.npy", tokens[5_001:])
    entry, profile = GPT2, made_up_profile("gpt2-tiny")
    files = (str(data / "a.bin"), str(data / "b.npy"))
    settings = Settings(steps=4, learning_rate=1e-2, data=files, every=2, **entry.in_settings)
    plans = {"whole": chain_plan("gpt2-tiny", [0, 6], 4), "cut": chain_plan("gpt2-tiny", [0, 3, 6], 2)}
    losses = {name: run(tmp_path / name, plan, settings, profile)[1] for name, plan in plans.items()}
    assert losses["cut"] == pytest.approx(losses["whole"], rel=2e-6)
    joined = replace(settings, data=(str(corpus / "tokens.bin"),))
    assert run(tmp_path / "joined", plans["whole"], joined, profile)[1] == losses["whole"]
    done = RunFolder(tmp_path / "whole" / "run")
    assert sorted(path.name for path in done.path.glob("*token*")) == [
        "token-files.json",
        "token-places.json",
    ]
    gone_on = replace(settings, resume_from=str(done.checkpoints / "step-000002"))
    assert run(tmp_path / "on", plans["cut"], gone_on, profile)[1] == pytest.approx(
        losses["whole"][2:], rel=2e-6
    )


def test_a_hash_knows_other_bytes_and_other_lengths(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(bytes(1000))
    first = partial_sha256(path)
    path.write_bytes(bytes(999) + b"\1")
    second = partial_sha256(path)
    path.write_bytes(bytes(1002))
    assert len({first, second, partial_sha256(path)}) == 3


@pytest.mark.parametrize(
    ("name", "make", "reason"),
    [
        (
            "a.npy",
            lambda path: np.save(path, np.zeros((2, 3), np.uint16)),
            "uint16 of 2 dimensions; give integers",
        ),
        ("a.npy", lambda path: np.save(path, np.zeros(9)), "float64 of 1 dimensions; give integers"),
        ("a.npy", lambda path: path.write_bytes(b"nothing"), "cannot be mapped .*; give flat ids"),
        ("a.bin", lambda path: path.write_bytes(bytes(7)), "cannot be mapped .*a .bin of uint16"),
        ("a.bin", lambda path: path.write_bytes(b""), "cannot be mapped"),
        (
            "a.bin",
            lambda path: np.full(9, 60_000, "<u2").tofile(path),
            "holds the id 60,000, and the vocabulary has",
        ),
        ("a.npy", lambda path: np.save(path, np.full(9, -1)), "holds the id -1"),
        *(
            (
                "a.bin",
                lambda path, wide=wide: np.arange(1, 99, dtype=wide).tofile(path),
                "has a 0 after each id of 2 bytes, as where ids were written in more; write uint16 for",
            )
            for wide in ("<u4", "<i8")
        ),
    ],
)
def test_what_holds_no_tokens_is_refused_in_one_line(tmp_path, corpus, name, make, reason):
    (tmp_path / "tokenizer.json").write_bytes((corpus / "tokenizer.json").read_bytes())
    make(tmp_path / name)
    with pytest.raises(InputError, match=reason) as error:
        read_data([tmp_path / name], GPT2)
    assert "\n" not in str(error.value) and str(tmp_path / name) in str(error.value)


def test_ids_that_come_late_are_refused_where_they_are_read(tmp_path):
    ids = np.zeros(3 << 20, np.uint16)
    ids[-1] = 5_000
    np.save(tmp_path / "late.npy", ids)
    joined = JoinedTokens([tmp_path / "late.npy"], 1024)
    assert joined[np.arange(10)].tolist() == [0] * 10
    with pytest.raises(InputError, match="holds the id 5,000"):
        joined[np.array([len(ids) - 1])]


@pytest.mark.slow
def test_from_the_command_line(tmp_path, capsys, monkeypatch, corpus):
    monkeypatch.chdir(tmp_path)
    shell = Shell(tmp_path, capsys)
    assert shell("init --emulate 0.5,0.3 -o emulated.toml").code == 0
    line = (
        "run --model gpt2-tiny --cluster emulated.toml --global-batch-size 8 --no-proof --profile-budget 0.5 "
        "--run-folder done --json"
    )
    result = shell(f"{line} --data {corpus / 'tokens.bin'} --steps 2")
    assert result.code == 0, result.err
    assert "tokens of 1 files, mapped where they are" in result.err
    assert json.loads((tmp_path / "done" / "data.json").read_text())["kind"] == "tokens"
    result = shell(f"{line} --steps 3 --resume done")
    assert result.code == 0, result.err
    np.zeros(9_000, "<u2").tofile(tmp_path / "alone.bin")
    result = shell(f"{line} --data alone.bin --steps 2")
    assert (
        result.code == 2
        and "brings no tokenizer, so nothing says what the ids of alone.bin mean" in result.err
    )
    result = shell(f"{line} --data {corpus / 'tokens.bin'} --steps 2 --pack --run-folder other")
    assert result.code == 2 and "--pack is for chats and text, and" in result.err
