"""Small checkpoints whose elements are all of one value, so that a torn one shows."""

import torch

from hetpipe.training.checkpoint import Manifest, begin, commit, read_layer, read_manifest, write_layer


def manifest_of(layers, *, step=10):
    return Manifest(
        model="toy",
        step=step,
        samples_seen=16 * step,
        seed=1,
        sequence_length=64,
        vocabulary_sha256="0" * 64,
        layers=tuple(layers),
        torch_version=str(torch.__version__),
        optimizer={"name": "adamw", "lr": 1e-4, "betas": [0.9, 0.999]},
        plan=None,
    )


def save(root, *, step=10, value=1.0, vocabulary=None):
    """A checkpoint of two layers, every element of which is value."""
    folder = begin(root, step)
    layers = [
        write_layer(
            folder, layer, {f"{layer}.{name}": torch.full((3, 2), value) for name in ("w", "w.exp_avg")}
        )
        for layer in range(2)
    ]
    return commit(
        folder, manifest_of(layers, step=step), {"vocabulary.json": vocabulary} if vocabulary else None
    )


def value_of(folder):
    """The one value of a checkpoint; fails if it is torn."""
    manifest = read_manifest(folder)
    elements = {
        element
        for layer in range(2)
        for tensor in read_layer(folder, manifest, layer).values()
        for element in tensor.flatten().tolist()
    }
    assert len(elements) == 1
    return elements.pop()
