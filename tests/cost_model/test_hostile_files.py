"""Files that nobody means well with end in one line, at once and without much memory."""

import json
import os
import tracemalloc
from pathlib import Path

import pytest

from cost_model.cluster_file import read_cluster
from cost_model.errors import InputError
from cost_model.layer_profile import LayerTimes
from cost_model.profile import profile_text, read_profile
from cost_model.strict_files import read_json, read_text, write_atomically
from small_case import CLUSTER_TOML, small_profile

ESCAPE = "emu\\u001b]0;title\\u0007\\u001b[31mred"
NETWORK = '[network]\nbandwidth = "1 Gbit/s"\nlatency = "1 us"\n'


def cluster(memory: str = '"1 GiB"', count: str = "1", kind: str = "cpu", speed: str = "1.0") -> str:
    device = f'devices = [{{ kind = "{kind}", memory = {memory}, count = {count}, speed = {speed} }}]'
    return f'{NETWORK}[[nodes]]\nname = "a"\n{device}\n'


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (cluster(memory='"1e400 GiB"'), "is out of range"),
        (cluster(memory='"1e9999999 GiB"'), "is out of range"),
        (cluster(memory='"1e-999999999 B"'), "is out of range"),
        (cluster(count="1000000000"), "has 1,000,000,000 devices; 100,000 are the most"),
        (cluster(count="9" * 5000), "thousands of digits"),
        (cluster(speed="1e18"), "speed: input should be less than or equal to"),
        (cluster(speed="1e-18"), "speed: input should be greater than or equal to"),
        (cluster(speed="nan"), "speed: input should be"),
        (cluster(kind=ESCAPE), r"holds '\x1b'; take it out"),
        (f'"{ESCAPE}" = 1\n' + cluster(), r"holds '\x1b'; take it out"),
        ("x = " + "[" * 5000 + "]" * 5000, "nested too deeply"),
        ("x = " + "{a=" * 5000 + "1" + "}" * 5000, "nested too deeply"),
        (".".join("a" * 3000) + " = 1", "nested too deeply"),
        ("k" * 10**6 + " = 1\n" + cluster(), "has a text of 1,000,000 characters"),
        ("#" * 17 * 2**20, "larger than 16,777,216 bytes"),
    ],
    ids=range(15),
)
def test_a_cluster_file_is_refused_in_one_line(tmp_path, text, reason):
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        read_cluster(path)
    message = str(caught.value)
    assert reason in message and str(path) in message
    assert len(message) < 500 and message.isprintable()


def test_a_key_of_many_parts_is_refused_before_it_is_parsed(tmp_path):
    path = tmp_path / "cluster.toml"
    for text in (
        ".".join("a" * 20_000) + " = 1",
        f"[{' . '.join('a' * 20_000)}]",
        "x = 1\n" + "'a'." * 200 + "b = 1",
    ):
        path.write_text(text)
        tracemalloc.start()
        with pytest.raises(InputError, match="nested too deeply"):
            read_cluster(path)
        assert tracemalloc.get_traced_memory()[1] < 50 * 2**20
        tracemalloc.stop()


def test_a_bandwidth_below_any_is_refused(tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text(cluster().replace("1 Gbit/s", "0.000000000000000000000000000001e-30 bit/s"))
    with pytest.raises(InputError, match="a byte would take 30 years; give more"):
        read_cluster(path)


def test_times_that_no_device_has_are_refused():
    assert LayerTimes((0.0,), (1e-15,)).forward_s == (0.0,)
    with pytest.raises(InputError, match="no device is as fast, give 0"):
        LayerTimes((1e-16,), (0.0,))


def test_a_text_of_many_dots_is_no_key_of_many_parts(tmp_path):
    (tmp_path / "cluster.toml").write_text(f'name = "{"a." * 200}"\n{cluster()}# {"." * 500}\n')
    assert read_cluster(tmp_path / "cluster.toml").devices


def test_a_good_cluster_file_with_many_devices_is_read(tmp_path):
    (tmp_path / "cluster.toml").write_text(cluster(count="20000", kind="emu"))
    assert len(read_cluster(tmp_path / "cluster.toml").devices) == 20000


def test_a_device_without_an_end_is_read_no_further_than_a_file_may_go():
    with pytest.raises(InputError, match="/dev/zero: larger than 1,000 bytes"):
        read_text(Path("/dev/zero"), 1000, pipe=True)


def test_a_pipe_and_a_device_are_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")  # nobody ever writes into it
    for path in (tmp_path / "pipe", Path("/dev/zero"), Path("/dev/null")):
        with pytest.raises(InputError, match=f"{path}: is a pipe or a device, .* write its content"):
            read_text(path)


def test_many_wrong_entries_are_not_each_described(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(json.loads(profile_text(small_profile())) | {"layers": [0] * 10**6}))
    tracemalloc.start()
    with pytest.raises(InputError, match="has a list of 1,000,000 entries"):
        read_profile(path)
    assert tracemalloc.get_traced_memory()[1] < 100 * 2**20
    tracemalloc.stop()


def test_escape_codes_of_layers_are_refused(tmp_path):
    path = tmp_path / "profile.json"
    data = json.loads(profile_text(small_profile()))
    data["layers"][1]["name"] = "\x1b[2J"
    path.write_text(json.dumps(data))
    with pytest.raises(InputError, match=r"holds '\\x1b'; take it out"):
        read_profile(path)


def test_texts_in_any_language_and_line_ends_are_read(tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_bytes(CLUSTER_TOML.replace("\n", "\r\n").encode())
    assert read_cluster(path).devices
    path.write_bytes('{"a": "Größe 大\\n\\tzwei"}\r\n'.encode())
    assert read_json(path) == {"a": "Größe 大\n\tzwei"}
    for content, read in ((CLUSTER_TOML, read_cluster), ('{"a": 1}', read_json)):
        path.write_text("\ufeff" + content)  # as editors on Windows write it
        assert read(path)


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1, "b": 2, "a": 3}',
        '{"a": 1, "a": true}',
        '{"a": [1], "a": [1.0]}',
        '[{"b": {"a": {}, "a": 3}}]',
    ],
)
def test_a_key_that_is_there_twice_with_other_values_is_refused(tmp_path, text):
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(InputError, match=r"plan\.json: key 'a' is there twice; leave one of them out"):
        read_json(path)


def test_a_key_that_is_there_twice_with_the_same_value_is_taken(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"a": {"x": 1, "y": [NaN]}, "b": 2, "a": {"y": [NaN], "x": 1}, "b": 2}')
    assert read_json(path).keys() == {"a", "b"} and read_json(path)["b"] == 2


def test_a_file_is_written_beside_links_and_leaves_nothing(tmp_path, monkeypatch):
    """The name that it has meanwhile is another each time: a link in its place would be refused."""
    victim, made = tmp_path / "victim", []
    victim.write_text("mine")
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda source, target: made.append(source) or replace(source, target))
    target = tmp_path / "plan.json"
    for _ in range(2):
        write_atomically(target, "plan")
    assert made[0] != made[1] and target.read_text() == "plan"
    monkeypatch.setattr("secrets.token_hex", lambda size: "known")
    Path(str(tmp_path / ".plan.json.known.tmp")).symlink_to(victim)
    with pytest.raises(FileExistsError):
        write_atomically(target, "other")
    assert victim.read_text() == "mine" and target.read_text() == "plan"


def test_what_could_not_be_written_is_removed(tmp_path):
    with pytest.raises(OSError, match=r"Is a directory|not empty"):
        write_atomically(tmp_path, "text")
    with pytest.raises(FileNotFoundError) as named:
        write_atomically(tmp_path / "none" / "plan.json", "text")
    assert (named.value.filename, named.value.filename2) == (str(tmp_path / "none" / "plan.json"), None)
    with pytest.raises(UnicodeEncodeError):
        write_atomically(tmp_path / "plan.json", "\ud800")
    assert list(tmp_path.iterdir()) == [] and not list(tmp_path.parent.glob(f".{tmp_path.name}.*"))
