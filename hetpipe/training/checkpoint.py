"""Checkpoints: a folder per step, one safetensors file per layer and a manifest; complete or absent.

    checkpoints/step-000010/layer-000.safetensors   parameters by canonical name, <name>.exp_avg, ...
                            vocabulary.json
                            config.json             of a model that came from a folder,
                            tokenizer_config.json   and of its tokenizer
                            manifest.json           written last
    checkpoints/.step-000020.tmp-1f2e3d4c/          being written: every rank its layers, then rank 0 commits
    checkpoints/.step-000010.old-5a6b7c8d/          being replaced by a new step-000010
    checkpoints/.step-000010.aside-9a8b7c6d/        damaged, and kept to be looked at

A tied parameter is stored once, in the file of its canonical home; other layers ask that file for it.
"""

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from pydantic import ConfigDict, JsonValue, TypeAdapter, with_config
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cost_model.errors import InputError
from cost_model.strict_files import canonical_sha256, check_format, read_json, validate
from hetpipe.models.huggingface_folder import TOKENIZER_CONFIG_FILE
from hetpipe.runs.lora import LoraSettings
from hetpipe.runtime.loss_scale import LossScale
from hetpipe.training.evaluated import Evaluated
from hetpipe.training.tensor_file import write_tensors

FORMAT = "hetpipe.checkpoint/2"
FORMAT_BEFORE = "hetpipe.checkpoint/1"
"""Without a hash of the manifest, and of the files beside the layers."""
MANIFEST_FILE, VOCABULARY_FILE, CONFIG_FILE = "manifest.json", "vocabulary.json", "config.json"
CHAT_TEMPLATE_FILE, PROCESSOR_FILE = "chat-template.json", "preprocessor_config.json"
_OTHERS = (VOCABULARY_FILE, CONFIG_FILE, CHAT_TEMPLATE_FILE, PROCESSOR_FILE, TOKENIZER_CONFIG_FILE)

STRICT = ConfigDict(extra="forbid", strict=True)
COMPLETE_NAME = re.compile(r"step-(?P<step>\d{6,})")
UNFINISHED_NAME = re.compile(r"\.step-(?P<step>\d{6,})\.tmp-[0-9a-f]+")
REPLACED_NAME = re.compile(r"\.step-(?P<step>\d{6,})\.old-[0-9a-f]+")
REMEDY = "; choose another checkpoint"
_LARGEST = 2**53


@with_config(STRICT)
@dataclass(frozen=True, slots=True)
class LayerFile:
    """A file in a checkpoint folder: a layer's, or one beside them."""

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
    changes: of these on the way here, each with the step after which it was, key, before and now.
    evaluated: of held-out texts, None where there are none; best: whether its loss is of this very step, and
    was the least until then.
    others: the files beside those of the layers, which `commit` adds.
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
    changes: tuple[dict[str, JsonValue], ...] = ()
    evaluated: Evaluated | None = None
    best: bool = False
    others: tuple[LayerFile, ...] = ()

    def __post_init__(self) -> None:
        least = {"step": 1, "samples_seen": self.step, "seed": 0, "sequence_length": 1}
        for name, lowest in least.items():
            if not lowest <= getattr(self, name) < (2**63 if name == "seed" else _LARGEST):
                raise InputError(f"{name} is {getattr(self, name)}, which no run has")
        for found in self.others:
            if found.file not in _OTHERS:
                raise InputError(f"a file beside the layers is {found.file!r}")
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
    sha256, num_bytes = write_tensors(path, tensors)
    return LayerFile(file=path.name, sha256=sha256, bytes=num_bytes)


def commit(folder: Path, manifest: Manifest, kept: Mapping[str, Path] | None = None) -> Path:
    """Turn an unfinished folder, into which all ranks have written, into the checkpoint of its step.

    An earlier checkpoint of the same step stays until the new one is complete. A kill at any instant leaves
    a state in which `latest` finds the old or the new one.

    kept: files to keep in it, by their names there.

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
    others = []
    for name, source in (kept or {}).items():
        shutil.copyfile(source, folder / name)
        others.append(_written(folder / name))
    (folder / MANIFEST_FILE).write_text(manifest_text(replace(manifest, others=tuple(others))), "utf-8")
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
            _remove(folder)
    for folder, _ in _folders(root, UNFINISHED_NAME):
        _remove(folder)


def tidy(root: Path) -> None:
    """Remove what became no checkpoint, and takes the room of one, as far as the disk lets it."""
    with suppress(OSError):
        discard_unfinished(root)


def best(root: Path) -> Path | None:
    """Return the checkpoint whose own held-out loss is the least, the first of equal ones; None: none has.

    Where the newest goes by a figure, as accuracy: the one with the largest. Only those of the newest's
    held-out data are compared.
    """
    found: list[tuple[Evaluated, float, int, Path]] = []
    for folder, step in _folders(root, COMPLETE_NAME):
        with suppress(InputError):
            evaluated = read_manifest(folder).evaluated
            if evaluated is not None and evaluated.step == step and evaluated.score is not None:
                found.append((evaluated, evaluated.score, step, folder))
    if not found:
        return None
    newest = max(found, key=lambda each: each[2])[0]
    return min(each[1:] for each in found if each[0].compares(newest))[2]


def keep_newest(root: Path, keep: int) -> None:
    """Remove all checkpoints but so many, the newest, and the best; a kill leaves none that is half there.

    Raises: InputError if one cannot be removed.
    """
    complete = sorted(_folders(root, COMPLETE_NAME), key=lambda found: found[1], reverse=True)
    least = best(root) if len(complete) > keep else None
    for folder in (folder for folder, _ in complete[keep:] if folder != least):
        unfinished = folder.with_name(f".{folder.name}.tmp-{secrets.token_hex(4)}")
        try:
            os.rename(folder, unfinished)
            _remove(unfinished)
        except OSError as error:
            raise InputError(
                f"{folder}: cannot be removed ({error.strerror}), as --keep {keep} says; leave --keep out"
            ) from None


def latest(root: Path) -> Path | None:
    """Return the newest complete checkpoint, by the sizes of its files; None if there is none."""
    return next((folder for _, folder in written(root) if _is_complete(folder)), None)


def written(root: Path) -> list[tuple[int, Path]]:
    """Return the steps and folders of all checkpoints, the newest first, whole or not.

    One that was being replaced comes after what replaced it.
    """
    found = [(step, 1, folder) for folder, step in _folders(root, COMPLETE_NAME)]
    found += [(step, 0, folder) for folder, step in _folders(root, REPLACED_NAME)]
    return [(step, folder) for step, _, folder in sorted(found, reverse=True)]


def holds_run(folder: Path) -> bool:
    """Return whether a folder is that of a run, with checkpoints or without any, and no checkpoint."""
    files = ("checkpoints", "plan.json")
    return not (folder / MANIFEST_FILE).exists() and any((folder / name).exists() for name in files)


def manifest_text(manifest: Manifest) -> str:
    """Return the text of a manifest.json, with a hash of all else that it says."""
    content = {"format": FORMAT} | asdict(manifest)
    return json.dumps(content | {"sha256": canonical_sha256(content)}, indent=1) + "\n"


_MANIFEST = TypeAdapter(Manifest)


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint.

    Raises: InputError if it is missing, not JSON, of another format, changed after it was written, says what
    cannot be, or is of another step than its folder.
    """
    path = folder / MANIFEST_FILE
    try:
        data = read_json(path)
        before = isinstance(data, dict) and data.get("format") == FORMAT_BEFORE
        content = check_format(data, FORMAT_BEFORE if before else FORMAT, str(path))
        if not before:
            stated = content.pop("sha256", None)
            if stated != canonical_sha256(content | {"format": FORMAT}):
                raise InputError(
                    f"{path} is damaged, or was changed after it was written: its sha256 is another"
                )
        manifest = validate(_MANIFEST, content, str(path))
        match = COMPLETE_NAME.fullmatch(folder.name) or REPLACED_NAME.fullmatch(folder.name)
        if match and int(match["step"]) != manifest.step:
            raise InputError(f"{path} is of step {manifest.step}, which its folder is not")
    except InputError as error:
        raise InputError(f"{error}{REMEDY}") from None
    return manifest


def read_layer(
    folder: Path, manifest: Manifest, layer: int, names: Collection[str] | None = None
) -> dict[str, Tensor]:
    """Return the tensors of a layer's file, or those named only, after its hash is verified.

    Raises: InputError if the file is missing or damaged, or does not hold a name.
    """
    path = folder / manifest.layers[layer].file
    if damage := file_damage(folder, manifest.layers[layer]):
        raise InputError(f"{damage}{REMEDY}")
    try:
        with safe_open(path, framework="pt") as file:
            held = set(file.keys())
            if missing := sorted(set(names or ()) - held):
                raise InputError(f"{path} does not hold {missing[0]!r}{REMEDY}")
            return {name: file.get_tensor(name) for name in sorted(held if names is None else names)}
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path} cannot be read ({error}){REMEDY}") from error


def file_damage(folder: Path, file: LayerFile) -> str | None:
    """Return what is wrong with a file of a checkpoint, None where it is what was written."""
    path = folder / file.file
    try:
        found_bytes = path.stat().st_size
        if found_bytes != file.bytes:
            return f"{path} is damaged: it has {found_bytes:,} bytes, {file.bytes:,} were written"
        found = _sha256(path)
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"
    return (
        None if found == file.sha256 else (f"{path} is damaged: expected sha256 {file.sha256}, found {found}")
    )


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
    files = (*manifest.layers, *manifest.others)
    return all(_has_size(folder / file.file, file.bytes) for file in files)


def _remove(path: Path) -> None:
    """Remove a folder, or what somebody put in its place: a link is not followed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _has_size(path: Path, num_bytes: int) -> bool:
    return path.is_file() and path.stat().st_size == num_bytes


def _written(path: Path) -> LayerFile:
    """Return what a file holds, once it is on disk."""
    _fsync(path)
    return LayerFile(file=path.name, sha256=_sha256(path), bytes=path.stat().st_size)


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
