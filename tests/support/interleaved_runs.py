"""Make interleaved plans, and read the first moments of a finished run."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from hetpipe.training import checkpoint
from partition.plan import Pipeline, Plan, Stage


def interleaved(model: str, devices: tuple[int, ...] = (0, 1, 0, 1), **stage: Any) -> Plan:
    cuts, in_flight = (0, 2, 4, 6, 8), (4, 3, 2, 1)
    stages = tuple(
        Stage((f"here/{device}",), (cuts[index], cuts[index + 1]), in_flight[index], **stage)
        for index, device in enumerate(devices)
    )
    return Plan("manual", model, 16, (Pipeline(3, 16, stages),))


def first_moments(run_folder: Path) -> dict[str, torch.Tensor]:
    folder = checkpoint.latest(run_folder / "checkpoints")
    assert folder is not None
    tensors = {}
    for path in sorted(folder.glob("layer-*.safetensors")):
        tensors |= load_file(path)
    return {key: value for key, value in tensors.items() if key.endswith(".exp_avg")}
