"""The records that all files here use: a config as a program opens it, and what it computes."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..configs import Config
from ..strict_json import JSON

Array = npt.NDArray[np.floating]


class RefusedError(Exception):
    """The error that the program raises for this config."""


class NotComparedError(Exception):
    """The reason why it is not known what the program computes from this config."""


class Case(NamedTuple):
    """A config as one program opens it, and the length of the sequence to compute.

    config     the config as it was read, once, for all programs
    rope       the rope parameters that the program sees
    rope_type, base  the type and the base that it takes from them
    dim        number of rotated channels
    trained    original_max_position_embeddings
    seq_len    tokens of the sequence that is computed
    advice     what to change in the file, found when it was opened
    """

    config: Config
    rope: Mapping[str, JSON]
    rope_type: str
    base: float
    dim: int
    trained: int | None
    seq_len: int
    advice: str = ""

    @property
    def limit(self) -> int:
        """Return the longest sequence that a program is started for."""
        return max(self.config.context or 0, self.seq_len)


class Result(NamedTuple):
    """The result of a rule.

    schedule  what was computed, in words
    inv_freq  (dim / 2,) float64, rad per token
    switch    when the frequencies change with length, in words
    advice    what to change in the config if the result differs from the reference
    """

    schedule: str
    inv_freq: Array
    attention_factor: float = 1.0
    switch: str = "never"
    notes: tuple[str, ...] = ()
    advice: str = ""


Rule = Callable[[Case], Result]


class Program(NamedTuple):
    """A program.

    rules     rope type -> its rule, and the file and function of the program with that rule
    unknown   the same for every other rope type
    opens     returns the case as the program opens the config, before any rule
    """

    name: str
    version: str
    rules: Mapping[str, tuple[Rule, str]]
    unknown: tuple[Rule, str]
    opens: Callable[[Case], Case]
    notes: tuple[str, ...] = ()
