"""Safetensors files that are hashed while they are written: nothing is copied, and nothing read again."""

import hashlib
import json
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

_NAMES = {
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float32: "F32",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""In the order of tensors in a file, wide elements first, so that each begins at a multiple of its width."""
_PIECE_BYTES = 2**20


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> tuple[str, int]:
    """Write a safetensors file, on disk on return; return its sha256 and its bytes.

    Other threads go on meanwhile: what hashes and what writes holds no lock of the interpreter.

    Raises: OSError if it cannot be written, also where safetensors has no name for a dtype.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise OSError(None, f"safetensors cannot hold {name!r} of {tensor.dtype}", str(path))
    order = list(_NAMES)
    names = sorted(tensors, key=lambda name: (order.index(tensors[name].dtype), name))
    sha256, num_bytes = hashlib.sha256(), 0
    with open(path, "wb", buffering=0) as file:
        for piece in _pieces(names, tensors):
            sha256.update(piece)
            start = 0
            while start < len(piece):  # a nearly full disk takes a part
                start += file.write(piece[start:])
            num_bytes += len(piece)
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):  # it is hardly ever read, and new pages for the next one cost more
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return sha256.hexdigest(), num_bytes


def _pieces(names: list[str], tensors: Mapping[str, Tensor]) -> Iterator[memoryview]:
    """Yield the bytes of a file: its header, then the tensors in order."""
    head: dict[str, object] = {}
    end = 0
    for name in names:
        tensor = tensors[name]
        begin, end = end, end + tensor.nbytes
        head[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(head, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(struct.pack("<Q", len(text)) + text)
    for name in names:
        flat = tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        content = flat.numpy().data
        for start in range(0, len(content), _PIECE_BYTES):
            yield content[start : start + _PIECE_BYTES]
