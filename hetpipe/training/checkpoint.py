"""Checkpoints: a folder per step, one safetensors file per layer and a manifest; complete or absent.

    checkpoints/step-000010/layer-000.safetensors   parameters by canonical name, <name>.exp_avg, ...
                            vocabulary.json
                            config.json             of a model that came from a folder
                            manifest.json           written last
    checkpoints/.step-000020.tmp-1f2e3d4c/          being written: every rank its layers, then rank 0 commits
    checkpoints/.step-000010.old-5a6b7c8d/          being replaced by a new step-000010

A tied parameter is stored once, in the file of its canonical home; other layers ask that file for it.
"""

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pydantic import ConfigDict, JsonValue, TypeAdapter, ValidationError, with_config
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from cost_model.errors import InputError
from hetpipe.models.quantized_modules import matrices_in
from hetpipe.models.quantized_weights import QuantizedParameter
from hetpipe.runs.lora import LoraSettings
from hetpipe.runtime.loss_scale import LossScale
from hetpipe.training.frozen_base import weight_sha256

FORMAT = "hetpipe.checkpoint/1"
MANIFEST_FILE, VOCABULARY_FILE, CONFIG_FILE = "manifest.json", "vocabulary.json", "config.json"

STRICT = ConfigDict(extra="forbid", strict=True)
COMPLETE_NAME = re.compile(r"step-(?P<step>\d{6,})")
UNFINISHED_NAME = re.compile(r"\.step-(?P<step>\d{6,})\.tmp-[0-9a-f]+")
REPLACED_NAME = re.compile(r"\.step-(?P<step>\d{6,})\.old-[0-9a-f]+")


@with_config(STRICT)
@dataclass(frozen=True, slots=True)
class LayerFile:
    """One layer's file in a checkpoint folder."""

    file: str
    sha256: str
    bytes: int


@with_config(STRICT)
@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of a checkpoint, and all that a run needs besides tensors to go on from it.

    step, samples_seen: done so far, so the next step starts at sample position samples_seen.
    layers: in model order.  optimizer: its name and number of steps.  plan: what wrote it, None for none.
    lora: of the adapters, if --lora made some.  base: of a model with adapters, the hashes of all that is
    frozen beside them, by name; its weights are not in the checkpoint. loss_scale: of the next step, None
    where losses are not scaled. settings: `deciding_settings` of the run, {} of older checkpoints.
    """

    model: str
    step: int
    samples_seen: int
    seed: int
    sequence_length: int
    vocabulary_sha256: str
    layers: tuple[LayerFile, ...]
    torch_version: str
    optimizer: dict[str, JsonValue]
    plan: dict[str, JsonValue] | None
    lora: LoraSettings | None = None
    base: dict[str, str] = field(default_factory=dict)
    loss_scale: LossScale | None = None
    settings: dict[str, JsonValue] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for layer, found in enumerate(self.layers):
            if found.file != layer_file_name(layer):  # also keeps paths such as ../x out
                raise InputError(f"file of layer {layer} is {found.file!r}, not {layer_file_name(layer)!r}")


def layer_file_name(layer: int) -> str:
    """Return the name of a layer's file within a checkpoint folder."""
    return f"layer-{layer:03d}.safetensors"


def begin(root: Path, step: int) -> Path:
    """Make a new, empty, unfinished folder for the step; one rank makes it and tells the others."""
    root.mkdir(parents=True, exist_ok=True)
    folder = root / f".step-{step:06d}.tmp-{secrets.token_hex(4)}"
    folder.mkdir()
    return folder


def write_layer(folder: Path, layer: int, tensors: Mapping[str, Tensor]) -> LayerFile:
    """Write one layer's parameters and optimizer states into an unfinished folder, on disk on return."""
    path = folder / layer_file_name(layer)
    try:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)
    except SafetensorError as error:
        raise OSError(None, str(error), str(path)) from error
    _fsync(path)
    return LayerFile(file=path.name, sha256=_sha256(path), bytes=path.stat().st_size)


def commit(
    folder: Path, manifest: Manifest, vocabulary: Path | None = None, config: Path | None = None
) -> Path:
    """Turn an unfinished folder, into which all ranks have written, into the checkpoint of its step.

    An earlier checkpoint of the same step stays until the new one is complete. A kill at any instant leaves
    a state in which `latest` finds the old or the new one.

    vocabulary, config: files to keep in it.

    Raises: InputError if a layer file is missing or short, as on hosts that do not share the folder.
    """
    match = UNFINISHED_NAME.fullmatch(folder.name)
    assert match and int(match["step"]) == manifest.step, (folder, manifest.step)
    for layer in manifest.layers:
        if not _has_size(folder / layer.file, layer.bytes):
            raise InputError(
                f"{folder / layer.file} does not have the {layer.bytes:,} bytes that its rank wrote; "
                "give a checkpoint folder that all hosts share"
            )
    for source, name in ((vocabulary, VOCABULARY_FILE), (config, CONFIG_FILE)):
        if source is not None:
            shutil.copyfile(source, folder / name)
            _fsync(folder / name)
    content = json.dumps({"format": FORMAT} | asdict(manifest), indent=1)
    (folder / MANIFEST_FILE).write_text(content, encoding="utf-8")
    _fsync(folder / MANIFEST_FILE)
    _fsync(folder)

    # Renaming a folder onto another is impossible, so the old one steps aside; `latest` finds it there.
    target = folder.with_name(f"step-{manifest.step:06d}")
    replaced = folder.with_name(f".{target.name}.old-{secrets.token_hex(4)}")
    if target.exists():
        os.rename(target, replaced)
    os.rename(folder, target)
    _fsync(target.parent)
    if replaced.exists():
        shutil.rmtree(replaced)
    return target


def discard_unfinished(root: Path) -> None:
    """Remove what killed writers left, and put back a checkpoint whose replacement never came.

    Only for a run that has the folder to itself: a folder that is being written right now would go too.
    """
    for folder, _ in _folders(root, REPLACED_NAME):
        target = folder.with_name(folder.name[1:].split(".")[0])
        if _is_complete(folder) and not _is_complete(target):
            shutil.rmtree(target, ignore_errors=True)
            os.rename(folder, target)
        else:
            shutil.rmtree(folder)
    for folder, _ in _folders(root, UNFINISHED_NAME):
        shutil.rmtree(folder)


def latest(root: Path) -> Path | None:
    """Return the newest complete checkpoint, None if there is none."""
    candidates = [(step, 1, folder) for folder, step in _folders(root, COMPLETE_NAME)]
    candidates += [(step, 0, folder) for folder, step in _folders(root, REPLACED_NAME)]
    return next((folder for *_, folder in sorted(candidates, reverse=True) if _is_complete(folder)), None)


def holds_run(folder: Path) -> bool:
    """Return whether a folder is that of a run, with checkpoints or without any, and no checkpoint."""
    files = ("checkpoints", "plan.json")
    return not (folder / MANIFEST_FILE).exists() and any((folder / name).exists() for name in files)


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint.

    Raises: InputError if it is missing, not JSON, of another format, or a key is missing, unknown or
    ill-typed.
    """
    path = folder / MANIFEST_FILE
    remedy = "choose another checkpoint"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        found = content.pop("format", None) if isinstance(content, dict) else None
        if found != FORMAT:
            raise InputError(f"{path} has format {found!r}, not {FORMAT!r}; {remedy}")
        return TypeAdapter(Manifest).validate_json(json.dumps(content))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(key) for key in first["loc"])
        raise InputError(f"{path}: {where or 'manifest'}: {first['msg']}; {remedy}") from error
    except (OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read ({error}); {remedy}") from error


def read_layer(
    folder: Path, manifest: Manifest, layer: int, names: Collection[str] | None = None
) -> dict[str, Tensor]:
    """Return the tensors of a layer's file, or those named only, after its hash is verified.

    Raises: InputError if the file is missing or damaged, or does not hold a name.
    """
    written = manifest.layers[layer]
    path = folder / written.file
    remedy = "choose another checkpoint"
    try:
        found = _sha256(path)
        if found != written.sha256:
            raise InputError(f"{path} is damaged: expected sha256 {written.sha256}, found {found}; {remedy}")
        with safe_open(path, framework="pt") as file:
            held = set(file.keys())
            if missing := sorted(set(names or ()) - held):
                raise InputError(f"{path} does not hold {missing[0]!r}; {remedy}")
            return {name: file.get_tensor(name) for name in sorted(held if names is None else names)}
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path} cannot be read ({error}); {remedy}") from error


def export_huggingface(folder: Path, target: Path, model: nn.Module) -> None:
    """Fill a Hugging Face model, on the meta device or the CPU, from a checkpoint and save it to a folder.

    Raises: InputError if the checkpoint's names or shapes are not the model's.
    """
    load_weights(folder, model)
    made = not target.exists()
    try:
        model.save_pretrained(target)  # type: ignore[operator]  # nn.Module would call it a Tensor or Module
    except BaseException as error:
        if made:  # nothing half-written
            shutil.rmtree(target, ignore_errors=True)
        if isinstance(error, OSError | SafetensorError):
            raise InputError(f"{target}: cannot be written ({error}); give another place") from error
        raise


def load_weights(folder: Path, model: nn.Module) -> None:
    """Fill a model, on the meta device or the CPU, with the weights of a checkpoint.

    Its parameters are replaced: an optimizer that holds the old ones has to be made anew. Of a model with
    adapters the checkpoint holds these alone: the base has to be there, and is left as it is.

    Raises: InputError if the checkpoint's names or shapes are not the model's, or its base is another.
    """
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


def _folders(root: Path, name: re.Pattern[str]) -> Iterator[tuple[Path, int]]:
    """Yield the folders of root with such a name, and their steps."""
    for folder in sorted(root.iterdir()) if root.is_dir() else ():
        if match := name.fullmatch(folder.name):
            yield folder, int(match["step"])


def _is_complete(folder: Path) -> bool:
    try:
        manifest = read_manifest(folder)
    except InputError:
        return False
    return all(_has_size(folder / layer.file, layer.bytes) for layer in manifest.layers)


def _has_size(path: Path, num_bytes: int) -> bool:
    return path.is_file() and path.stat().st_size == num_bytes


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    """Wait until a file's content, or a folder's entries, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
