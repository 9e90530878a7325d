"""Which points of a long curve are drawn: never more than 4096, and never without the extremes."""

import numpy as np
import numpy.typing as npt

MAX_POINTS = 4096
BINS = 400  # along a log axis: about two pixels each
Indices = npt.NDArray[np.int64]
Values = npt.NDArray[np.float64]


def spaced(length: int, most: int = MAX_POINTS) -> Indices:
    """Whole numbers from 1 to `length`, at most `most`: every one at first, then log-spaced.

    >>> spaced(5).tolist()
    [1, 2, 3, 4, 5]
    >>> spaced(2**20).size <= MAX_POINTS
    True
    """
    if length <= most:
        return np.arange(1, length + 1)
    # rounding merges the small ones, so there is room: the first `most // 4` are all kept
    start = most // 4
    tail = np.geomspace(start, length, most - start).round().astype(np.int64)
    return np.unique(np.concatenate([np.arange(1, start + 1), tail]))


def log_bins(length: int, most: int = BINS) -> Indices:
    """First distance of each of at most `most` bins of 1 .. length, equally wide on a log axis.

    A bin ends where the next one begins; near 1 every distance is a bin of its own.

    >>> log_bins(100, 8).tolist()
    [1, 2, 3, 6, 10, 18, 32, 57]
    """
    if length <= most:
        return np.arange(1, length + 1)
    return np.unique(np.geomspace(1, length + 1, most + 1)[:-1].round().astype(np.int64))


def extremes(values: Values, starts: Indices) -> tuple[Indices, Indices]:
    """Where a curve is lowest and where it is highest in each bin: two index arrays, one per bin.

    values  one for each of the distances 0, 1, 2 ..; a log axis has no place for 0
    starts  from `log_bins`
    """
    ends = [*starts[1:].tolist(), len(values)]
    parts = [(start, values[start:end]) for start, end in zip(starts.tolist(), ends, strict=True)]
    low = np.array([start + int(part.argmin()) for start, part in parts])
    high = np.array([start + int(part.argmax()) for start, part in parts])
    return low, high


def means(values: Values, starts: Indices) -> Values:
    """Mean of the curve in each bin; arguments as in `extremes`."""
    sums: Values = np.add.reduceat(values, starts)
    return sums / np.diff(starts, append=len(values))
