"""The weights of a checkpoint in a model: filled in, or saved as a Hugging Face folder."""

import shutil
import stat
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor, nn

from cost_model.errors import InputError
from hetpipe.models.quantized_modules import matrices_in
from hetpipe.models.quantized_weights import QuantizedParameter
from hetpipe.training.checkpoint import read_layer, read_manifest
from hetpipe.training.frozen_base import weight_sha256


def export_huggingface(folder: Path, target: Path, model: nn.Module) -> None:
    """Fill a Hugging Face model, on the meta device or the CPU, from a checkpoint and save it to a folder.

    Raises: InputError if the checkpoint's names or shapes are not the model's.
    """
    load_weights(folder, model)
    with whole_or_nothing(target):
        model.save_pretrained(target)  # type: ignore[operator]  # nn.Module would call it a Tensor or Module


@contextmanager
def whole_or_nothing(target: Path) -> Iterator[None]:
    """Save a model to a folder: nothing half-written is left; who may read its texts may read the weights.

    safetensors makes files that their owner alone may read.

    Raises: InputError if the folder cannot be written.
    """
    made = not target.exists()
    try:
        yield
        for text in sorted(target.glob("*config.json"))[:1]:
            for weights in target.glob("*.safetensors"):
                weights.chmod(stat.S_IMODE(text.stat().st_mode))
    except BaseException as error:
        if made:
            shutil.rmtree(target, ignore_errors=True)
        if isinstance(error, OSError | SafetensorError):
            raise InputError(f"{target}: cannot be written ({error}); give another place") from error
        raise


def load_weights(folder: Path | str, model: nn.Module) -> None:
    """Fill a model, on the meta device or the CPU, with the weights of a checkpoint.

    Its parameters are replaced: an optimizer that holds the old ones has to be made anew. Of a model with
    adapters the checkpoint holds these alone: the base has to be there, and is left as it is.

    Raises: InputError if the checkpoint's names or shapes are not the model's, or its base is another.
    """
    if not isinstance(folder, str | Path) or not isinstance(model, nn.Module):
        raise InputError(
            f"load_weights is given a {type(folder).__name__} and a {type(model).__name__}; give the folder "
            "of a checkpoint, as Trainer.checkpoint is once one is written, and the model"
        )
    folder = Path(folder)
    fill(model, read_weights(folder), folder, read_manifest(folder).base)


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Return the parameters of a checkpoint by name, without states of the optimizer.

    Raises: InputError if it is damaged.
    """
    manifest = read_manifest(folder)
    weights: dict[str, Tensor] = {}
    for layer in range(len(manifest.layers)):
        tensors = read_layer(folder, manifest, layer)
        weights |= {name: tensor for name, tensor in tensors.items() if not _is_state(name, tensors)}
    return weights


def _is_state(name: str, names: Collection[str]) -> bool:
    """Return whether a tensor is an optimizer state: it is named after a parameter of the same file."""
    return any(name[:end] in names for end, letter in enumerate(name) if letter == ".")


def fill(
    model: nn.Module, weights: Mapping[str, Tensor], folder: Path, base: Mapping[str, str] | None = None
) -> None:
    """Set every saved tensor of the model to its weight; names that share a tensor go on to.

    Buffers, which no training of ours changes, keep what they have, and so does the base: hashes by name.

    Raises: InputError if names, shapes or the base are not the model's; nothing is changed then.
    """
    remedy = "give the model that it was made from"
    tensors = model.state_dict(keep_vars=True)
    base = base or {}
    kept = {id(tensors[name]) for name in base.keys() & tensors.keys()}
    matrices = {name: QuantizedParameter(matrix) for name, matrix in matrices_in(model).items()}
    for name, sha256 in base.items():
        held = matrices.get(name, tensors.get(name))
        if held is not None and (held.is_meta or weight_sha256(held) != sha256):
            raise InputError(
                f"{folder} holds adapters alone, and {name!r} here is not that of their base; {remedy}"
            )
    if unknown := sorted((weights.keys() | base.keys()) - tensors.keys()):
        raise InputError(f"{folder} holds {unknown[0]!r}, which the model lacks; {remedy}")
    homes = {id(tensors[name]): name for name in weights}
    filled: dict[int, Tensor] = {}
    found: list[tuple[str, Tensor]] = []
    for name, held in tensors.items():
        if id(held) not in homes:
            if id(held) in kept:
                continue
            if not isinstance(held, nn.Parameter) and not held.is_meta:
                continue
            raise InputError(f"{folder} lacks {name!r}; {remedy}")
        weight = weights[homes[id(held)]]
        if weight.shape != held.shape:
            shapes = f"{tuple(weight.shape)}, not {tuple(held.shape)}"
            raise InputError(f"{folder} holds {name!r} with shape {shapes}; {remedy}")
        if id(held) not in filled:
            if isinstance(held, nn.Parameter):
                weight = nn.Parameter(weight, requires_grad=held.requires_grad)
            filled[id(held)] = weight
        found.append((name, filled[id(held)]))
    for name, weight in found:  # all of them, or none
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, weight)
