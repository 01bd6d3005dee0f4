"""The measurement of a host's CPU: for how many bytes of parameters it makes an AdamW step in a second."""

import os
import statistics
import time

import torch
from torch import nn

from cost_model.cluster import is_emulated
from hetpipe.runtime.optimizer import Optimizer

NUM_ELEMENTS, FEW_ELEMENTS = 2**24, 2**22
"""Parameters that are stepped: with gradients and states 256 MiB in float32, which no cache holds; beside
emulated devices, whose models are small, 64 MiB."""
ROUNDS = 3


def host_step_bytes_per_s(kind: str, dtype: torch.dtype) -> float:
    """Return for how many bytes of parameters this host makes a step of hetpipe's AdamW in a second.

    With all its cores, which the devices that let it step share; for emulated devices with one, as all that
    stands for them is computed.
    """
    emulated, threads = is_emulated(kind), torch.get_num_threads()
    torch.set_num_threads(1 if emulated else os.cpu_count() or 1)
    try:
        value = nn.Parameter(torch.zeros(FEW_ELEMENTS if emulated else NUM_ELEMENTS, dtype=dtype))
        optimizer = Optimizer({"weights": value}, (), 0.0)
        value.grad = torch.ones_like(value)
        seconds = []
        for _ in range(ROUNDS + 1):  # the first one touches all memory
            begin_s = time.perf_counter()
            optimizer.step(1e-3, 1.0)
            seconds.append(time.perf_counter() - begin_s)
    finally:
        torch.set_num_threads(threads)
    return value.numel() * value.element_size() / statistics.median(seconds[1:])
