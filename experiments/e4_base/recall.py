"""Text with marks strewn in, each a key and its value in one token; a query asks for a value.

A mark holds both, so one attention by similar key finds the value: nothing needs to be carried from
one token to the next.
"""

from typing import NamedTuple

import numpy as np
import torch

from ..lab.data import IGNORED, LOOKING, TRAINING, Batch, Text

KEYS, VALUES = 32, 8
FIRST_MARK = 256  # behind the bytes; the mark of key k and value v is FIRST_MARK + VALUES k + v
FIRST_QUERY = FIRST_MARK + KEYS * VALUES
FIRST_VALUE = FIRST_QUERY + KEYS
VOCABULARY = FIRST_VALUE + VALUES


def make_similar(tokens: torch.Tensor) -> None:
    """Set the embedding of every mark to (its key + its value) / sqrt(2), in place.

    tokens is (VOCABULARY, width); a key is embedded as its query is. So a mark starts as a key like
    the query, at an angle of 45 degrees, and as a key like no other.
    """
    keys, values = tokens[FIRST_QUERY:FIRST_VALUE], tokens[FIRST_VALUE:]
    tokens[FIRST_MARK:FIRST_QUERY] = ((keys[:, None] + values) / 2**0.5).flatten(0, 1)


class Recall(NamedTuple):
    """A batch; at each query how many tokens ago its mark stood, and how many marks have come.

    Both are 0 everywhere else, (rows, length) int64.
    """

    batch: Batch
    distances: torch.Tensor
    marks_before: torch.Tensor


def recall(
    content: torch.Tensor,
    length: int,
    marks: int,
    queries: int,
    rows: int,
    chance: np.random.Generator,
) -> Recall:
    """Rows of `length` tokens: text, `marks` marks of different keys and values, and queries.

    Each query asks for one of the marks before it, all equally likely. At a byte the next byte of
    the text is asked for, wherever it stands; at a query the value; at a mark nothing. Who does not
    see the key is right one time in as many as there were marks, whatever the distance.
    Raises ValueError for more marks than values, and where marks and queries leave no text.
    """
    if not 0 < marks <= VALUES:
        raise ValueError(f"marks must be in 1 .. {VALUES}, one for each value at most; got {marks}")
    if marks + queries >= length:
        raise ValueError(f"{marks} marks and {queries} queries leave no text in {length} tokens")
    made = [_row(content, length, marks, queries, chance) for _ in range(rows)]
    tokens, targets, *of_queries = (
        torch.from_numpy(np.stack(part)) for part in zip(*made, strict=True)
    )
    return Recall(Batch(tokens, targets), *of_queries)


def _row(
    content: torch.Tensor, length: int, marks: int, queries: int, chance: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, targets, distances and marks before of one row, all (length,) int64."""
    tokens, targets = np.empty(length, np.int64), np.full(length, IGNORED, np.int64)
    distances, marks_before = np.zeros((2, length), np.int64)
    places = np.sort(chance.choice(length, marks + queries, replace=False))
    is_mark = np.r_[True, chance.permutation(np.arange(marks + queries - 1) < marks - 1)]
    marked, asking = places[is_mark], places[~is_mark]
    keys = chance.permutation(KEYS)[:marks]
    values = chance.permutation(VALUES)[:marks]
    marks_before[asking] = np.searchsorted(marked, asking)
    which = chance.integers(0, marks_before[asking])
    tokens[marked] = FIRST_MARK + VALUES * keys + values
    tokens[asking] = FIRST_QUERY + keys[which]
    targets[asking] = FIRST_VALUE + values[which]
    distances[asking] = asking - marked[which]

    of_text = np.setdiff1d(np.arange(length), places)
    start = int(chance.integers(0, len(content) - len(of_text)))
    text = content[start : start + len(of_text) + 1].numpy()
    tokens[of_text], targets[of_text] = text[:-1], text[1:]
    return tokens, targets, distances, marks_before


def training(
    text: Text, length: int, marks: int, queries: int, rows: int, seed: int, step: int
) -> Recall:
    """The rows of a step, by (seed, step) alone."""
    chance = np.random.default_rng([2, TRAINING, seed, step])
    return recall(text.training, length, marks, queries, rows, chance)


def fixed(content: torch.Tensor, length: int, marks: int, queries: int, rows: int) -> Recall:
    """The same rows for every model and seed, from a part of a text that is not learned from."""
    chance = np.random.default_rng([2, LOOKING])
    return recall(content, length, marks, queries, rows, chance)
