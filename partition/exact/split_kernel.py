"""The best sum of samples over disjoint count vectors, compiled: up to 1e7 pairs of vectors at a time."""

import numpy as np
import numpy.typing as npt

from partition.exact.compiled import compiled

Places = npt.NDArray[np.int64]


@compiled
def best_parts(one: Places, digits: Places, strides: Places) -> tuple[Places, Places]:
    """Return (most samples, one part of a best split) by vector, as `WholeVectors.best` does.

    one: samples that a vector does as one pipeline. digits: [vector, class]; strides: of the classes, the
    first of which is 1.
    """
    count, num_classes = digits.shape
    best, part = np.zeros(count, np.int64), np.zeros(count, np.int64)
    taken = np.zeros(num_classes, np.int64)
    for vector in range(count):
        below, most, pick = 0, np.int64(0), 0
        going = True
        while going:
            for place in range(below, below + digits[vector, 0] + 1):
                samples = one[place] + best[vector - place]
                if samples > most:
                    most, pick = samples, place
            going = False
            for index in range(1, num_classes):  # the next vector below this one
                if taken[index] < digits[vector, index]:
                    taken[index] += 1
                    below += strides[index]
                    going = True
                    break
                below -= taken[index] * strides[index]
                taken[index] = 0
        best[vector], part[vector] = most, pick
    return best, part
