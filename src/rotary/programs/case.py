"""The question to a program and its answer, as plain data that all files here use."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..configs import Config
from ..strict_json import JSON

Array = npt.NDArray[np.floating]


class RefusedError(Exception):
    """What the program raises in place of a rotation."""


class NotComparedError(Exception):
    """Why nothing is known of the program for this config: it has no file for the model."""


class Case(NamedTuple):
    """A config as one program opens it, and the sequence it is asked for.

    config     the config as it was read, once, for all programs
    rope       the rope parameters that the program sees;  rope_type, base  what it takes from them
    dim        channels that it rotates
    trained    original_max_position_embeddings
    seq_len    tokens of the sequence that is computed
    advice     what to change in the file, known before any rule
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
        """The longest sequence that a program is started for."""
        return max(self.config.context or 0, self.seq_len)


class Result(NamedTuple):
    """What a rule gives; `advice` is said where it differs from the reference.

    inv_freq  (dim / 2,) float64, rad per token
    """

    schedule: str
    inv_freq: Array
    attention_factor: float = 1.0
    switch: str = "never"
    notes: tuple[str, ...] = ()
    advice: str = ""


Rule = Callable[[Case], Result]


class Program(NamedTuple):
    """A program: which rule it has for each rope type, and the file and function that rule is in.

    unknown   its rule for every other type
    opens     what it makes of the config before any rule
    """

    name: str
    version: str
    rules: Mapping[str, tuple[Rule, str]]
    unknown: tuple[Rule, str]
    opens: Callable[[Case], Case]
    notes: tuple[str, ...] = ()
