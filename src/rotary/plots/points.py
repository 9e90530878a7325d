"""Chooses the points of a long curve that are drawn: at most 4096; extremes and means of bins."""

import numpy as np
import numpy.typing as npt

MAX_POINTS = 4096
BINS = 400  # along a log axis: about two pixels each
Indices = npt.NDArray[np.int64]
Values = npt.NDArray[np.float64]


def spaced(length: int, most: int = MAX_POINTS) -> Indices:
    """Return at most `most` whole numbers from 1 to `length`: all small ones, then log-spaced.

    >>> spaced(5).tolist()
    [1, 2, 3, 4, 5]
    >>> spaced(2**20).size <= MAX_POINTS
    True
    """
    if length <= most:
        return np.arange(1, length + 1)
    # log-spaced small numbers would coincide after rounding, so the first `most // 4` are all kept
    start = most // 4
    tail = np.geomspace(start, length, most - start).round().astype(np.int64)
    return np.unique(np.concatenate([np.arange(1, start + 1), tail]))


def log_bins(length: int, most: int = BINS) -> Indices:
    """Return the first distance of at most `most` bins of 1 .. length, equally wide on a log axis.

    A bin ends where the next one begins; near 1 every distance is a separate bin.

    >>> log_bins(100, 8).tolist()
    [1, 2, 3, 6, 10, 18, 32, 57]
    """
    if length <= most:
        return np.arange(1, length + 1)
    return np.unique(np.geomspace(1, length + 1, most + 1)[:-1].round().astype(np.int64))


def extremes(values: Values, starts: Indices) -> tuple[Indices, Indices]:
    """Return the index of the lowest and of the highest value in each bin: two arrays.

    values  one for each of the distances 0, 1, 2 ..; that at 0 is in no bin, for a log axis
    starts  from `log_bins`
    """
    _, *parts = np.split(values, starts)
    low = starts + np.array([part.argmin() for part in parts])
    high = starts + np.array([part.argmax() for part in parts])
    return low, high


def means(values: Values, starts: Indices) -> Values:
    """Return the mean of the curve in each bin; arguments as in `extremes`."""
    return np.add.reduceat(values, starts) / np.diff(starts, append=len(values))
