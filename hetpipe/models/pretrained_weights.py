"""The weights of a Hugging Face folder, of each rank its own: read tensor by tensor, by the model's names."""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from cost_model.errors import InputError
from hetpipe.models.adapters import base_name
from hetpipe.models.huggingface import ModelSpec
from hetpipe.models.huggingface_folder import TRAINABLE_DTYPES, ModelFolder, StoredTensor
from hetpipe.models.quantized_weights import Packing, QuantizedMatrix, from_stored, quantized, split_key

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""The dtypes of `huggingface_folder.TRAINABLE_DTYPES`."""

_RENAMED = (
    (re.compile(r"LayerNorm\.gamma$"), "LayerNorm.weight"),
    (re.compile(r"LayerNorm\.beta$"), "LayerNorm.bias"),
    (re.compile(r"^embed_out\."), "lm_head."),
)
"""Names in files that transformers, too, reads as others: of the first BERTs, and of GPT-NeoX."""

_BUFFERS = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")
"""What older versions of transformers stored, and the model computes."""

_OTHER_HEADS = {"bert": (r"^bert\.pooler\.", r"^cls\.seq_relationship\.")}
"""By family, what a folder may hold for a task that is not its architecture's, as bert-base-uncased."""


@dataclass(frozen=True, slots=True)
class FolderWeights:
    """The places in a folder at which the parameters of a model lie.

    places: by canonical name, the tensor's header with its name in the file, for each of the names that the
        parameter has (several if it is tied); parameters that the folder lacks are not in it.
    scales: by canonical name, of each parameter that is stored in 4 or 8 bits, the place of each part of its
        scales.
    new: parameters that begin at random, since the folder holds a model without this head.
    unused: tensors of the folder that belong to heads that this architecture does not have.
    """

    folder: ModelFolder
    places: Mapping[str, tuple[tuple[str, StoredTensor], ...]]
    scales: Mapping[str, Mapping[str, tuple[str, StoredTensor]]]
    new: tuple[str, ...]
    unused: tuple[str, ...]

    @classmethod
    def find(cls, folder: ModelFolder, model: nn.Module) -> "FolderWeights":
        """Match the folder's tensors with the parameters of its model, which may be on the meta device.

        Only headers are read. A tied parameter may be stored under any of its names. What belongs to the head
        on top of the base model may be missing: it begins at random, as in transformers.

        Raises: InputError naming a tensor that is missing, unknown or of another shape.
        """
        canonical = {id(value): name for name, value in model.named_parameters()}
        aliases = dict(model.named_parameters(remove_duplicate=False))
        stored = folder.tensors()
        base = str(getattr(model, "base_model_prefix", ""))
        places: dict[str, list[tuple[str, StoredTensor]]] = {}
        scales: dict[str, dict[str, tuple[str, StoredTensor]]] = {}
        unused = []
        if folder.quantization is not None:
            for key in tuple(stored):
                weight, part = split_key(key)
                if part is not None and weight in stored:
                    name = _model_name(weight, base, aliases)
                    scales.setdefault(name, {})[part] = (key, stored.pop(key))
        ignored = [*_BUFFERS, *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())]
        names = stored_names(model, stored)
        for key, tensor in sorted(stored.items()):
            name = _model_name(names.get(key, key), base, aliases)
            if name not in aliases:
                if _matches(name, _OTHER_HEADS.get(folder.family, ())):
                    unused.append(key)
                elif not _matches(key, ignored):
                    raise InputError(
                        f"{tensor.file}: holds {key!r}, which {folder.architecture} does not have; is the "
                        "architecture in config.json the right one?"
                    )
                continue
            shape = tuple(aliases[name].shape)
            if name not in scales and tensor.dtype not in TRAINABLE_DTYPES:
                raise InputError(
                    f"{tensor.file}: {key!r} is stored as {tensor.dtype} without scales; copy it again"
                )
            if tensor.shape != shape and name not in scales:
                raise InputError(
                    f"{tensor.file}: {key!r} has shape {list(tensor.shape)}, by config.json {list(shape)}; "
                    "make config.json and weights agree"
                )
            places.setdefault(canonical[id(aliases[name])], []).append((key, tensor))
        computed = _never_stored(model)
        new = tuple(name for name in canonical.values() if name not in places and name not in computed)
        for name in new:
            if name.startswith(f"{base}.") and not _matches(name, _OTHER_HEADS.get(folder.family, ())):
                raise InputError(
                    f"{folder.path}: lacks {name!r}, which {folder.architecture} has; is the folder complete?"
                )
        return cls(folder, {name: tuple(found) for name, found in places.items()}, scales, new, tuple(unused))

    @classmethod
    def of(cls, spec: ModelSpec) -> "FolderWeights | None":
        """Return the weights that a model begins with; None where they are drawn from the seed.

        Raises: InputError as `find`.
        """
        if spec.folder is None or not spec.folder.has_weights:
            return None
        with torch.device("meta"):
            model = spec.build()
        if spec.base is None:
            return cls.find(spec.folder, model)
        found = cls.of(spec.base)
        adapted = {base_name(name): name for name, _ in model.named_parameters()}
        return None if found is None else found._renamed(adapted)

    def _renamed(self, names: Mapping[str, str]) -> "FolderWeights":
        """Return the same places under other names of the parameters."""
        places = {names[name]: place for name, place in self.places.items()}
        scales = {names[name]: parts for name, parts in self.scales.items()}
        return replace(self, places=places, scales=scales, new=tuple(names[name] for name in self.new))

    def dtypes(self) -> dict[str, torch.dtype]:
        """Return the dtypes in which the folder holds its parameters, but for those in 4 or 8 bits."""
        return {
            name: _DTYPES[places[0][1].dtype]
            for name, places in self.places.items()
            if name not in self.scales
        }

    def check_scales(self, packed: Collection[str]) -> None:
        """Check that what the folder holds in 4 or 8 bits is what is held so here.

        Raises: InputError naming what is not.
        """
        if others := sorted(self.scales.keys() - packed):
            raise InputError(
                f"{self.folder.path}: {others[0]!r} is stored quantized, and transformers would not quantize "
                "it; make config.json and weights agree"
            )

    def load(self, names: Iterable[str], dtypes: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
        """Return the stored ones of these parameters on the CPU; read no other tensor.

        dtypes: in which they are given; narrower ones than float32 are cast to from it.

        Raises: InputError if a file cannot be read, or the names of a tied parameter hold different values.
        """
        wanted = {name: self.places[name] for name in names if name in self.places}
        by_file: dict[str, list[tuple[str, str]]] = {}
        for name, places in wanted.items():
            for key, stored in places:
                by_file.setdefault(str(stored.file), []).append((name, key))
        tensors: dict[str, Tensor] = {}
        for path, members in sorted(by_file.items()):
            try:
                with safe_open(path, framework="pt") as file:
                    for name, key in members:
                        tensor = file.get_tensor(key)
                        if dtypes[name] != tensor.dtype:
                            tensor = tensor.to(torch.float32).to(dtypes[name])
                        if name in tensors and not torch.equal(tensors[name], tensor):
                            raise InputError(
                                f"{path}: {key!r} differs from {wanted[name][0][0]!r}, and config.json ties "
                                'them; write "tie_word_embeddings": false there'
                            )
                        tensors[name] = tensor
            except (OSError, SafetensorError) as error:
                raise InputError(f"{path}: cannot be read ({error}); copy it again") from error
        return tensors

    def load_quantized(self, name: str, packing: Packing) -> QuantizedMatrix:
        """Return a stored parameter on the CPU, quantized; read no other tensor.

        Raises: InputError if a file cannot be read, or holds it quantized in another way.
        """
        if name not in self.scales:
            return quantized(self.load([name], self.dtypes())[name], packing)
        places = {**self.scales[name], "": self.places[name][0]}
        parts: dict[str, Tensor] = {}
        for part, (key, stored) in places.items():
            try:
                with safe_open(stored.file, framework="pt") as file:
                    parts[part] = file.get_tensor(key)
            except (OSError, SafetensorError) as error:
                raise InputError(f"{stored.file}: cannot be read ({error}); copy it again") from error
        key, stored = places[""]
        return from_stored(parts.pop(""), parts, packing, f"{stored.file}: {key!r}")

    def notes(self) -> list[str]:
        """Return what a user should know: parameters that begin at random, tensors that are not used."""
        sentences = []
        if self.new:
            sentences.append(
                f"{self.folder.name}: the folder lacks {_some(self.new)}; they begin at random, from the seed"
            )
        if self.unused:
            sentences.append(
                f"{self.folder.name}: {self.folder.architecture} has no use for {_some(self.unused)}"
            )
        return sentences


def _never_stored(model: nn.Module) -> set[str]:
    """Return the frozen parameters that transformers computes, so that a folder may lack them."""
    patterns = [
        pattern
        for key in ("_keys_to_ignore_on_save", "_keys_to_ignore_on_load_missing")
        for pattern in getattr(model, key, None) or ()
    ]
    return {
        name
        for name, value in model.named_parameters()
        if not value.requires_grad and _matches(name, patterns)
    }


def stored_names(model: nn.Module, keys: Iterable[str]) -> dict[str, str]:
    """Return the model's names of tensors that transformers stores under others, as those of ViT.

    Raises: InputError if it also joins or cuts tensors.
    """
    from transformers import PreTrainedModel
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    found = (
        get_model_conversion_mapping(model, add_legacy=False) if isinstance(model, PreTrainedModel) else []
    )
    if not found:
        return {}
    if not all(isinstance(each, WeightRenaming) for each in found):
        raise InputError(
            f"transformers stores the weights of {type(model).__name__} joined or cut otherwise than the "
            "model's, which is not done here; train it from Python: hetpipe.Trainer"
        )
    return {key: rename_source_key(key, found, [])[0] for key in keys}


def _model_name(key: str, base: str, names: Collection[str]) -> str:
    """Return the model's name for a tensor of the folder, with or without the base model's prefix."""
    for pattern, renamed in _RENAMED:
        key = pattern.sub(renamed, key)
    if key in names or not base:
        return key
    shorter, longer = key.removeprefix(f"{base}."), f"{base}.{key}"
    return shorter if shorter in names else longer if longer in names else key


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)


def _some(names: Collection[str]) -> str:
    shown = sorted(names)[:3]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(map(repr, shown)) + more
