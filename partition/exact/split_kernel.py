"""The best sum of samples over disjoint count vectors, compiled: up to 1e7 pairs of vectors at a time."""

import numpy as np
import numpy.typing as npt

from partition.exact.compiled import compiled

Places = npt.NDArray[np.int64]


@compiled
def best_parts(one: Places, digits: Places, strides: Places) -> tuple[Places, Places]:
    """(most samples, one part of a best split) by vector; one: samples that a vector does as one pipeline.

    digits: [vector, class]; strides: of the classes, the first of which is 1.
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
            for entry in range(1, num_classes):  # the next vector below this one
                if taken[entry] < digits[vector, entry]:
                    taken[entry] += 1
                    below += strides[entry]
                    going = True
                    break
                below -= taken[entry] * strides[entry]
                taken[entry] = 0
        best[vector], part[vector] = most, pick
    return best, part
