"""What is measured where no option says it: little on CPUs and emulated devices, on GPUs what suits them."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from cost_model.cluster import Cluster
from cost_model.dtypes import FLOAT32, dtypes_of, fastest
from cost_model.errors import InputError
from hetpipe.models.names import model_entry

LENGTH, GPU_LENGTH = 64, 512
"""Tokens a sample; GPUs are bound by launches, not by their arithmetic, at the first."""

FEW_SIZES = (1, 2, 4)


@dataclass(frozen=True, slots=True)
class Measured:
    """How a model is measured: tokens a sample, precision as --dtype has it, sizes of microbatches.

    microbatch_sizes: None: up to the largest that fits. said: a sentence about defaults that suit GPUs alone,
    for when nothing was refused; () where there are none.
    """

    sequence_length: int
    dtype: str | None
    microbatch_sizes: Sequence[int] | None = FEW_SIZES
    said: tuple[str, ...] = ()


def measured(
    cluster: Cluster,
    model: str,
    sequence_length: int | None,
    dtype: str | None,
    sizes: Sequence[int] | None = FEW_SIZES,
    *,
    sizes_given: bool = False,
    further: Collection[str] = (),
) -> Measured:
    """Return how to measure, with defaults for what is not given.

    Where all devices are GPUs: sequences of GPU_LENGTH, or the most that the model takes; for each kind the
    fastest precision that the catalogue knows of it, float32 of others; microbatches up to the largest that
    fits.

    model: its name or folder, without adapters. further: kinds of GPU that the cluster has not.
    """
    if not all(device.is_gpu for device in cluster.devices):
        return Measured(LENGTH if sequence_length is None else sequence_length, dtype, sizes)
    said = []
    if sequence_length is None:
        from hetpipe.models.huggingface import model_spec

        entry = model_entry(model)
        most = model_spec(entry.name, entry.place).max_sequence_length
        sequence_length = min(GPU_LENGTH, most)
        said.append(f"--sequence-length {sequence_length}")
    if dtype is None:
        kinds = dict.fromkeys([*(device.kind for device in cluster.devices), *further])
        dtype = ",".join(("auto", *(f"{kind}={FLOAT32}" for kind in kinds if not _is_known(kind))))
        found = ", ".join(f"{kind} {each}" for kind, each in dtypes_of(dtype, kinds).items())
        said.append(f"--dtype {dtype} ({found})")
    if not sizes_given:
        sizes = None
        said.append("--microbatch-sizes auto")
    sentence = f"all devices are GPUs, so what is not given is {', '.join(said)}"
    return Measured(sequence_length, dtype, sizes, (sentence,) if said else ())


def _is_known(kind: str) -> bool:
    try:
        fastest(kind)
    except InputError:
        return False
    return True
