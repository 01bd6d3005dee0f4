"""Compiled inner loops. Importing this takes 0.2 s: only what looks at very many candidates does."""

from collections.abc import Callable
from typing import Any

import numba


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function as machine code, made at the first call.

    It is kept beside the module, or in the user's cache; where neither can be written, for this process only.
    """
    try:
        kept: Callable[..., Any] = numba.njit(cache=True, error_model="numpy")(function)
    except RuntimeError:
        kept = numba.njit(error_model="numpy")(function)
    return kept
