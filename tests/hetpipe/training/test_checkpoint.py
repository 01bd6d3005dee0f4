"""Checkpoints are complete or absent, verified when read, and Hugging Face folders when exported."""

import json
import os
import random
import re
import subprocess
import sys
import textwrap
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from torch import nn

from checkpoints import manifest_of, save, value_of
from cost_model.errors import InputError
from cost_model.strict_files import canonical_sha256
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runtime.optimizer import OPTIMIZER_STATES
from hetpipe.training import checkpoint
from hetpipe.training.checkpoint import (
    begin,
    commit,
    discard_unfinished,
    latest,
    read_layer,
    read_manifest,
    write_layer,
)
from hetpipe.training.checkpoint_damage import damage_of
from hetpipe.training.checkpoint_weights import export_huggingface
from hetpipe.training.resumption import find_checkpoint
from places import SUPPORT


def test_what_is_written_is_read(tmp_path):
    vocabulary = tmp_path / "vocabulary.json"
    vocabulary.write_text("{}")
    folder = begin(tmp_path / "checkpoints", 10)
    weight = torch.randn(4, 4, dtype=torch.bfloat16)
    layer = write_layer(folder, 0, {"a.weight": weight.T, "a.weight.exp_avg": torch.zeros(4, 4)})
    manifest = manifest_of([layer])
    folder = commit(folder, manifest, {"vocabulary.json": vocabulary})

    assert folder == tmp_path / "checkpoints" / "step-000010" == latest(tmp_path / "checkpoints")
    assert sorted(p.name for p in folder.iterdir()) == [
        "layer-000.safetensors",
        "manifest.json",
        "vocabulary.json",
    ]
    found = read_manifest(folder)
    assert found == replace(manifest, others=found.others)
    assert [file.file for file in found.others] == ["vocabulary.json"]
    assert damage_of(folder) is None
    assert torch.equal(read_layer(folder, manifest, 0)["a.weight"], weight.T)


def test_only_the_named_tensors_are_read(tmp_path):
    folder = save(tmp_path)
    assert list(read_layer(folder, read_manifest(folder), 1, names=["1.w"])) == ["1.w"]
    assert read_layer(folder, read_manifest(folder), 1, names=[]) == {}
    with pytest.raises(InputError, match=r"does not hold '0\.w'"):
        read_layer(folder, read_manifest(folder), 1, names=["0.w"])


def test_latest_is_the_newest_complete_checkpoint(tmp_path):
    assert latest(tmp_path / "absent") is None
    save(tmp_path, step=999_999)
    newest = save(tmp_path, step=1_000_000)
    begin(tmp_path, 2_000_000)
    (tmp_path / "step-2000000").mkdir()
    (tmp_path / "step-2000000" / "manifest.json").write_text("{")
    short = save(tmp_path, step=3_000_000)
    (short / "layer-000.safetensors").write_bytes(b"")
    assert latest(tmp_path) == newest


def test_same_step_is_replaced(tmp_path):
    assert save(tmp_path, value=1.0) == save(tmp_path, value=2.0)
    assert value_of(latest(tmp_path)) == 2.0
    assert [path.name for path in tmp_path.iterdir()] == ["step-000010"]


def test_damaged_or_missing_layer_is_refused(tmp_path):
    folder = save(tmp_path)
    manifest = read_manifest(folder)
    path = folder / "layer-001.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(
        InputError, match=f"expected sha256 {manifest.layers[1].sha256}, found [0-9a-f]{{64}}"
    ) as error:
        read_layer(folder, manifest, 1)
    assert str(path) in str(error.value)
    path.unlink()
    with pytest.raises(InputError, match="cannot be read"):
        read_layer(folder, manifest, 1)


def test_commit_without_all_layers_is_refused(tmp_path):
    folder = begin(tmp_path, 10)
    layer = write_layer(folder, 0, {"w": torch.zeros(1)})
    with pytest.raises(InputError, match=r"layer-001\.safetensors does not have"):
        commit(folder, manifest_of([layer, replace(layer, file="layer-001.safetensors")]))
    assert latest(tmp_path) is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"format": "hetpipe.checkpoint/3"}, "format is 'hetpipe.checkpoint/3', this version reads"),
        ({"sead": 1}, 'unknown key "sead"; did you mean "seed"'),
        ({"seed": "1"}, "seed: input should be a valid integer"),
        ({"seed": -1}, "seed is -1, which no run has"),
        ({"step": 0}, "step is 0, which no run has"),
        ({"step": 10**400}, "step is 1000"),
        ({"samples_seen": 9}, "samples_seen is 9, which no run has"),
        ({"samples_seen": 10**16}, "samples_seen is 10000000000000000, which no run has"),
        ({"others": [{"file": "../x", "sha256": "", "bytes": 1}]}, r"beside the layers is '\.\./x'"),
        ({"layers": [{"file": "../x", "sha256": "", "bytes": 1}]}, r"file of layer 0 is '\.\./x'"),
        ({"layers": [{"file": "layer-000.safetensors", "bytes": 1}]}, r'"layers\[0\]\.sha256" is missing'),
        ({"step": ...}, '"step" is missing'),
    ],
)
def test_manifest_is_read_strictly(tmp_path, change, reason):
    content = {"format": checkpoint.FORMAT} | asdict(manifest_of([])) | change
    content = {key: value for key, value in content.items() if value is not ...}
    content["sha256"] = canonical_sha256(content)
    (tmp_path / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match=reason) as error:
        read_manifest(tmp_path)
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)


def test_a_manifest_without_a_hash_is_one_of_before(tmp_path):
    folder = save(tmp_path)
    expected = read_manifest(folder)
    content = json.loads((folder / "manifest.json").read_text())
    for key in ("sha256", "others"):
        del content[key]
    before = json.dumps(content | {"format": checkpoint.FORMAT_BEFORE})
    (folder / "manifest.json").write_text(before)
    assert read_manifest(folder) == expected and damage_of(folder) is None
    (folder / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match="its sha256 is another; choose another checkpoint"):
        read_manifest(folder)


def test_a_manifest_is_of_the_step_of_its_folder(tmp_path):
    folder = save(tmp_path, step=4)
    folder.rename(tmp_path / "step-000006")
    with pytest.raises(InputError, match="is of step 4, which its folder is not"):
        read_manifest(tmp_path / "step-000006")
    (tmp_path / "step-000006").rename(tmp_path / "kept for the paper")
    assert read_manifest(tmp_path / "kept for the paper").step == 4


def test_every_flipped_bit_is_found(tmp_path):
    vocabulary = tmp_path / "vocabulary.json"
    vocabulary.write_text('{"a": 1}')
    folder = save(tmp_path / "checkpoints", vocabulary=vocabulary)
    generator = random.Random(0)
    for path in sorted(folder.iterdir()):
        whole = path.read_bytes()
        for place in range(len(whole)):
            flipped = bytearray(whole)
            flipped[place] ^= 1 << generator.randrange(8)
            path.write_bytes(flipped)
            damage = damage_of(folder)
            assert damage is not None and "\n" not in damage, (path.name, place)
        path.write_bytes(whole)
    assert damage_of(folder) is None


def cut(folder):
    os.truncate(folder / "layer-001.safetensors", 50)


def say_another_step(folder):
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"step": 6', '"step": 4'))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (cut, r"layer-001\.safetensors is damaged: it has 50 bytes, \d+ were written"),
        (
            lambda folder: (folder / "layer-000.safetensors").unlink(),
            r"layer-000\.safetensors cannot be read",
        ),
        (lambda folder: (folder / "vocabulary.json").unlink(), r"vocabulary\.json cannot be read \(No such"),
        (lambda folder: (folder / "vocabulary.json").write_text("{ }"), r"vocabulary\.json is damaged"),
        (lambda folder: (folder / "manifest.json").write_text(""), r"manifest\.json: not JSON"),
        (lambda folder: (folder / "manifest.json").write_text("[" * 10**5), "nested too deeply"),
        (lambda folder: (folder / "manifest.json").write_text("9" * 5000), "thousands of digits"),
        (say_another_step, "its sha256 is another"),
    ],
    ids=["cut", "lost", "no vocabulary", "vocabulary", "empty", "nested", "digits", "step"],
)
def test_a_damaged_newest_one_is_named_and_an_older_whole_one_taken(tmp_path, damage, words):
    vocabulary = tmp_path / "vocabulary.json"
    vocabulary.write_text("{}")
    run = RunFolder(tmp_path / "run")
    kept = [save(run.checkpoints, step=step, vocabulary=vocabulary) for step in (2, 4, 6)]
    damage(kept[2])
    (kept[1] / "layer-000.safetensors").write_bytes(b"")
    for resume, folder in (("auto", run), (str(run.path), None)):
        told: list[str] = []
        found = find_checkpoint(resume, folder, tmp_path, "toy", tell=told.append)
        assert found == kept[0]
        assert len(told) == 2 and re.search(words, told[0]) and "step-000006" in told[0]
        assert all(line.endswith("; going on from step-000002, the newest whole one") for line in told)
    with pytest.raises(InputError, match=words) as error:
        find_checkpoint(str(kept[2]), None, tmp_path, "toy")
    assert str(error.value).endswith(f"; the newest whole one is {kept[0]}")


def test_where_no_checkpoint_is_whole_none_is_taken(tmp_path):
    run = RunFolder(tmp_path / "run")
    cut(save(run.checkpoints))
    with pytest.raises(
        InputError, match=r"is damaged: .*, and no checkpoint of .* is whole; begin in another"
    ):
        find_checkpoint("auto", run, tmp_path, "toy")


def test_the_newest_are_kept_and_a_kill_while_others_go_leaves_none_half_there(tmp_path, monkeypatch):
    for step in (8, 9, 10, 1_000_000):
        save(tmp_path, step=step)
    save(tmp_path, step=7).rename(tmp_path / ".step-000007.aside-0a")
    checkpoint.keep_newest(tmp_path, 3)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(os, "unlink", killed)
        checkpoint.keep_newest(tmp_path, 2)
    assert [folder.name for _, folder in checkpoint.written(tmp_path)] == ["step-1000000", "step-000010"]
    assert all(damage_of(folder) is None for _, folder in checkpoint.written(tmp_path))
    discard_unfinished(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".step-000007.aside-0a",
        "step-000010",
        "step-1000000",
    ]


def killed(*_: object, **__: object) -> None:
    raise Killed


def test_links_in_place_of_unfinished_folders_are_not_followed(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "mine").write_text("")
    root = tmp_path / "checkpoints"
    root.mkdir()
    for name in (".step-000009.tmp-ab", ".step-000008.old-ab"):
        (root / name).symlink_to(tmp_path / "elsewhere")
    (root / ".step-000007.tmp-ab").write_text("")
    discard_unfinished(root)
    assert list(root.iterdir()) == [] and (tmp_path / "elsewhere" / "mine").exists()


@pytest.mark.parametrize("content", ["", "[]", "\udcff"])
def test_unreadable_manifest_is_refused(tmp_path, content):
    (tmp_path / "manifest.json").write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(InputError):
        read_manifest(tmp_path)


class Killed(BaseException):
    """Stands for a kill: no handler of the code under test catches it."""


def test_stop_before_any_change_on_disk_leaves_the_old_or_the_new_checkpoint(tmp_path, monkeypatch):
    calls = {}

    def stop_at(function, instant):
        def stopping(*args, **kwargs):
            calls["left"] = calls.get("left", instant) - 1
            if calls["left"] < 0:
                raise Killed
            return function(*args, **kwargs)

        return stopping

    values = set()
    for instant in range(100):
        root = tmp_path / str(instant)
        save(root, value=1.0)
        calls.clear()
        with monkeypatch.context() as patch:
            for module, name in [(os, "rename"), (os, "fsync"), (os, "mkdir"), (os, "unlink"), (os, "rmdir")]:
                patch.setattr(module, name, stop_at(getattr(module, name), instant))
            try:
                save(root, value=2.0)
                stopped = False
            except Killed:
                stopped = True
        value = value_of(latest(root))
        values.add(value)
        discard_unfinished(root)
        assert [path.name for path in root.iterdir()] == ["step-000010"]
        assert value_of(latest(root)) == value
        if not stopped:
            break
    assert values == {1.0, 2.0} and not stopped and value == 2.0 and instant > 8


def test_everything_is_on_disk_before_the_name_that_promises_it(tmp_path, monkeypatch):
    """A power cut after `save` loses nothing, and one before leaves no complete name over missing bytes."""
    vocabulary = tmp_path / "vocabulary.json"
    vocabulary.write_text("{}")
    root, calls = tmp_path / "checkpoints", []
    fsync, rename = os.fsync, os.rename

    def recorded_fsync(descriptor):
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        calls.append("fsync " + ("folder" if path.name.startswith(".") else path.name))
        fsync(descriptor)

    def recorded_rename(source, target):
        calls.append(f"rename to {Path(target).name}")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "rename", recorded_rename)
    save(root, vocabulary=vocabulary)
    assert calls == [
        "fsync layer-000.safetensors",
        "fsync layer-001.safetensors",
        "fsync vocabulary.json",
        "fsync manifest.json",
        "fsync folder",
        "rename to step-000010",
        "fsync checkpoints",
    ]


def test_a_damaged_replaced_checkpoint_is_never_put_back(tmp_path):
    newer = save(tmp_path, value=2.0)
    older = newer.rename(tmp_path / ".step-000010.old-0a1b2c3d")
    save(tmp_path, value=3.0)
    for folder in (older, newer):
        (folder / "layer-001.safetensors").unlink()
    held = (newer / "layer-000.safetensors").read_bytes()
    discard_unfinished(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000010"]
    assert (newer / "layer-000.safetensors").read_bytes() == held
    assert latest(tmp_path) is None


@pytest.mark.slow
def test_latest_always_loads_after_a_kill_at_a_random_instant(tmp_path):
    # One interpreter forks the writers, since importing torch takes longer than the test.
    script = f"""
        import os, random, signal, sys, time
        from pathlib import Path
        sys.path.insert(0, {str(SUPPORT)!r})
        from checkpoints import save, value_of
        from hetpipe.training.checkpoint import discard_unfinished, latest

        root, random = Path({str(tmp_path)!r}), random.Random(0)
        save(root, step=1, value=0.0)
        seen = 0.0
        for _ in range(10):
            child = os.fork()
            if child == 0:
                value = seen
                while True:
                    value += 1.0
                    save(root, step=int(value) // 3 + 1, value=value)  # every step is replaced twice
            time.sleep(random.uniform(0.002, 0.2))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            found = value_of(latest(root))
            assert found >= seen, (found, seen)
            discard_unfinished(root)
            assert value_of(latest(root)) == found
            seen = found
        print("saved", seen)
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert float(result.stdout.split()[1]) > 0


def save_model(root, model):
    """Every parameter once, under its canonical name, as two layers with optimizer states."""
    parameters = dict(model.named_parameters())
    names = sorted(parameters)
    folder = begin(root, 1)
    layers = []
    for layer, held in enumerate([names[::2], names[1::2]]):
        tensors = {name: parameters[name] for name in held}
        states = {f"{name}.{state}": torch.ones(3) for name in held for state in OPTIMIZER_STATES}
        layers.append(write_layer(folder, layer, tensors | states))
    return commit(folder, manifest_of(layers, step=1))


def bert():
    from transformers.models.bert.configuration_bert import BertConfig
    from transformers.models.bert.modeling_bert import BertForPreTraining

    config = BertConfig(
        vocab_size=40,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=16,
    )
    return BertForPreTraining, config


@pytest.mark.slow
@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_exported_model_loads_in_transformers_and_is_equal(tmp_path, device):
    model_class, config = bert()
    torch.manual_seed(0)
    original = model_class(config).eval()
    folder = save_model(tmp_path / "checkpoints", original)
    with torch.device(device):
        model = model_class(config)
    export_huggingface(folder, tmp_path / "exported", model)
    modes = {path.stat().st_mode for path in (tmp_path / "exported").glob("*[sn]")}
    assert len(modes) == 1  # safetensors would let the owner alone read the weights

    loaded, info = model_class.from_pretrained(tmp_path / "exported", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    expected = original.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.state_dict().items())
    tokens = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        assert torch.equal(loaded.eval()(tokens).prediction_logits, original(tokens).prediction_logits)
    assert loaded.cls.predictions.decoder.weight is loaded.bert.embeddings.word_embeddings.weight


class Toy(nn.Module):
    """Two tied linear layers, with the one method of Hugging Face that export needs."""

    def __init__(self, width=3, bias=False):
        super().__init__()
        self.first, self.last = nn.Linear(3, width, bias=False), nn.Linear(3, width, bias=bias)
        self.last.weight = self.first.weight

    def save_pretrained(self, target):
        target.mkdir()


def test_export_keeps_tied_parameters_tied(tmp_path):
    original, model = Toy(), Toy()
    export_huggingface(save_model(tmp_path, original), tmp_path / "exported", model)
    assert model.first.weight is model.last.weight
    assert torch.equal(model.first.weight, original.first.weight)


@pytest.mark.parametrize(
    ("saved", "model", "reason"),
    [
        (Toy(bias=True), Toy(), r"holds 'last\.bias', which the model lacks"),
        (Toy(), Toy(bias=True), r"lacks 'last\.bias'"),
        (Toy(), Toy(width=4), r"holds 'first\.weight' with shape \(3, 3\), not \(4, 3\)"),
    ],
)
def test_export_to_another_model_is_refused(tmp_path, saved, model, reason):
    with pytest.raises(InputError, match=reason):
        export_huggingface(save_model(tmp_path, saved), tmp_path / "exported", model)
