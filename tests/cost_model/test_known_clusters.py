"""Clusters that come with hetpipe are taken by name; a path stays a path."""

from pathlib import Path

import pytest

from cost_model.cluster_file import read_cluster
from cost_model.errors import InputError
from cost_model.known_clusters import cluster_path, known_clusters


def test_a_cluster_is_read_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert read_cluster("four-unequal").name == "four-unequal"
    assert cluster_path(Path("hap")) == known_clusters()["hap"]


def test_a_file_of_that_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hap").write_text("name = 1")
    assert cluster_path("hap") == Path("hap")


@pytest.mark.parametrize("given", ["cluster.toml", "./hap", "a/hap", "/hap", "hap.toml", ""])
def test_what_looks_like_a_path_is_one(given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert cluster_path(given) == Path(given)


def test_a_word_that_is_neither_is_refused_with_the_nearest_name(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r'no cluster of that name; did you mean "four-unequal"\?'):
        read_cluster("four-unequl")
    with pytest.raises(InputError, match="known: cephalo, consumer-lab"):
        read_cluster("zzz")
