from pathlib import Path

import pytest

from cost_model.cluster_file import cluster_from_data
from cost_model.errors import InputError
from hetpipe.hosts.agreement import Facts, compare, contents_sha256, facts_of

CLUSTER = cluster_from_data(
    {
        "network": {"bandwidth": "1 Gbit/s", "latency": "1 ms"},
        "nodes": [
            {"name": name, "host": host, "devices": [{"kind": "emulated", "memory": "1 GiB"}]}
            for name, host in (("big", "h0"), ("small", "h1"))
        ],
    },
    "test",
)


def facts(node: str, **alike: str) -> Facts:
    return Facts(node, f"host-of-{node}", {"torch": "2.13.0", "data": "aa", **alike})


def test_the_same_everywhere_is_agreed():
    assert compare([facts("big"), facts("small")]) == []


def test_one_line_names_all_that_differs_and_where():
    with pytest.raises(InputError) as caught:
        compare([facts("big"), facts("mid"), facts("small", torch="2.12.0", data="bb")])
    assert str(caught.value) == (
        "data is bb on small (host-of-small) and aa on big (host-of-big), torch is 2.12.0 on small "
        "(host-of-small) and 2.13.0 on big (host-of-big); copy the same texts to all hosts, and give them in "
        "the same order; install the same versions on all hosts"
    )


def test_another_line_on_a_host_is_refused():
    with pytest.raises(InputError, match=r"--dtype is bf16 on small .* and not given on big .*the same line"):
        compare([facts("big"), facts("small", **{"--dtype": "bf16"})])


def test_options_that_the_leader_decides_may_differ_and_are_told():
    line, other = {"--steps": "60", "--seed": "0"}, {"--steps": "100", "--seed": "0"}
    (told,) = compare([facts("big", **line), facts("small", **other), facts("mid", **line)])
    assert told == ("--steps is 100 on small (host-of-small) and 60 on big (host-of-big), whose line counts")


def test_drivers_may_differ_and_are_told_and_a_host_without_gpus_has_none():
    assert compare([facts("big", driver="550.1", NCCL="2.27"), facts("small")]) == []
    (told,) = compare([facts("big", driver="550.1"), facts("small", driver="560.2")])
    assert told.startswith("driver is 560.2 on small")


def test_facts_hold_versions_and_contents(tmp_path: Path):
    (tmp_path / "a.txt").write_text("one")
    node = CLUSTER.nodes[0]
    found = facts_of(node, CLUSTER, {"data": [tmp_path / "a.txt"], "adapter": []}, {"--dtype": None})
    assert found.node == "big"
    assert set(found.alike) == {"hetpipe", "torch", "python", "cluster.toml", "data"}
    assert Facts.of_json(found.to_json()) == found


def test_contents_of_folders_are_told_apart(tmp_path: Path):
    for name, files in (("one", "ab"), ("two", "ab"), ("three", "ac")):
        (tmp_path / name / "deep").mkdir(parents=True)
        for file in files:
            (tmp_path / name / "deep" / file).write_text(file)
    one, two, three = (contents_sha256([tmp_path / name]) for name in ("one", "two", "three"))
    assert one == two != three
    with pytest.raises(InputError, match=r"gone\.txt: cannot be read"):
        contents_sha256([tmp_path / "gone.txt"])


def test_what_is_hidden_in_a_folder_is_no_part_of_it(tmp_path: Path):
    """As `hf download --local-dir` and git leave it there; where the folder lies does not matter."""
    folder = tmp_path / ".cache" / "model"
    (folder / "code").mkdir(parents=True)
    (folder / "code" / "model.py").write_text("pass")
    before = contents_sha256([folder])
    for name in (".cache/huggingface/x.metadata", ".gitattributes", "code/__pycache__/model.pyc"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("1700000000.1")
    assert contents_sha256([folder]) == before
    (folder / "code" / "model.py").write_text("other")
    assert contents_sha256([folder]) != before
    (folder / ".own").write_text("a")
    assert contents_sha256([folder / ".own"]) != contents_sha256([])
