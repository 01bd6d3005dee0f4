"""Splits that were proven are not proven again, until what decides it is another."""

import io
import json
import logging
from dataclasses import replace

import pytest

from cost_model.errors import CheckFailedError
from hetpipe.models import kept_proofs
from hetpipe.models.huggingface import model_spec
from hetpipe.models.split_check import CheckReport
from hetpipe.runs.cache import proofs_folder
from other_folders import save_other
from shell import Shell


@pytest.fixture
def checked(monkeypatch, tmp_path):
    """The names that were really checked; whether they pass is said by what is in `fails`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    names: list[str] = []
    real = kept_proofs.check_split

    def check(spec) -> CheckReport:
        names.append(spec.name)
        return real(spec)

    monkeypatch.setattr(kept_proofs, "check_split", check)
    return names


def test_a_folder_is_proven_once_whatever_lies_in_it(tmp_path, checked, monkeypatch):
    save_other(tmp_path / "mine", "OPTForCausalLM")
    spec = model_spec(str(tmp_path / "mine"))
    kept_proofs.require_split(spec)
    kept_proofs.require_split(spec)
    assert len(checked) == 1
    (path,) = proofs_folder().glob("*.json")
    assert json.loads(path.read_text())["model"] == spec.name

    kept_proofs.require_split(replace(spec, proof=spec.proof.replace("opt", "other")))
    assert len(checked) == 2
    monkeypatch.setattr(kept_proofs, "version", lambda name: "0")
    kept_proofs.require_split(spec)
    assert len(checked) == 3


def test_a_failure_is_not_kept(tmp_path, checked):
    save_other(tmp_path / "mine", "?RoFormerForMaskedLM")
    spec = model_spec(str(tmp_path / "mine"))
    for _ in range(2):
        with pytest.raises(CheckFailedError, match="split differs from whole"):
            kept_proofs.require_split(spec)
    assert len(checked) == 2 and not list(proofs_folder().glob("*"))


def test_transformers_says_a_warning_once(tmp_path, checked):
    save_other(tmp_path / "mine", "?BertLMHeadModel")
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logging.getLogger("transformers").addHandler(handler)
    try:
        with pytest.raises(CheckFailedError, match="is is_decoder missing"):
            kept_proofs.require_split(model_spec(str(tmp_path / "mine")))
    finally:
        logging.getLogger("transformers").removeHandler(handler)
    assert stream.getvalue().count("is_decoder") == 1


def test_proofs_are_listed_and_cleared(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    proofs_folder().mkdir(parents=True)
    (proofs_folder() / "one.json").write_text("{}")
    assert "kept: 1 proof of splits in" in Shell(tmp_path, capsys)("cache").out
    assert "removed: 1 proof of splits in" in Shell(tmp_path, capsys)("cache --clear").out
    assert not list(proofs_folder().glob("*"))
