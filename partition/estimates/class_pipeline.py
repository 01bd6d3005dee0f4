"""Pipelines on classes of devices, before devices of those classes are named."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ColumnStage:
    """Layers [start, stop) on some device of a class."""

    class_index: int
    start: int
    stop: int
    recompute: bool


@dataclass(frozen=True, slots=True)
class ClassPipeline:
    """A pipeline on classes of devices, with the samples that it is meant to do."""

    microbatch_size: int
    num_samples: int
    stages: tuple[ColumnStage, ...]
