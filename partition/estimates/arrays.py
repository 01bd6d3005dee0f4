"""The types of the arrays that tables and dynamic programmes are made of."""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Singles = npt.NDArray[np.float32]
Integers = npt.NDArray[np.integer]
Places = npt.NDArray[np.int64]
"""Indices into another array."""
Bools = npt.NDArray[np.bool_]
