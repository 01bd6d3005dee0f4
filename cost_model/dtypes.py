"""The precisions in which a model may be trained, by the name that profiles and settings use."""

import contextlib
from collections.abc import Iterable

from cost_model.catalogue import accelerator
from cost_model.cluster import Device
from cost_model.errors import InputError

FLOAT32, FLOAT64, BFLOAT16_AUTOCAST = "float32", "float64", "bfloat16-autocast"
DTYPES = (FLOAT32, FLOAT64, BFLOAT16_AUTOCAST)
_SHORT = {"bf16": BFLOAT16_AUTOCAST}


def parse_dtype(text: str | None) -> str | None:
    """Return the full name of a --dtype.

    >>> parse_dtype("bf16"), parse_dtype("float32")
    ('bfloat16-autocast', 'float32')

    Raises: InputError if there is no such precision.
    """
    if text is None:
        return None
    name = _SHORT.get(text, text)
    if name not in DTYPES:
        raise InputError(f"--dtype {text!r} is not supported; give {', '.join((*_SHORT, *DTYPES))}")
    return name


def multiplied_in(dtype: str) -> str:
    """Return the dtype that matrices are multiplied in, as the catalogue names it."""
    return "bfloat16" if dtype == BFLOAT16_AUTOCAST else dtype


def lowered_share(dtype: str) -> float:
    """Return bytes of a weight's lowered copy over its own, in [0, 1].

    Of weights that are multiplied: embeddings and norms are not lowered.
    """
    return 0.5 if dtype == BFLOAT16_AUTOCAST else 0.0


def lacks_units(dtype: str, kind: str) -> bool:
    """Return whether a kind is known to have no units for the precision; False of kinds not catalogued."""
    if dtype != BFLOAT16_AUTOCAST:
        return False
    with contextlib.suppress(InputError):
        return "bfloat16" not in accelerator(kind).peak_flops
    return False


def check_fast(dtype: str, devices: Iterable[Device]) -> None:
    """Refuse devices that are known to have no units for the precision.

    Raises: InputError naming the first one, and the remedy.
    """
    for device in devices:
        if lacks_units(dtype, device.kind):
            raise InputError(
                f"device {device.name!r} is a {device.kind}, which has no units for bfloat16 and gains "
                f"nothing; leave it out (--exclude {device.name}), train in float32, or give "
                "--allow-slow-bf16"
            )


def check_estimable(dtype: str, kinds: Iterable[str]) -> None:
    """Refuse to estimate a kind, or from a kind, that is known to have no units for the precision.

    Raises: InputError naming the first one, and the remedy.
    """
    for kind in kinds:
        if lacks_units(dtype, kind):
            raise InputError(
                f"{kind} has no units for bfloat16, and would be estimated at its float32 rate; leave "
                "it out, estimate in float32, or give --allow-slow-bf16"
            )
