"""Frozen matrices in 4 or 8 bits: made, held, read and dequantized by bitsandbytes.

A matrix is quantized on the CPU, so that it is the same on every kind of device, and dequantized for the time
of one operation. So a product is that of the dequantized matrix, forward and backward, with any microbatch:
what `Linear4bit` computes in training, and `Linear8bitLt` on CPUs. (On NVIDIA GPUs the latter would round
inputs to 8 bits, too, but for columns that depend on what else is in the microbatch.)
"""

import hashlib
import importlib
import logging
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn

from cost_model.errors import InputError
from hetpipe.runs.quantization import BLOCK, FOUR_BIT, NESTED_BLOCK, Quantization

_SCALES_OF_8_BITS = 1.0 / 127.0


@dataclass(frozen=True, slots=True)
class Packing:
    """How one matrix of a model is held.

    transposed: the parameter is [in, out], as Conv1D has it, and is held as [out, in].
    """

    quantization: Quantization
    transposed: bool = False

    def rows_and_columns(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return the shape in which a parameter of this shape is held."""
        rows, columns = shape
        return (columns, rows) if self.transposed else (rows, columns)

    def stored_bytes(self, shape: tuple[int, ...]) -> int:
        """Return the bytes of a parameter of this shape."""
        return self.quantization.stored_bytes(*self.rows_and_columns(shape))


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedMatrix:
    """A matrix in 4 or 8 bits.

    values: as bitsandbytes packs them, [ceil(rows * columns / 2), 1] bytes, or int8 [rows, columns].
    scales: of 4 bits absmax [blocks]; where they are quantized too in bytes, with nested_absmax,
    nested_offset and nested_quant_map; of 8 bits SCB [rows].
    shape: (rows, columns), that of the linear layer's weight.
    """

    packing: Packing
    values: Tensor
    scales: Mapping[str, Tensor]
    shape: tuple[int, int]

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the matrix as the model's parameter was, in a dtype."""
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return self.dequantized(torch.float32).to(dtype)
        matrix = self._of_4_bits(dtype) if "absmax" in self.scales else self._of_8_bits(dtype)
        return matrix.t() if self.packing.transposed else matrix

    def _of_4_bits(self, dtype: torch.dtype) -> Tensor:
        operations = torch.ops.bitsandbytes
        scales, absmax = self.scales, self.scales["absmax"]
        if "nested_absmax" in scales:
            absmax = operations.dequantize_blockwise.default(
                absmax, scales["nested_absmax"], scales["nested_quant_map"], NESTED_BLOCK, torch.float32
            ).add_(scales["nested_offset"])
        kind = self.packing.quantization.quant_type
        found = operations.dequantize_4bit.default(self.values, absmax, BLOCK, kind, self.shape, dtype)
        return cast(Tensor, found)

    def _of_8_bits(self, dtype: torch.dtype) -> Tensor:
        # NOTE: rounded in the order in which bitsandbytes does (autograd/_functions.py, MatMul8bitFp)
        return self.values.to(dtype).mul_(self.scales["SCB"].unsqueeze(1).mul(_SCALES_OF_8_BITS))

    def tensors(self) -> tuple[Tensor, ...]:
        """Return all tensors that hold it, but for the table that all matrices share."""
        own = [value for name, value in self.scales.items() if name != "nested_quant_map"]
        return (self.values, *own)

    def to(self, device: torch.device) -> "QuantizedMatrix":
        """Return the matrix on a device."""
        scales = {name: value.to(device) for name, value in self.scales.items()}
        return replace(self, values=self.values.to(device), scales=scales)

    def sha256(self) -> str:
        """Return the hash of everything that decides its values."""
        found = hashlib.sha256(f"{self.packing.quantization.quant_type},{self.shape}".encode())
        for name, value in sorted({"values": self.values, **self.scales}.items()):
            found.update(name.encode())
            here = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
            found.update(here.numpy().tobytes())
        return found.hexdigest()


class _ByMatrix(type(nn.Parameter)):  # type: ignore[misc]  # torch does not name its class
    """Knows a parameter by its matrix: of tensors without memory torch makes no subclass."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(getattr(instance, "matrix", None), QuantizedMatrix)


class QuantizedParameter(nn.Parameter, metaclass=_ByMatrix):
    """A frozen parameter that is held quantized; as a tensor it is the packed values."""

    matrix: QuantizedMatrix

    def __new__(cls, matrix: QuantizedMatrix) -> "QuantizedParameter":
        """Make the parameter of a matrix."""
        made = super().__new__(cls, matrix.values, requires_grad=False)
        made.matrix = matrix
        return made


def matrix_held(value: Tensor) -> QuantizedMatrix | None:
    """Return the matrix of a quantized parameter; None of any other.

    Not by its class: torch makes a parameter of tensors without memory (FakeTensorMode) one of another.
    """
    found = getattr(value, "matrix", None)
    return found if isinstance(found, QuantizedMatrix) else None


def tensors_of(value: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors that hold a weight, one if it is not quantized."""
    matrix = matrix_held(value)
    return (value,) if matrix is None else matrix.tensors()


def dense(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a weight in a dtype of real numbers; a quantized one in float32 where it is another."""
    matrix = matrix_held(value)
    if matrix is not None:
        return matrix.dequantized(dtype if dtype.is_floating_point else torch.float32)
    return value.detach().to(dtype)


def bitsandbytes() -> ModuleType:
    """Return the library.

    Raises: InputError if it is not installed.
    """
    # it warns of a kernel that it cannot download: here matrices are dequantized, then multiplied
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    try:
        return importlib.import_module("bitsandbytes")
    except ImportError as error:
        raise InputError(
            f'weights in 4 or 8 bits need bitsandbytes ({error}); pip install -e ".[qlora]"'
        ) from None


def quantized(weight: Tensor, packing: Packing) -> QuantizedMatrix:
    """Return a parameter of a model, on the CPU, in 4 or 8 bits."""
    library = bitsandbytes()
    matrix = weight.detach().t() if packing.transposed else weight.detach()
    matrix = matrix.contiguous()
    shape = (int(matrix.shape[0]), int(matrix.shape[1]))
    chosen = packing.quantization
    if chosen.load_in != FOUR_BIT:
        values, scales, _ = library.functional.int8_vectorwise_quant(matrix.to(torch.float16))
        return QuantizedMatrix(packing, values, {"SCB": scales}, shape)
    values, state = library.functional.quantize_4bit(
        matrix, blocksize=BLOCK, compress_statistics=chosen.double_quant, quant_type=chosen.quant_type
    )
    return QuantizedMatrix(packing, values, _scales_of(state), shape)


def _scales_of(state: Any) -> dict[str, Tensor]:
    """Return the scales of 4 bits in a QuantState of bitsandbytes."""
    if not state.nested:
        return {"absmax": state.absmax}
    return {
        "absmax": state.absmax,
        "nested_absmax": state.state2.absmax,
        "nested_offset": state.offset,
        "nested_quant_map": state.state2.code,
    }


def parts_of(name: str, value: Tensor) -> dict[str, Tensor]:
    """Return copies on the CPU of what holds a weight, by names in a file."""
    matrix = matrix_held(value)
    if matrix is None:
        return {name: value.detach().cpu().clone()}
    parts = {"values": matrix.values, **matrix.scales}
    return {f"{name}.{part}": tensor.detach().cpu().clone() for part, tensor in parts.items()}


def from_parts(
    name: str, names: Collection[str], read: Callable[[str], Tensor], packing: Packing, shape: tuple[int, ...]
) -> QuantizedMatrix:
    """Return the matrix that `parts_of` took apart.

    names: in the file, of which `read` gives the tensors. shape: of the parameter.
    """
    parts = {key.removeprefix(f"{name}."): read(key) for key in names if key.startswith(f"{name}.")}
    return QuantizedMatrix(packing, parts.pop("values"), parts, packing.rows_and_columns(shape))


_PARTS = re.compile(
    r"^(?P<weight>.*\.weight)\.(?P<part>absmax|quant_map|nested_absmax|nested_quant_map|"
    r"quant_state\.bitsandbytes__(nf4|fp4))$|^(?P<module>.*)\.(?P<of_8>SCB|weight_format)$"
)


def split_key(key: str) -> tuple[str, str | None]:
    """Return the weight that a tensor of a file belongs to, and which part of its scales it is; None: none.

    >>> split_key("layers.0.q.weight.absmax"), split_key("layers.0.q.SCB"), split_key("layers.0.q.weight")
    (('layers.0.q.weight', 'absmax'), ('layers.0.q.weight', 'SCB'), ('layers.0.q.weight', None))
    """
    found = _PARTS.match(key)
    if found is None:
        return key, None
    return found["weight"] or f"{found['module']}.weight", found["part"] or found["of_8"]


def from_stored(values: Tensor, parts: Mapping[str, Tensor], packing: Packing, where: str) -> QuantizedMatrix:
    """Return the matrix that bitsandbytes stored as values and parts of its scales.

    Raises: InputError if it is stored in another way than the configuration says.
    """
    chosen = packing.quantization
    if chosen.load_in != FOUR_BIT:
        if (
            "SCB" not in parts
            or values.dtype != torch.int8
            or int(parts.get("weight_format", torch.zeros(1)))
        ):
            raise InputError(f"{where} is not stored in 8 bits, row by row; save the model again")
        rows, columns = values.shape
        return QuantizedMatrix(packing, values, {"SCB": parts["SCB"].float()}, (int(rows), int(columns)))
    state = bitsandbytes().functional.QuantState.from_dict(dict(parts), torch.device("cpu"))
    found = matrix_of(state, values, where)
    if found.packing.quantization != replace(chosen, skip=None):
        said, is_so = (
            f"{each.quant_type}{' with quantized scales' if each.double_quant else ''}"
            for each in (chosen, found.packing.quantization)
        )
        raise InputError(f"{where} is stored in {is_so}, by config.json in {said}; make them agree")
    return replace(found, packing=packing)


def matrix_of(state: Any, values: Tensor, where: str) -> QuantizedMatrix:
    """Return the matrix that bitsandbytes holds as values and a QuantState.

    Raises: InputError if it is held in blocks of another size; names where.
    """
    nested = state.state2.blocksize if state.nested else NESTED_BLOCK
    if (state.blocksize, nested) != (BLOCK, NESTED_BLOCK):
        raise InputError(
            f"{where} is in blocks of {state.blocksize} values and {nested} scales, and those of {BLOCK} and "
            f"{NESTED_BLOCK} are taken; quantize it again"
        )
    rows, columns = state.shape
    return QuantizedMatrix(
        Packing(Quantization(FOUR_BIT, state.quant_type, state.nested)),
        values.detach().view(torch.uint8).reshape(-1, 1),
        _scales_of(state),
        (int(rows), int(columns)),
    )
