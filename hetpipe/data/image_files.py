"""Files of images with labels: MNIST's IDX files, and arrays of NumPy."""

import gzip
import math
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cost_model.errors import InputError
from hetpipe.data.data_file import read_file

IMAGES, LABELS = "images", "labels"
_PACKED = ".gz"
_IDX_IMAGES, _IDX_LABELS = "-images-idx3-ubyte", "-labels-idx1-ubyte"

Pixels = npt.NDArray[Any]


def is_image_file(path: Path) -> bool:
    """Return whether a file is called as one of images is: .npz, or MNIST's name with .gz or without."""
    return path.suffix.lower() == ".npz" or path.name.removesuffix(_PACKED).endswith(_IDX_IMAGES)


def read_images(path: Path) -> tuple[Pixels, npt.NDArray[Any]]:
    """Return images [samples, height, width] or [samples, height, width, channels], and a label for each.

    Images are bytes, or numbers in [0, 1]. The labels of an IDX file lie beside it, under MNIST's name.

    Raises: InputError naming what cannot be used.
    """
    if path.suffix.lower() == ".npz":
        images, labels = _read_npz(path)
    else:
        images, labels = _read_idx(path, 3), _read_idx(_labels_of(path), 1)
    if images.ndim not in (3, 4) or 0 in images.shape:
        raise InputError(
            f"data file {path}: images are {list(images.shape)}; give [samples, height, width], or "
            "[samples, height, width, channels]"
        )
    if labels.shape != images.shape[:1] or labels.dtype.kind not in "iu":
        raise InputError(
            f"data file {path}: {len(images):,} images, and labels {list(labels.shape)} of {labels.dtype}; "
            "give a whole number for each image"
        )
    if images.dtype == np.uint8:
        return images, labels
    if images.dtype.kind != "f" or not (
        np.isfinite(images).all() and images.min() >= 0 and images.max() <= 1
    ):
        raise InputError(
            f"data file {path}: images are {images.dtype} with values beyond 0 to 1; give bytes (uint8), or "
            "numbers from 0 to 1"
        )
    return images.astype(np.float32), labels


def _read_npz(path: Path) -> tuple[Pixels, npt.NDArray[Any]]:
    read_file(path)
    try:
        with np.load(path, allow_pickle=False) as arrays:
            missing = [name for name in (IMAGES, LABELS) if name not in arrays]
            if missing:
                raise InputError(
                    f"data file {path}: holds {', '.join(arrays) or 'nothing'} and no {missing[0]!r}; save "
                    f"both as numpy.savez(path, {IMAGES}=..., {LABELS}=...)"
                )
            return arrays[IMAGES], arrays[LABELS]
    except (OSError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        reason = str(error).partition("\n")[0]
        raise InputError(f"data file {path}: is no whole .npz of plain arrays ({reason})") from None


def _labels_of(path: Path) -> Path:
    packed = _PACKED if path.name.endswith(_PACKED) else ""
    start = path.name.removesuffix(packed).removesuffix(_IDX_IMAGES)
    names = [f"{start}{_IDX_LABELS}{end}" for end in (packed, "" if packed else _PACKED)]
    found = next((path.with_name(name) for name in names if path.with_name(name).is_file()), None)
    if found is None:
        raise InputError(f"data file {path}: its labels are not beside it; put {names[0]} there")
    return found


def _read_idx(path: Path, num_axes: int) -> npt.NDArray[np.uint8]:
    """Return the bytes of an IDX file (LeCun et al., MNIST): 0, 0, 8, axes, each length in 4 bytes, data."""
    data = read_file(path)
    try:
        data = gzip.decompress(data) if path.name.endswith(_PACKED) else data
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"data file {path}: cannot be unpacked ({error}); copy it again") from None
    start = 4 + 4 * num_axes
    if data[:4] != bytes((0, 0, 8, num_axes)) or len(data) < start:
        raise InputError(f"data file {path}: is no IDX file of bytes with {num_axes} axes; copy it again")
    shape = [int(length) for length in np.frombuffer(data, ">u4", num_axes, 4)]
    if len(data) != start + math.prod(shape):
        raise InputError(
            f"data file {path}: has {len(data) - start:,} bytes of data, and its head says "
            f"{math.prod(shape):,}; copy it again"
        )
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)
