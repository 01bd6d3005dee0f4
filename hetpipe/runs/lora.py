"""What adapters a model is trained with (LoRA): as on the command line, as in a PEFT folder, and its name."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cost_model.errors import InputError
from cost_model.strict_files import LONGEST_SHOWN, canonical_sha256, did_you_mean, read_json

ADAPTER_CONFIG_FILE = "adapter_config.json"
EXAMPLE = "r=16,alpha=32,targets=q_proj,v_proj"
ALL_LINEAR = "all-linear"
"""As a target: every linear layer but the head, as peft takes it."""
MARK = "+lora@"
"""Stands in a model's name between that of the base and a hash of the adapters' settings."""

MOST_RANK = 2**16

_KEYS = ("r", "alpha", "dropout", "targets", "rslora")


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """Adapters of low rank beside linear layers of a frozen base (Hu et al., LoRA, ICLR 2022).

    r: rank. alpha: the adapters' output counts alpha / r. dropout: of their input. targets: names of linear
    layers, in all blocks that have them; the last part of a name is enough. rslora: the output counts
    alpha / sqrt(r), as in peft (Kalajdzievski, A Rank Stabilization Scaling Factor for Fine-Tuning with LoRA,
    arXiv, 2023).
    """

    r: int
    alpha: float
    targets: tuple[str, ...]
    dropout: float = 0.0
    rslora: bool = False

    def __post_init__(self) -> None:
        if self.r < 1:
            raise InputError(f"LoRA rank r is {self.r}; give at least 1")
        if self.r > MOST_RANK:
            raise InputError(f"LoRA rank r is {self.r:,}; give at most {MOST_RANK:,}")
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise InputError(f"LoRA alpha is {self.alpha:g}; give a finite number above zero")
        if not 0 <= self.dropout < 1:
            raise InputError(f"LoRA dropout is {self.dropout:g}; give at least 0 and less than 1")
        if not self.targets or not all(self.targets):
            raise InputError(f"LoRA targets are missing; name linear layers of the model, as {EXAMPLE}")
        object.__setattr__(self, "alpha", float(self.alpha))
        object.__setattr__(self, "targets", tuple(sorted(set(self.targets))))

    @property
    def text(self) -> str:
        """Return the settings as --lora takes them."""
        dropout = f"dropout={self.dropout:g}," if self.dropout else ""
        stable = "rslora=true," if self.rslora else ""
        return f"r={self.r},alpha={self.alpha:g},{dropout}{stable}targets={','.join(self.targets)}"

    @property
    def suffix(self) -> str:
        """Return what tells a model with these adapters from its base, and from one with others.

        >>> LoraSettings(8, 16, ("v_proj", "q_proj")).suffix
        '+lora@9bb2d160'
        """
        said = asdict(self)
        if not self.rslora:  # names from before it was known
            del said["rslora"]
        return f"{MARK}{canonical_sha256(said)[:8]}"


def parse_lora(text: str) -> LoraSettings:
    """Return the settings that a --lora gives.

    >>> parse_lora("r=16,alpha=32,dropout=0.05,targets=q_proj,v_proj").targets
    ('q_proj', 'v_proj')

    Raises: InputError naming what is missing, unknown or no number.
    """
    values: dict[str, list[str]] = {}
    last = ""
    for word in (part.strip() for part in text.split(",")):
        key, equals, value = (part.strip() for part in word.partition("="))
        if not equals:
            if last != "targets" or not word:
                raise InputError(f"--lora {text!r}: {word!r} is no key=value; write for example {EXAMPLE}")
            values[last].append(word)
            continue
        if key not in _KEYS:
            raise InputError(f"--lora {text!r}: unknown key {key!r}; {did_you_mean(key, _KEYS)}")
        if key in values:
            raise InputError(f"--lora {text!r}: {key} is given twice; leave one out")
        values[key], last = [value], key
    missing = next((key for key in ("r", "targets") if key not in values), None)
    if missing:
        raise InputError(f"--lora {text!r}: {missing} is missing; write for example {EXAMPLE}")
    rank = _number(text, values["r"][0], int)
    alpha = _number(text, values["alpha"][0], float) if "alpha" in values else float(rank)
    dropout = _number(text, values["dropout"][0], float) if "dropout" in values else 0.0
    stable = values.get("rslora", ["false"])[0].lower()
    if stable not in ("true", "false"):
        raise InputError(f"--lora {text!r}: rslora is {stable!r}; give true or false")
    return LoraSettings(int(rank), alpha, tuple(values["targets"]), dropout, stable == "true")


def _number(text: str, value: str, kind: type[int] | type[float]) -> float:
    try:
        return kind(value)
    except ValueError:
        what = "whole number" if kind is int else "number"
        raise InputError(f"--lora {text!r}: {value!r} is no {what}; write for example {EXAMPLE}") from None


_OF_LOADING = (
    "peft_type", "peft_version", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode",
    "task_type", "fan_in_fan_out", "megatron_core", "qalora_group_size", "runtime_config",
    "r", "lora_alpha", "lora_dropout", "use_rslora", "target_modules", "init_lora_weights", "bias",
)  # fmt: skip
"""Keys of adapter_config.json that are read, or that say nothing of what adapters compute."""


def read_adapter_settings(folder: Path) -> LoraSettings:
    """Return the settings of a PEFT folder's adapters.

    Raises: InputError if there are none, or they are of a kind that is not trained here.
    """
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder; give a PEFT folder, as hetpipe export writes it")
    path = folder / ADAPTER_CONFIG_FILE
    if not path.is_file():
        raise InputError(
            f"{folder}: holds no {ADAPTER_CONFIG_FILE}; give a PEFT folder, as hetpipe export writes it"
        )
    config = read_json(path)
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        found = config.get("peft_type") if isinstance(config, dict) else None
        raise InputError(
            f"{path}: peft_type is {_shown(found)}, and adapters here are LORA; give such a folder"
        )
    _check_plain(path, config)
    targets = config.get("target_modules")
    if not isinstance(targets, list) or not all(isinstance(name, str) for name in targets):
        raise InputError(f"{path}: target_modules is {_shown(targets)}; a list of names is needed")
    rank, alpha, dropout = (config.get(key) for key in ("r", "lora_alpha", "lora_dropout"))
    for key, value, kind in (("r", rank, int), ("lora_alpha", alpha, int | float)):
        if not isinstance(value, kind) or isinstance(value, bool):
            raise InputError(f"{path}: {key} is {_shown(value)}; a number is needed")
    stable = config.get("use_rslora", False)
    if not isinstance(stable, bool):
        raise InputError(f"{path}: use_rslora is {_shown(stable)}; true or false is needed")
    if not isinstance(dropout, int | float):
        raise InputError(f"{path}: lora_dropout is {_shown(dropout)}; a number is needed")
    assert isinstance(rank, int) and isinstance(alpha, int | float)
    try:
        return LoraSettings(rank, float(alpha), tuple(targets), float(dropout), stable)
    except OverflowError:
        raise InputError(f"{path}: a number has hundreds of digits; is it the right file?") from None
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _check_plain(path: Path, config: Mapping[str, Any]) -> None:
    """Refuse what changes adapters beyond what LoraSettings has: weights would mean another thing.

    Raises: InputError naming the key.
    """
    others = {key: value for key, value in config.items() if key not in _OF_LOADING and value}
    others |= {"bias": config["bias"]} if config.get("bias", "none") != "none" else {}
    begun = config.get("init_lora_weights", True)
    if not isinstance(begun, bool) and begun != "gaussian":  # pissa and others change the base
        others["init_lora_weights"] = begun
    if others:
        key, value = next(iter(others.items()))
        raise InputError(
            f"{path}: {_shown_key(key)} is {_shown(value)}, which is not trained here; adapters have rank, "
            "alpha, dropout, targets and use_rslora alone"
        )


def _shown(value: object) -> str:
    """Return a value of a file as an error shows it, cut where it is long."""
    return repr(value)[:LONGEST_SHOWN]


def _shown_key(key: str) -> str:
    return key[:LONGEST_SHOWN] if key.isidentifier() else _shown(key)
