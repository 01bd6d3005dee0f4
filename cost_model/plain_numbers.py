"""Numbers as Python has them, of what a caller gives: NumPy's are taken for what they are."""

import operator

import numpy as np

from cost_model.errors import InputError


def whole_number(name: str, value: object) -> int:
    """Return a whole number that a caller gave under a name.

    >>> whole_number("steps", np.int64(3))
    3

    Raises: InputError for what is none: also for 3.0, and for True and False.
    """
    if not isinstance(value, bool | np.bool_):
        try:
            return operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            pass
    raise InputError(f"{name} is {value!r}; give a whole number")


def plain(value: object) -> object:
    """Return a number of NumPy as Python has it, anything else as text: for JSON, which knows neither."""
    return value.item() if isinstance(value, np.generic) else str(value)
