"""The compilers that torch.compile calls on this host. Loads no torch."""

import os
import shutil
from collections.abc import Iterable
from importlib.util import find_spec

from cost_model.cluster import Device
from cost_model.errors import InputError


def check_compilers(devices: Iterable[Device]) -> None:
    """Check that layers can be compiled for these devices of this host.

    For a CPU, also an emulated device, torch writes C++; for a GPU kernels of Triton, which compiles a little
    C to start them.

    Raises: InputError if a compiler is not there.
    """
    for device in devices:
        if not device.is_gpu:
            name = os.environ.get("CXX", "g++")
            if shutil.which(name) is None:
                raise InputError(
                    f"--compile needs a C++ compiler, and there is no {name!r} here; install g++ (or name "
                    "another in CXX), or leave out --compile"
                )
        elif find_spec("triton") is None or not any(map(shutil.which, _c_compilers())):
            raise InputError(
                f"--compile needs triton and a C compiler for {device.kind!r}, and one of them is not here; "
                "install it, or leave out --compile"
            )


def _c_compilers() -> tuple[str, ...]:
    return (os.environ["CC"],) if "CC" in os.environ else ("cc", "gcc", "clang")
