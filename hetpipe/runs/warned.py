"""Warnings of the library, told at the line of the program that called it."""

import sys
import warnings

_OWN = ("cost_model", "partition", "hetpipe", "contextlib", "torch")
"""Packages whose lines say nothing to who wrote the program; torch and contextlib wrap some functions."""


def warn_caller(sentence: str) -> None:
    """Warn of something, and show the line of the program that led there, not one of ours."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _OWN:
        frame, level = frame.f_back, level + 1
    warnings.warn(sentence, stacklevel=level)
