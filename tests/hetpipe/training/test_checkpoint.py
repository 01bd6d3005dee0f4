"""Checkpoints are complete or absent, verified when read, and Hugging Face folders when exported."""

import json
import os
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
from hetpipe.runtime.optimizer import OPTIMIZER_STATES
from hetpipe.training import checkpoint
from hetpipe.training.checkpoint import (
    begin,
    commit,
    discard_unfinished,
    export_huggingface,
    latest,
    read_layer,
    read_manifest,
    write_layer,
)
from places import SUPPORT


def test_what_is_written_is_read(tmp_path):
    vocabulary = tmp_path / "vocabulary.json"
    vocabulary.write_text("{}")
    folder = begin(tmp_path / "checkpoints", 10)
    weight = torch.randn(4, 4, dtype=torch.bfloat16)
    layer = write_layer(folder, 0, {"a.weight": weight.T, "a.weight.exp_avg": torch.zeros(4, 4)})
    manifest = manifest_of([layer])
    folder = commit(folder, manifest, vocabulary)

    assert folder == tmp_path / "checkpoints" / "step-000010" == latest(tmp_path / "checkpoints")
    assert sorted(p.name for p in folder.iterdir()) == [
        "layer-000.safetensors",
        "manifest.json",
        "vocabulary.json",
    ]
    assert read_manifest(folder) == manifest
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
        ({"format": "hetpipe.checkpoint/2"}, "has format 'hetpipe.checkpoint/2'"),
        ({"sead": 1}, "sead: Unexpected keyword argument"),
        ({"seed": "1"}, "seed: Input should be a valid integer"),
        ({"layers": [{"file": "../x", "sha256": "", "bytes": 1}]}, r"file of layer 0 is '\.\./x'"),
        ({"layers": [{"file": "layer-000.safetensors", "bytes": 1}]}, r"layers\.0\.sha256"),
        ({"seed": None, "step": ...}, "step: Field required|step: Missing"),
    ],
)
def test_manifest_is_read_strictly(tmp_path, change, reason):
    content = {"format": checkpoint.FORMAT} | asdict(manifest_of([])) | change
    content = {key: value for key, value in content.items() if value is not ...}
    (tmp_path / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match=reason) as error:
        read_manifest(tmp_path)
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)


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
            time.sleep(random.uniform(0.002, 0.06))
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
