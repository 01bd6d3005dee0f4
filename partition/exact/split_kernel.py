"""The best sum of samples over disjoint count vectors, compiled: up to 1e7 pairs of vectors at a time."""

import numpy as np

from partition.estimates.arrays import Places
from partition.estimates.compiled import compiled


@compiled
def best_parts(first: Places, second: Places, best: Places, digits: Places, strides: Places) -> Places:
    """Return the part of each vector that is best: what the first does with it, and the second with the rest.

    first, second: samples by vector; best: their best sums, filled here. With `best` as the second, zeros at
    first, any number of pipelines do them, as in `WholeVectors.best`. digits: [vector, class]; strides: of
    the classes, the first of which is 1.
    """
    count, num_classes = digits.shape
    part = np.zeros(count, np.int64)
    taken = np.zeros(num_classes, np.int64)
    for vector in range(count):
        below, most, pick = 0, np.int64(0), 0
        going = True
        while going:
            for place in range(below, below + digits[vector, 0] + 1):
                samples = first[place] + second[vector - place]
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
    return part
