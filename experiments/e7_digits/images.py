"""The 8 x 8 digits of scikit-learn, and the same at a larger size."""

import functools
import hashlib
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional

from ..lab.data import TRAINING, Batch

SIDE = 8
CLASSES = 10
VALIDATION, HELD_OUT = 300, 600  # of 1797, sorted by writer, so these are mostly other hands


class Digits(NamedTuple):
    """Three parts: pixels in 0..1, (images, 64) float32, and their digits, (images, 1) int64.

    training    the first 897, to learn from
    validation  the next 300, to choose learning rates by
    held_out    the last 600, to report
    """

    training: Batch
    validation: Batch
    held_out: Batch
    sha256: str


@functools.cache
def digits() -> Digits:
    """The 1797 images in three parts. Raises ValueError where scikit-learn is missing.

    >>> [len(part.targets) for part in digits()[:3]]
    [897, 300, 600]
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise ValueError("the digits come with scikit-learn: pip install scikit-learn") from None
    found = load_digits()
    content = found.data.astype(np.uint8).tobytes() + found.target.astype(np.uint8).tobytes()
    pixels = torch.from_numpy(found.data).float() / 16
    names = torch.from_numpy(found.target).long()[:, None]
    cuts = (len(pixels) - VALIDATION - HELD_OUT, len(pixels) - HELD_OUT)
    training, validation, held_out = map(Batch, pixels.tensor_split(cuts), names.tensor_split(cuts))
    return Digits(training, validation, held_out, hashlib.sha256(content).hexdigest())


def drawn(images: Batch, rows: int, seed: int, step: int) -> Batch:
    """The images of a step, by (seed, step) alone.

    >>> drawn(digits().training, 4, seed=0, step=0).tokens.shape
    torch.Size([4, 64])
    """
    chance = np.random.default_rng([4, TRAINING, seed, step])
    which = torch.from_numpy(chance.choice(len(images.targets), rows, replace=False))
    return Batch(images.tokens[which], images.targets[which])


def enlarged(images: Batch, times: int) -> Batch:
    """The same images with `times` as many pixels on each side, bilinear between pixel centres.

    >>> enlarged(Batch(torch.ones(1, 64), torch.zeros(1, 1)), 2).tokens.shape
    torch.Size([1, 256])
    """
    square = images.tokens.unflatten(1, (1, SIDE, SIDE))
    larger = functional.interpolate(square, scale_factor=times, mode="bilinear")
    return Batch(larger.flatten(1), images.targets)
