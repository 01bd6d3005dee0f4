"""The GPUs among a cluster's devices, and which GPU of this host each of them is. Loads torch when asked."""

import os
import re
from collections.abc import Iterable

from cost_model.catalogue import accelerator
from cost_model.cluster import Device
from cost_model.errors import InputError
from cost_model.vendors import vendor_of


def gpu_index(device: Device) -> int:
    """Return the number that torch gives a device: that among the GPUs of its node."""
    return int(device.name.rpartition("/")[2]) if device.gpu is None else device.gpu


def before_cuda(num_processes: int | None = None) -> None:
    """Set what one of several processes has to set before it uses its GPU for the first time.

    num_processes: how many there are; None for those of torchrun, or of the process group.

    NOTE: the driver loads a kernel when it is first used, for which it may wait until the GPU is idle (CUDA
    programming guide, "Lazy Loading"): for ever, where NCCL waits on it for a message that comes of what that
    kernel computes. Loaded at the start all kernels take some hundreds of MB of the GPU's memory. And NCCL
    connects a group for an algorithm when it first chooses it, for which all members must be there. The
    driver reads the first when a process first counts its GPUs, which joining a group of NCCL does. Torch's
    allocator gives memory back by a call that waits for the GPU, too, unless its segments can grow. Streams
    that share one of the GPU's queues, eight by default, wait for each other: computations for a message that
    nobody takes yet (CUDA programming guide, "CUDA environment variables").
    """
    if num_processes is None:
        import torch.distributed as dist

        started = int(os.environ.get("WORLD_SIZE", "1"))  # by torchrun
        num_processes = max(started, dist.get_world_size() if dist.is_initialized() else 1)
    if num_processes > 1:
        os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
        os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
            os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def gpus_here() -> list[str]:
    """Return the kind of each GPU of this host, of whatever maker torch was built for."""
    from hetpipe.runtime.accelerators import names_here

    before_cuda()
    return [gpu_kind(name) for name in names_here()]


def free_memory_here() -> list[float]:
    """Return the bytes of each GPU of this host that other processes leave.

    NOTE: to ask makes a context on each GPU, for as long as this process lives.
    """
    import torch

    from hetpipe.runtime.accelerators import memory_figures, vendor_here

    vendor = vendor_here()
    found = []
    for index in range(len(gpus_here())):
        assert vendor is not None
        figures = memory_figures(torch.device(vendor.device_type, index))
        assert figures is not None
        found.append(min(figures.total_bytes, figures.free_bytes + vendor.lazy_context_bytes))
    return found


def gpu_kind(name: str) -> str:
    """Return the kind that a GPU's name stands for: maker and model.

    >>> gpu_kind("NVIDIA GeForce RTX 2080 Ti"), gpu_kind("Intel(R) Arc(TM) A770 Graphics")
    ('NVIDIA-GeForce-RTX-2080-Ti', 'Intel-Arc-A770-Graphics')
    """
    return re.sub(r"[^A-Za-z0-9_.]+", "-", re.sub(r"\((R|TM)\)", "", name)).strip("-")


def check_here(devices: Iterable[Device], instead: str) -> None:
    """Check, without starting anything, that the GPUs among some devices are this host's, all different.

    instead: what the user can do, for the error.

    Raises: InputError for a GPU that is not here, is another card than its kind says, or is named twice.
    """
    wanted = [device for device in devices if device.is_gpu]
    here = gpus_here() if wanted else []
    holders: dict[int, str] = {}
    for device in wanted:
        index, name = gpu_index(device), f"device {device.name!r} is a {device.kind}"
        if index >= len(here):
            raise InputError(f"{name}, and this host has no GPU {index}; {instead}")
        if other_card(device.kind, here[index]):
            raise InputError(f"{name}, and GPU {index} of this host a {here[index]}; {instead}")
        holder = holders.setdefault(index, device.name)
        if holder != device.name:
            raise InputError(f"devices {holder!r} and {device.name!r} are both GPU {index} here; {instead}")


def other_card(kind: str, gpu: str) -> bool:
    """Return whether two names stand for different makers or models; unknown models and variants do not.

    >>> other_card("RTX-4090", "H100-PCIE"), other_card("A100-SXM4-40GB", "A100-PCIE-80GB")
    (True, False)
    >>> other_card("gpu", "H100-PCIE"), other_card("Apple-M3", "NVIDIA-H100-PCIE")
    (False, True)
    """
    if vendor_of(kind) is not vendor_of(gpu):
        return True
    try:
        models = [_model(accelerator(name).name) for name in (kind, gpu)]
    except InputError:
        return False
    return models[0] != models[1]


def _model(name: str) -> str:
    """Return what is before the variant: "A100" of A100-PCIE-40GB, "3090" of RTX-3090-Ti.

    A name without a number stays as it is.
    """
    return next((word for word in name.split("-") if any(map(str.isdigit, word))), name)
