"""Images with a label each, for image classification."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cost_model.errors import InputError
from cost_model.strict_files import read_json, write_atomically
from hetpipe.data.dataset import replacing
from hetpipe.data.image_files import Pixels, is_image_file, read_images
from hetpipe.data.keyed_order import permuted
from hetpipe.data.kind import Learner, Reading, StepData
from hetpipe.data.label_names import model_labels
from hetpipe.models.task_inputs import IMAGES
from hetpipe.models.tasks import Task

IMAGES_FILE, LABELS_FILE = "images.npy", "labels.npy"
PROCESSOR_FILE = "preprocessor_config.json"
_STAND_IN = 64


@dataclass(frozen=True, slots=True)
class Normalisation:
    """What is taken from each channel of values in [0, 1], and by what the rest is divided."""

    mean: tuple[float, ...] = (0.5,)
    deviation: tuple[float, ...] = (0.5,)

    @classmethod
    def of(cls, model: Learner) -> "Normalisation":
        """Return that of the model's folder, else that of ViT: values go to [-1, 1].

        Raises: InputError if the folder's cannot be used.
        """
        path = None if model.folder is None else model.folder.path / PROCESSOR_FILE
        if path is None or not path.is_file():
            return cls()
        data = read_json(path)
        if not isinstance(data, dict) or not data.get("do_normalize", True):
            raise InputError(f"{path}: names no normalisation; give image_mean and image_std, or remove it")
        if abs(data.get("rescale_factor", 1 / 255) * 255 - 1) > 1e-6 or not data.get("do_rescale", True):
            raise InputError(f"{path}: bytes are divided by 255 here, and it says otherwise; change it")
        try:
            mean, deviation = (tuple(map(float, data[key])) for key in ("image_mean", "image_std"))
        except (KeyError, TypeError, ValueError):
            raise InputError(f"{path}: has no image_mean and image_std of numbers; copy it again") from None
        return cls(mean, deviation)

    def for_transformers(self, channels: int, height: int, width: int) -> str:
        """Return the preprocessor_config.json by which transformers makes the same of bytes of this size."""
        mean, deviation = (
            list(values if len(values) == channels else values * channels)
            for values in (self.mean, self.deviation)
        )
        content = {
            "do_normalize": True,
            "do_rescale": True,
            "do_resize": True,
            "image_mean": mean,
            "image_processor_type": "ViTImageProcessor",
            "image_std": deviation,
            "resample": 2,
            "rescale_factor": 1 / 255,
            "size": {"height": height, "width": width},
        }
        return json.dumps(content, indent=2) + "\n"


@dataclass(frozen=True, slots=True)
class Images:
    """Images of one size and their labels; see `read_images`."""

    images: Pixels
    labels: npt.NDArray[Any]

    @property
    def sha256(self) -> str:
        """Return the hash of pixels and labels."""
        found = hashlib.sha256(repr((self.images.shape, self.images.dtype.str)).encode())
        found.update(self.images.tobytes())
        found.update(self.labels.astype("<i8").tobytes())
        return found.hexdigest()

    @property
    def words(self) -> Sequence[str]:
        """Return nothing: there is no text."""
        return ()

    def write(self, place: Path, reading: Reading) -> list[str]:
        """Write pixels [samples, channels, height, width] in the size of the model, and how they are read.

        Raises: InputError if they have more channels than the model, or another shape.
        """
        channels, height, width = reading.inputs.image
        if not self.images.size:  # that of no file
            images = np.zeros((len(self.labels), height, width), np.uint8)
            return Images(images, self.labels).write(place, reading)
        pixels = self.images[..., None] if self.images.ndim == 3 else self.images
        pixels = np.moveaxis(pixels, -1, 1)
        if pixels.shape[1] not in (1, channels):
            raise InputError(
                f"images have {pixels.shape[1]} channels, {reading.model.name} takes {channels}; give images "
                "of as many, or of one"
            )
        told = []
        if pixels.shape[1] < channels:
            pixels = np.repeat(pixels, channels, axis=1)
            told.append(f"grey images: their one channel stands for each of {channels}")
        if (size := pixels.shape[2:]) != (height, width):
            if size[0] * width != size[1] * height:
                raise InputError(
                    f"images are {size[0]} x {size[1]}, {reading.model.name} takes {height} x {width}, which "
                    "is of another shape; cut or pad them"
                )
            pixels = _resized(pixels, (height, width))
            told.append(f"images are resized from {size[0]} x {size[1]} to {height} x {width} (bilinear)")
        for name, array in ((IMAGES_FILE, pixels), (LABELS_FILE, self.labels.astype(np.int64))):
            with replacing(place / name) as file:
                np.save(file, np.ascontiguousarray(array))
        normalisation = Normalisation.of(reading.model)
        write_atomically(reading.processor, normalisation.for_transformers(channels, height, width))
        return told


def _resized(pixels: Pixels, size: tuple[int, int]) -> Pixels:
    """Return the images in another size: bilinear with antialiasing, bytes rounded to bytes."""
    made = [
        torch.nn.functional.interpolate(
            torch.from_numpy(np.array(part)).float(), size, mode="bilinear", antialias=True
        ).numpy()
        for part in np.array_split(pixels, max(1, len(pixels) // 1024))
    ]
    found = np.concatenate(made)
    return found.round().clip(0, 255).astype(np.uint8) if pixels.dtype == np.uint8 else found.clip(0, 1)


@dataclass(frozen=True, slots=True, eq=False)
class ImageDataset:
    """The endless training order over images [samples, channels, height, width], bytes or in [0, 1]."""

    images: Pixels
    labels: npt.NDArray[np.int64]
    mean: npt.NDArray[np.float32]
    deviation: npt.NDArray[np.float32]
    seed: int

    @property
    def num_samples(self) -> int:
        """Return the images of one epoch."""
        return len(self.labels)

    @property
    def num_terms(self) -> int:
        """Return the images of one epoch: each has a label."""
        return len(self.labels)

    @property
    def count_terms(self) -> Callable[[Any], int] | None:
        """Return None: each sample has one."""
        return None

    def num_loss_tokens(self, num_samples: int) -> int:
        """Return the samples."""
        return num_samples

    def batch(self, first_sample: int, num_samples: int) -> StepData:
        """Return the samples at positions [first_sample, first_sample + num_samples)."""
        rows = permuted(self.seed, self.num_samples, first_sample, num_samples)
        values = self.images[rows]
        scaled = values.astype(np.float32) / 255 if values.dtype == np.uint8 else values
        pixels = (scaled - self.mean[:, None, None]) / self.deviation[:, None, None]
        positions = np.arange(first_sample, first_sample + num_samples)
        return StepData({IMAGES: pixels}, self.labels[rows], positions, num_samples)

    def notes(self) -> list[str]:
        """Return how many there are of how many labels."""
        return [f"{self.num_samples:,} images of {len(np.unique(self.labels))} labels"]


class ImageKind:
    """The `hetpipe.data.kind.DataKind` of images with a label each."""

    name = "images"
    form = "an .npz with images and labels, or MNIST's ...-images-idx3-ubyte"
    tasks: tuple[Task, ...] = (Task.IMAGE_CLASSIFICATION,)
    files: tuple[str, ...] = (IMAGES_FILE, LABELS_FILE)
    is_brought = False
    packs = False
    fills = False
    is_held = True

    def holds(self, path: Path) -> bool:
        """Return whether the file is called as one of images is."""
        return is_image_file(path)

    def read(self, paths: Sequence[Path], model: Learner) -> Images:
        """Read files of one size; of none images without content, to measure with."""
        names = model_labels(model)
        if not paths:
            labels = np.arange(_STAND_IN) % len(names)
            return Images(np.zeros((_STAND_IN, 0, 0), np.uint8), labels)
        found = [(path, *read_images(path)) for path in paths]
        first, shape = found[0][0], found[0][1].shape[1:]
        for path, images, labels in found:
            if images.shape[1:] != shape or images.dtype != found[0][1].dtype:
                raise InputError(
                    f"{first} has images {list(shape)} of {found[0][1].dtype}, {path} "
                    f"{list(images.shape[1:])} of {images.dtype}; give files of one size and type"
                )
            if unknown := sorted(set(np.unique(labels).tolist()) - set(range(len(names)))):
                raise InputError(
                    f"data file {path}: label {unknown[0]} is none of the model's; its config.json has 0 to "
                    f"{len(names) - 1}"
                )
        return Images(
            np.concatenate([images for _, images, _ in found]),
            np.concatenate([labels for *_, labels in found]),
        )

    def load(self, place: Path, reading: Reading) -> ImageDataset:
        """Return the images as samples."""
        try:
            images, labels = (np.load(place / name, mmap_mode="r") for name in self.files)
        except (OSError, ValueError) as error:
            raise InputError(f"images in {place} cannot be read ({error}); train into a new folder") from None
        channels = images.shape[1]
        normalisation = Normalisation.of(reading.model)
        mean, deviation = (
            np.array(values * (channels if len(values) == 1 else 1), np.float32)
            for values in (normalisation.mean, normalisation.deviation)
        )
        if len(mean) != channels or len(deviation) != channels or not (deviation > 0).all():
            raise InputError(
                f"{PROCESSOR_FILE} of {reading.model.name} normalises {len(mean)} channels, images have "
                f"{channels}; make them agree"
            )
        return ImageDataset(images, np.asarray(labels), mean, deviation, reading.seed)


IMAGE_KIND = ImageKind()
