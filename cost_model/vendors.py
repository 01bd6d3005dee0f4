"""The makers of GPUs: what torch calls their devices, how these meet, and what their drivers take."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from cost_model.catalogue import Accelerator, accelerator
from cost_model.cluster import CPU, is_emulated
from cost_model.errors import InputError


@dataclass(frozen=True, slots=True)
class Vendor:
    """A maker's GPUs, as torch has them.

    device_type: of torch. backend: of torch.distributed, None where there is none, so that messages pass
    through the host's memory; library: what that backend calls, which cannot talk to another one.
    has_float64: whether tensors may be of it.

    context_bytes: what a process takes of the device's memory before it has a tensor, all kernels loaded;
    lazy_context_bytes: without loading them.
    communicator_bytes: what each communicator takes on each of its devices; over_nvlink_bytes where these are
    joined by NVLink, which has more channels.
    """

    name: str
    device_type: str
    backend: str | None
    library: str | None
    has_float64: bool
    context_bytes: float
    lazy_context_bytes: float
    communicator_bytes: float
    over_nvlink_bytes: float

    def in_communicator_bytes(self, interconnect: str) -> float:
        """Return the bytes of one communicator, by what the catalogue says that a card is attached by."""
        return self.over_nvlink_bytes if interconnect.startswith("NVLink") else self.communicator_bytes


_CHANNEL_BYTES = 544e6 / 24
"""Of NCCL: two A100 over NVLink have 24 channels and take 544 MB (NVIDIA/nccl#964).

Memory rises with the channels (#986). By #1685 a channel has buffers of 10 MiB, for a ring and for a tree,
and of 2 MiB for messages: as much.
"""

NVIDIA = Vendor(
    "NVIDIA", "cuda", "nccl", "nccl", True,
    # an H100, CUDA 13.0, after a step of BERT-large (examples/benchmarks/gpu); and cuBLAS keeps 32 MiB on
    # Hopper, 8 on others, for forward and backward each, which no layer is measured with
    context_bytes=787e6 + 2 * 2**25,
    lazy_context_bytes=287e6,  # pytorch/pytorch#86509, CUDA 11.7
    communicator_bytes=4 * _CHANNEL_BYTES,  # over PCIe: 2 channels, each twice; not measured
    over_nvlink_bytes=24 * _CHANNEL_BYTES,
)  # fmt: skip
AMD = Vendor(
    "AMD", "cuda", "nccl", "rccl", True,  # torch names HIP "cuda", and RCCL "nccl"
    # Lumi-supercomputer/LUMI-AI-Guide#111, MI250X: 1 GiB with the first communicator, 0.65 GiB for each more
    context_bytes=0.35 * 2**30, lazy_context_bytes=0.35 * 2**30,
    communicator_bytes=0.65 * 2**30, over_nvlink_bytes=0.65 * 2**30,
)  # fmt: skip
INTEL = Vendor(
    "Intel", "xpu", "xccl", "xccl", True,
    context_bytes=500e6, lazy_context_bytes=500e6,  # intel/torch-xpu-ops#3307: 500 MB and more
    communicator_bytes=4 * _CHANNEL_BYTES,  # no figure is published: as NCCL over PCIe
    over_nvlink_bytes=4 * _CHANNEL_BYTES,
)  # fmt: skip
APPLE = Vendor(
    "Apple", "mps", None, None, False,
    context_bytes=0.0, lazy_context_bytes=0.0,  # no figure is published: one memory with the host
    communicator_bytes=0.0, over_nvlink_bytes=0.0,
)  # fmt: skip
VENDORS = (NVIDIA, AMD, INTEL, APPLE)

_WORDS = (
    (NVIDIA, ("nvidia", "geforce", "tesla", "quadro", "titan", "rtx", "gtx")),
    (AMD, ("amd", "radeon", "instinct", "firepro", "mi50", "mi60", "mi100", "mi210", "mi250", "mi250x",
           "mi300", "mi300a", "mi300x", "mi325x", "mi350x", "mi355x")),
    (INTEL, ("intel", "arc", "xe", "pvc")),
    (APPLE, ("apple", "mps")),
)  # fmt: skip
"""Words of names by which makers are known; so is NVIDIA by all names of the catalogue."""


def vendor_of(kind: str) -> Vendor | None:
    """Return who makes a kind of GPU, by its name, NVIDIA if it does not tell; None of CPUs, emulated ones.

    >>> [vendor_of(kind).name for kind in ("AMD-RX-7900-XTX", "MI300X", "Apple-M3", "GeForce-RTX-4090")]
    ['AMD', 'AMD', 'Apple', 'NVIDIA']
    """
    return None if kind == CPU or is_emulated(kind) else _by_name(kind) or NVIDIA


def _by_name(kind: str) -> Vendor | None:
    words = set(re.split(r"[^a-z0-9]+", kind.lower()))
    named = next((vendor for vendor, known in _WORDS if words & set(known)), None)
    return named or (NVIDIA if _card(kind) else None)


def _card(kind: str) -> Accelerator | None:
    try:
        return accelerator(kind)
    except InputError:
        return None


def library_of(kind: str) -> str | None:
    """Return the library by which devices of a kind meet without the host's memory; None if there is none."""
    vendor = vendor_of(kind)
    return None if vendor is None else vendor.library


def driver_bytes(kind: str, counts: Mapping[str, int]) -> float:
    """Return what the driver takes on a device of a kind: its context, and its communicators.

    A stage has a communicator for each direction to each of its two neighbours, and one to sum with the other
    replicas: so many are reckoned with, fewer where there are fewer devices to talk to.

    Of a kind whose name tells neither maker nor model nothing is known, and nothing is reckoned with.

    counts: devices of the cluster by kind, this one's too.

    >>> driver_bytes("RTX-4090", {"RTX-4090": 1}), driver_bytes("cpu", {"cpu": 2})
    (854108864.0, 0.0)
    """
    vendor = vendor_of(kind)
    if vendor is None or _by_name(kind) is None:
        return 0.0
    others = sum(count for other, count in counts.items() if library_of(other) == vendor.library) - 1
    if vendor.library is None or others < 1:
        return vendor.context_bytes
    card = _card(kind)
    each = vendor.in_communicator_bytes("" if card is None else card.interconnect)
    return vendor.context_bytes + (2 * min(others, 2) + 1) * each


def check_float64(kinds: Iterable[str]) -> None:
    """Refuse float64 on kinds that have no tensors of it.

    Raises: InputError naming the first one.
    """
    for kind in kinds:
        vendor = vendor_of(kind)
        if vendor is not None and not vendor.has_float64:
            raise InputError(
                f"{kind} has no float64 ({vendor.name}'s GPUs have none); give --dtype float32, or leave "
                "these devices out (--exclude)"
            )
