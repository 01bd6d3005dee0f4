"""PEFT folders: adapters read from one, each rank its own, and written to one that peft loads."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from cost_model.errors import InputError
from hetpipe.models.adapters import ADAPTER, is_adapter, peft_config_of
from hetpipe.models.huggingface import ModelSpec
from hetpipe.models.huggingface_folder import TRAINABLE_DTYPES, header
from hetpipe.models.tasks import Task

ADAPTER_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """The adapters of a PEFT folder.

    keys: the name in the file of each adapter, by its name in the model.
    """

    path: Path
    keys: Mapping[str, str]

    @classmethod
    def find(cls, path: Path, spec: ModelSpec) -> "AdapterFolder":
        """Match the folder's tensors with the adapters of a model; only the header is read.

        Raises: InputError naming a tensor that is missing, unknown or of another shape.
        """
        file = path / ADAPTER_FILE
        if not file.is_file():
            raise InputError(f"{path}: holds no {ADAPTER_FILE}; save it by peft's save_pretrained")
        with torch.device("meta"):
            model = spec.build()
        shapes = {name: tuple(v.shape) for name, v in model.named_parameters() if is_adapter(name)}
        keys = {file_key(name): name for name in shapes}
        stored = header(file)
        of = spec.name if spec.base is None else spec.base.name
        for key, tensor in stored.items():
            if key not in keys:
                raise InputError(f"{file}: holds {key!r}, for which {of} has no layer; is it of this base?")
            if tensor.shape != shapes[keys[key]]:
                raise InputError(
                    f"{file}: {key!r} has shape {list(tensor.shape)}, by {of} and the folder's r "
                    f"{list(shapes[keys[key]])}; is it of this base?"
                )
            if tensor.dtype not in TRAINABLE_DTYPES:
                raise InputError(f"{file}: {key!r} is stored as {tensor.dtype}, which cannot be trained")
        if missing := sorted(keys.keys() - stored.keys()):
            raise InputError(f"{file}: lacks {missing[0]!r}, which {of} needs; is it of this base?")
        return cls(path, {name: key for key, name in keys.items()})

    def load(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return those of these parameters that are adapters, in float32 on the CPU.

        Raises: InputError if the file cannot be read.
        """
        file = self.path / ADAPTER_FILE
        try:
            with safe_open(file, framework="pt") as stored:
                return {
                    name: stored.get_tensor(self.keys[name]).to(torch.float32)
                    for name in names
                    if name in self.keys
                }
        except (OSError, SafetensorError) as error:
            raise InputError(f"{file}: cannot be read ({error}); copy it again") from error


def write_adapter_folder(path: Path, spec: ModelSpec, adapters: Mapping[str, Tensor], base: str) -> None:
    """Write adapters, by their names in the model, into a folder that `peft.PeftModel.from_pretrained` loads.

    spec: of the model with adapters. base: what loads the one without, a folder as a rule.
    """
    path.mkdir(parents=True, exist_ok=True)
    tensors = {file_key(name): value.detach().cpu().contiguous() for name, value in adapters.items()}
    save_file(tensors, path / ADAPTER_FILE, metadata={"format": "pt"})
    config = peft_config_of(spec)
    config.target_modules = sorted(config.target_modules)
    config.task_type = "CAUSAL_LM" if spec.task is Task.CAUSAL_LM else None
    config.base_model_name_or_path, config.inference_mode = base, True
    config.save_pretrained(str(path))


def file_key(name: str) -> str:
    """Return the name that peft gives an adapter in a file.

    >>> file_key("model.layers.0.self_attn.q_proj.lora_A.default.weight")
    'base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight'
    """
    return _PREFIX + name.replace(f".{ADAPTER}.", ".")
