"""The cluster files that come with hetpipe, and the profile that is made for them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cost_model.catalogue import accelerator
from cost_model.cluster import EMULATED
from cost_model.cluster_file import read_cluster
from cost_model.known_clusters import known_clusters, source_of
from cost_model.profile import read_profile
from hetpipe import cli
from places import EXAMPLES

FOLDER = EXAMPLES / "clusters"
CLUSTERS = list(known_clusters().values())
PUBLISHED = [path for path in CLUSTERS if path.stem != "four-unequal"]


def test_there_are_clusters():
    assert {path.stem for path in CLUSTERS} >= {
        "cephalo", "consumer-lab", "hap", "heterog", "hetpipe", "poplar-a", "poplar-b", "poplar-c"
    }  # fmt: skip


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)
def test_a_cluster_is_named_as_its_file_and_says_where_it_is_from(path: Path):
    cluster = read_cluster(path)
    assert cluster.name == path.stem
    assert source_of(path)
    assert f"`{path.stem}`" in (FOLDER / "README.md").read_text(encoding="utf-8")


def test_cluster_files_lie_where_they_are_found_by_name():
    assert list(EXAMPLES.glob("clusters/*.toml")) == []


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.stem)
def test_every_kind_is_in_the_catalogue_with_that_memory(path: Path):
    for device in read_cluster(path).devices:
        assert device.kind != EMULATED
        assert device.memory_bytes == accelerator(device.kind).memory_bytes, device.name


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["poplar-b", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("cephalo", "heterog"))],
)
def test_the_two_commands_of_the_readme_compare_strategies(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    profile = str(tmp_path / "profile.json")
    script = [sys.executable, str(FOLDER / "estimated_profile.py"), name, "-o", profile]
    subprocess.run(script, check=True, cwd=FOLDER.parents[1])
    kinds = read_profile(Path(profile)).kinds
    assert {device.kind for device in read_cluster(name).devices} <= kinds.keys()
    line = ["compare", "--profile", profile, "--cluster", name, "--global-batch-size", "64", "--json"]
    assert cli.main([*line, "--no-proof"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["gain"]["total"] >= 1
    assert found["strategies"][-1]["fits"]
