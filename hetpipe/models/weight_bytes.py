"""The bytes of a layer's weights: stored, trained, lowered for a step, dequantized for an operation."""

import math
from collections.abc import Collection
from dataclasses import dataclass

import torch

from hetpipe.models.block_structure import ParameterInfo
from hetpipe.models.frozen_weights import Use


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """The bytes of a layer's weights.

    stored: as they are held between steps; trained: those of them that have a gradient; lowered: copies of
    trained ones that autocast makes in each step, and keeps to its end; dequantized: copies of quantized
    ones, each made for the time of one operation; rounded: what frozen ones lack to what they were given in.
    """

    stored: float
    trained: float
    lowered: float
    num_parameters: int
    dequantized: float = 0.0
    rounded: float = 0.0

    @classmethod
    def of(
        cls, infos: Collection[ParameterInfo], dtype: torch.dtype, lowered: torch.dtype | None
    ) -> "WeightBytes":
        """Return the bytes of these parameters; dtype: of trained ones; lowered: None for no autocast."""
        counts = {info: math.prod(info.shape) for info in infos}
        stored = {info: info.kept_bytes(dtype, lowered) for info in counts}
        copied = 0 if lowered is None else lowered.itemsize
        return cls(
            stored=float(sum(stored.values())),
            trained=float(sum(num_bytes for info, num_bytes in stored.items() if info.reached)),
            lowered=float(
                sum(
                    copied * count
                    for info, count in counts.items()
                    if info.reached and Use.MULTIPLIED in info.uses
                )
            ),
            num_parameters=sum(counts.values()),
            dequantized=float(
                sum(
                    count * (lowered or dtype).itemsize
                    for info, count in counts.items()
                    if info.packing is not None
                )
            ),
            rounded=float(
                sum(
                    count * (info.given.itemsize - info.kept_dtype(dtype, lowered).itemsize)
                    for info, count in counts.items()
                    if info.packing is None and info.is_rounded(info.kept_dtype(dtype, lowered))
                )
            ),
        )
