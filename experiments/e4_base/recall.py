"""Text with pairs of a key and a value in it; a key that comes again asks for its value."""

from typing import NamedTuple

import numpy as np
import torch

from ..lab.data import IGNORED, LOOKING, TRAINING, Batch, Text

KEYS = VALUES = 64
FIRST_KEY = 256  # behind the bytes
FIRST_VALUE = FIRST_KEY + KEYS
VOCABULARY = FIRST_VALUE + VALUES


class Recall(NamedTuple):
    """A batch, and at each place how many tokens ago the value asked for stood; 0 for text."""

    batch: Batch
    distances: torch.Tensor


def recall(
    content: torch.Tensor, length: int, pairs: int, rows: int, chance: np.random.Generator
) -> Recall:
    """Rows of `length` places: text, `pairs` keys with their values, and every pair once more.

    The next byte is asked for where it is text, and the value where its key comes again. Keys, and
    values seen for the first time, cannot be known and are not asked for.
    """
    made = [_row(content, length + 1, pairs, chance) for _ in range(rows)]
    parts = zip(*made, strict=True)
    tokens, asked, distances = (torch.from_numpy(np.stack(part)) for part in parts)
    targets = torch.where(asked[:, 1:], tokens[:, 1:], IGNORED)
    return Recall(Batch(tokens[:, :-1], targets), distances[:, 1:])


def _row(
    content: torch.Tensor, length: int, pairs: int, chance: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, whether each is asked for, and the distance to the first of a value."""
    filler = length - 4 * pairs
    slots = np.sort(chance.choice(filler + 2 * pairs, 2 * pairs, replace=False))
    starts = slots + np.arange(2 * pairs)  # every pair before it took one place more than its slot
    which = _twice(pairs, chance)
    keys = FIRST_KEY + chance.permutation(KEYS)[:pairs]
    values = FIRST_VALUE + chance.integers(0, VALUES, pairs)
    tokens, asked = np.zeros(length, np.int64), np.ones(length, bool)
    tokens[starts], tokens[starts + 1] = keys[which], values[which]
    is_text = np.ones(length, bool)
    is_text[starts] = is_text[starts + 1] = False
    at = int(chance.integers(0, len(content) - filler + 1))
    tokens[is_text] = content[at : at + filler].numpy()
    asked[starts] = asked[starts + 1] = False
    distances = np.zeros(length, np.int64)
    first: dict[int, int] = {}
    for pair, start in zip(which.tolist(), starts.tolist(), strict=True):
        if pair in first:
            asked[start + 1], distances[start + 1] = True, start - first[pair]
        first.setdefault(pair, start)
    return tokens, asked, distances


def _twice(pairs: int, chance: np.random.Generator) -> np.ndarray:
    return chance.permutation(np.repeat(np.arange(pairs), 2))


def training(text: Text, length: int, pairs: int, rows: int, seed: int, step: int) -> Recall:
    """The rows of a step, by (seed, step) alone."""
    chance = np.random.default_rng([2, TRAINING, seed, step])
    return recall(text.training, length, pairs, rows, chance)


def held_out(text: Text, length: int, pairs: int, rows: int) -> Recall:
    """The same rows for every model and seed."""
    return recall(text.held_out, length, pairs, rows, np.random.default_rng([2, LOOKING]))
