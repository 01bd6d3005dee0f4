import ctypes
import hashlib
import mmap
import os
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from hetpipe.training.tensor_file import _NAMES, write_tensors


def of_dtype(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Any bits; of bool zeros and ones."""
    if dtype == torch.bool:
        return torch.rand(shape) < 0.5
    num_bytes = int(torch.tensor(shape).prod()) * dtype.itemsize
    return torch.randint(0, 255, (num_bytes,), dtype=torch.uint8).view(dtype).reshape(shape)


def test_a_file_is_that_of_safetensors_byte_by_byte(tmp_path):
    torch.manual_seed(0)
    tensors = {f"{index} of {dtype}": of_dtype(dtype, 3, 5) for index, dtype in enumerate(_NAMES)}
    tensors |= {"a number": torch.tensor(3.0), "none": torch.empty(0, 4), "long": torch.rand(600_000)}
    tensors |= {"turned": torch.rand(7, 3).t(), 'a "name" \\ of ünicode': torch.rand(2, requires_grad=True)}
    sha256, num_bytes = write_tensors(tmp_path / "mine", tensors)
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, tmp_path / "theirs")
    mine = (tmp_path / "mine").read_bytes()
    assert (sha256, num_bytes) == (hashlib.sha256(mine).hexdigest(), len(mine))
    with safe_open(tmp_path / "theirs", "pt") as theirs:
        assert set(theirs.keys()) == set(tensors)
    assert mine == (tmp_path / "theirs").read_bytes()


def test_a_file_without_tensors_is_read(tmp_path):
    write_tensors(tmp_path / "empty", {})
    assert load_file(tmp_path / "empty") == {}


def test_a_dtype_without_a_name_is_refused(tmp_path):
    with pytest.raises(OSError, match=r"cannot hold 'x' of torch\.complex128"):
        write_tensors(tmp_path / "x", {"x": torch.zeros(2, dtype=torch.complex128)})
    assert not (tmp_path / "x").exists()


def pages_in_memory(path: Path) -> int:
    """How many pages of a file the kernel holds, by mincore."""
    held = (ctypes.c_ubyte * -(-path.stat().st_size // mmap.PAGESIZE))()
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE) as seen:
        start = ctypes.c_char.from_buffer(seen)
        found = ctypes.CDLL(None, use_errno=True).mincore(
            ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(len(seen)), held
        )
        del start
    assert found == 0
    return sum(page & 1 for page in held)


@pytest.mark.skipif(sys.platform != "linux", reason="mincore")
def test_what_is_on_disk_does_not_stay_in_memory(tmp_path):
    plain = tmp_path / "plain"
    with open(plain, "wb") as file:
        file.write(bytes(2**20))
        file.flush()
        os.fsync(file.fileno())
        assert pages_in_memory(plain) == 2**20 // mmap.PAGESIZE
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if pages_in_memory(plain):
        pytest.skip("the folder itself is in memory")
    write_tensors(tmp_path / "x", {"x": torch.zeros(2**24, dtype=torch.uint8)})
    assert pages_in_memory(tmp_path / "x") == 0
