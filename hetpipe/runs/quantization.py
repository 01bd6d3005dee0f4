"""How frozen matrices are held in 4 or 8 bits: by --load-in, or as a folder's config.json says."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cost_model.errors import InputError
from cost_model.strict_files import did_you_mean

FOUR_BIT, EIGHT_BIT = "4bit", "8bit"
LOAD_IN = (FOUR_BIT, EIGHT_BIT)
BLOCK, NESTED_BLOCK = 64, 256
"""Values that share a scale in 4 bits, and scales that share one where they are quantized too (QLoRA)."""

_QUANT_TYPES = ("nf4", "fp4")


@dataclass(frozen=True, slots=True)
class Quantization:
    """How bitsandbytes holds the frozen matrices of a model.

    load_in: "4bit" (Dettmers et al., QLoRA, NeurIPS 2023) or "8bit", a scale for each row (Dettmers et al.,
    LLM.int8(), NeurIPS 2022). quant_type: the 16 values of 4 bits. double_quant: whether their scales are
    quantized too. skip: names of modules that stay as they are; None: those that transformers leaves.
    """

    load_in: str
    quant_type: str = "nf4"
    double_quant: bool = False
    skip: tuple[str, ...] | None = None

    @property
    def bits(self) -> int:
        """Return the bits of a value without its share of the scales."""
        return 4 if self.load_in == FOUR_BIT else 8

    def stored_bytes(self, num_rows: int, num_columns: int) -> int:
        """Return the bytes of a matrix [rows, columns] with its scales.

        >>> Quantization("4bit").stored_bytes(64, 64), Quantization("8bit").stored_bytes(64, 64)
        (2304, 4352)
        """
        count = num_rows * num_columns
        if self.load_in == EIGHT_BIT:
            return count + 4 * num_rows
        packed, blocks = math.ceil(count / 2), math.ceil(count / BLOCK)
        if not self.double_quant:
            return packed + 4 * blocks
        return packed + blocks + 4 * math.ceil(blocks / NESTED_BLOCK) + 4  # the last is the scales' mean


def check_load_in(text: str | None) -> str | None:
    """Return a --load-in, checked.

    Raises: InputError if it is none.
    """
    if text is not None and text not in LOAD_IN:
        raise InputError(f"--load-in {text!r} is not supported; give {' or '.join(LOAD_IN)}")
    return text


def load_in_suffix(load_in: str | None) -> str:
    """Return what tells a model whose matrices are quantized from the one that was given.

    >>> load_in_suffix("4bit"), load_in_suffix(None)
    ('+4bit', '')
    """
    return "" if load_in is None else f"+{load_in}"


def split_load_in(name: str) -> tuple[str, str | None]:
    """Return a model's name without what `load_in_suffix` added, and that.

    >>> split_load_in("base@1f2e3d4c+4bit"), split_load_in("base@1f2e3d4c")
    (('base@1f2e3d4c', '4bit'), ('base@1f2e3d4c', None))
    """
    base, plus, last = name.rpartition("+")
    return (base, last) if plus and last in LOAD_IN else (name, None)


def read_quantization(where: Path, config: Mapping[str, Any]) -> Quantization | None:
    """Return what a config.json says of the weights beside it; None where they are not quantized.

    Raises: InputError if they are in a way that is not taken here.
    """
    content = config.get("quantization_config")
    if not content:
        return None
    keys = content if isinstance(content, dict) else {}
    old = "bitsandbytes" if "load_in_4bit" in keys or "load_in_8bit" in keys else None
    method = keys.get("quant_method", old)
    if method != "bitsandbytes" or not isinstance(content, dict):
        raise InputError(
            f"{where}: quantization_config has quant_method {method!r}, and weights in 4 or 8 bits are taken "
            "by bitsandbytes alone; save the model unquantized, and give --load-in"
        )
    four, eight = (
        bool(content.get(key) or content.get(f"_{key}")) for key in ("load_in_4bit", "load_in_8bit")
    )
    if four == eight:
        raise InputError(
            f"{where}: quantization_config has load_in_4bit {four} and load_in_8bit {eight}; one is needed"
        )
    if content.get("llm_int8_has_fp16_weight"):
        raise InputError(
            f"{where}: llm_int8_has_fp16_weight is true, which keeps weights in 16 bits; set it to false"
        )
    quant_type = content.get("bnb_4bit_quant_type", "fp4") if four else "nf4"
    if quant_type not in _QUANT_TYPES:
        raise InputError(
            f"{where}: bnb_4bit_quant_type is {quant_type!r}; {did_you_mean(str(quant_type), _QUANT_TYPES)}"
        )
    skip = content.get("llm_int8_skip_modules")
    if skip is not None and not (isinstance(skip, list) and all(isinstance(name, str) for name in skip)):
        raise InputError(f"{where}: llm_int8_skip_modules is {skip!r}; a list of names is needed")
    return Quantization(
        load_in=FOUR_BIT if four else EIGHT_BIT,
        quant_type=quant_type,
        double_quant=four and bool(content.get("bnb_4bit_use_double_quant")),
        skip=None if skip is None else tuple(skip),
    )
