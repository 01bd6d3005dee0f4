"""An optimizer that writes down, before each step, every tensor that is alive in its process."""

import gc
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class WatchedAdamW(torch.optim.AdamW):
    """AdamW by torch; a line of JSON for each step into a file of the process.

    A line holds, of each storage that is alive: shape of a tensor on it, dtype, bytes.
    """

    def __init__(self, parameters: Any, folder: Path) -> None:
        super().__init__(parameters, lr=0.01)
        self.place = Path(folder) / f"{os.getpid()}.jsonl"

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        with self.place.open("a") as file:
            file.write(json.dumps(live_storages()) + "\n")
        return result


def live_storages() -> list[tuple[list[int], str, int]]:
    """Shape, dtype and bytes of each storage that any tensor here is on, gradients too."""
    found: dict[int, tuple[list[int], str, int]] = {}
    for tensor in _tensors():
        storage = tensor.untyped_storage()
        found[storage._cdata] = (list(tensor.shape), str(tensor.dtype), storage.nbytes())
    return list(found.values())


def _tensors() -> Iterable[Tensor]:
    gc.collect()
    alive = [value for value in gc.get_objects() if issubclass(type(value), Tensor)]
    for tensor in alive:
        if tensor.is_meta:
            continue
        yield tensor
        if tensor.is_leaf and tensor.grad is not None:
            yield tensor.grad
