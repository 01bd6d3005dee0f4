"""Trained adapters out of a checkpoint: as a PEFT folder, or merged into the weights of their base."""

from pathlib import Path

import torch
from torch import Tensor

from hetpipe.models.adapter_folder import write_adapter_folder
from hetpipe.models.adapters import is_adapter, merged_weights, with_adapters
from hetpipe.models.chain import ChainModel
from hetpipe.models.huggingface import ModelSpec
from hetpipe.training import checkpoint
from hetpipe.training.checkpoint_weights import fill, read_weights, whole_or_nothing
from hetpipe.training.frozen_base import base_hashes, check_base


def export_adapter(source: Path, target: Path, spec: ModelSpec, base: str) -> None:
    """Write the adapters of a checkpoint as a PEFT folder.

    spec: of the base. base: where peft finds it.

    Raises: InputError if the folder cannot be written.
    """
    manifest = checkpoint.read_manifest(source)
    assert manifest.lora is not None
    with whole_or_nothing(target):
        write_adapter_folder(target, with_adapters(spec, manifest.lora), _adapters(source), base)


def export_merged(source: Path, target: Path, spec: ModelSpec) -> None:
    """Write the base of a checkpoint's adapters, with them merged into its weights, as Hugging Face folder.

    Raises: InputError if the base is another by now, or the folder cannot be written.
    """
    manifest = checkpoint.read_manifest(source)
    assert manifest.lora is not None
    chain = ChainModel.from_spec(with_adapters(spec, manifest.lora))
    layers = chain.materialise(range(chain.num_layers), manifest.seed)
    check_base(manifest.base, base_hashes(chain, layers, manifest.seed), source)
    parameters = layers.owned_parameters()
    with torch.no_grad():
        for name, value in _adapters(source).items():
            parameters[name].copy_(value)
    model = spec.build_as_saved()
    fill(model, merged_weights(layers.model), source)
    with whole_or_nothing(target):
        model.save_pretrained(target)  # type: ignore[operator]  # nn.Module would call it a Tensor or Module


def _adapters(source: Path) -> dict[str, Tensor]:
    return {name: value for name, value in read_weights(source).items() if is_adapter(name)}
