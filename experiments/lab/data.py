"""Real text without a network: bytes of the King James Bible, or of Python's own library.

A batch is a function of (seed, step) alone, so a run that was killed sees the same bytes again.
"""

import functools
import hashlib
import pydoc_data.topics
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

MASK = 256  # the token behind the 256 bytes
VOCABULARY = 257
IGNORED = -100  # a target that is not asked for
HELD_OUT = 0.05  # the share of a text that is held out, and of what is kept to choose settings by
SPLIT = "training 0.90, validation 0.05, held out 0.05"  # in this order
MASKED = 0.15  # the share of tokens that BERT hides (Devlin et al., arXiv 1810.04805, section 3.1)
TRAINING, LOOKING = 0, 1  # streams of random numbers that must not meet


class Text(NamedTuple):
    """Three contiguous parts of a text, as uint8 tensors.

    training    the first 90 %, to learn from
    validation  the next 5 %, to choose learning rates by
    held_out    the last 5 %, to report
    """

    name: str
    training: torch.Tensor
    validation: torch.Tensor
    held_out: torch.Tensor
    sha256: str


class Batch(NamedTuple):
    """Tokens and what is asked at each place, (rows, length) int64; IGNORED asks for nothing."""

    tokens: torch.Tensor
    targets: torch.Tensor


@functools.cache
def text(name: str) -> Text:
    """A text by its name: "kjv" (4.1 MB) or "python" (5 MB, which differ by Python version).

    "kjv" needs Debian's packages bible-kjv and bible-kjv-text. Raises ValueError where they are
    missing, and for another name.

    >>> [len(part) // 100_000 for part in text("python")[1:4]]  # doctest: +SKIP
    [45, 2, 2]
    >>> text("latin")
    Traceback (most recent call last):
    ValueError: text must be one of kjv, python; got 'latin'
    """
    if name not in SOURCES:
        raise ValueError(f"text must be one of {', '.join(SOURCES)}; got {name!r}")
    content = SOURCES[name]()
    whole = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    part = int(len(whole) * HELD_OUT)
    training, validation, held_out = whole.tensor_split((len(whole) - 2 * part, len(whole) - part))
    return Text(name, training, validation, held_out, hashlib.sha256(content).hexdigest())


def _kjv() -> bytes:
    program = shutil.which("bible")
    if program is None:
        raise ValueError(
            "text 'kjv' needs Debian's bible: apt-get install bible-kjv bible-kjv-text; "
            "or take text 'python'"
        )
    command = [program, "-f", "Gen1:1-Rev22:21"]
    printed = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=True)
    verses = [line.partition(b" ")[2] for line in printed.stdout.splitlines()]
    return b"\n".join(verses) + b"\n"


def _python() -> bytes:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    topics = pydoc_data.topics.topics
    return b"".join(
        [path.read_bytes() for path in files] + [topics[name].encode() for name in sorted(topics)]
    )


SOURCES = {"kjv": _kjv, "python": _python}


def seed_of(*numbers: int) -> int:
    """One seed of 32 bits from several numbers: torch on a CPU looks at no more bits.

    >>> seed_of(0, 1) != seed_of(1, 0)
    True
    """
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


def windows(content: torch.Tensor, length: int, rows: int, seed: int, step: int) -> torch.Tensor:
    """Pieces of a text from random places, (rows, length) int64, by (seed, step) alone.

    >>> windows(torch.arange(100), 3, 1, seed=0, step=5).diff()
    tensor([[1, 1]])
    """
    if len(content) < length:
        raise ValueError(f"a piece of {length} bytes does not fit in a text of {len(content)}")
    chance = np.random.default_rng([TRAINING, seed, step])
    return _pieces(content, chance.integers(0, len(content) - length + 1, rows), length)


def spread_windows(content: torch.Tensor, length: int, rows: int) -> torch.Tensor:
    """Pieces from places spread evenly over a text, (rows, length) int64: always the same.

    >>> spread_windows(torch.arange(10), 2, 3)
    tensor([[0, 1],
            [4, 5],
            [8, 9]])
    """
    if len(content) < length:
        raise ValueError(f"a piece of {length} bytes does not fit in a text of {len(content)}")
    return _pieces(content, np.linspace(0, len(content) - length, rows).astype(np.int64), length)


def _pieces(content: torch.Tensor, starts: np.ndarray, length: int) -> torch.Tensor:
    return content[torch.from_numpy(starts)[:, None] + torch.arange(length)].long()


def causal(pieces: torch.Tensor) -> Batch:
    """The next byte is asked for at every place but the last.

    >>> causal(torch.tensor([[1, 2, 3]]))
    Batch(tokens=tensor([[1, 2]]), targets=tensor([[2, 3]]))
    """
    return Batch(pieces[:, :-1], pieces[:, 1:])


def masked(pieces: torch.Tensor, stream: int, seed: int, step: int) -> Batch:
    """15 % of the bytes hidden, every one by MASK, and asked for.

    Unlike BERT no hidden byte is left or replaced by another. The choice is a function of
    (stream, seed, step): TRAINING or LOOKING.

    >>> batch = masked(torch.full((1, 1000), 7), TRAINING, seed=0, step=0)
    >>> bool(((batch.tokens == MASK) == (batch.targets == 7)).all())
    True
    """
    chance = np.random.default_rng([1, stream, seed, step])
    hidden = torch.from_numpy(chance.random(tuple(pieces.shape)) < MASKED)
    return Batch(torch.where(hidden, MASK, pieces), torch.where(hidden, pieces, IGNORED))


def training_batch(text: Text, task: str, length: int, rows: int, seed: int, step: int) -> Batch:
    """The batch of a step for "causal" or "masked": (rows, length) tokens.

    >>> training_batch(text("python"), "causal", 8, 2, seed=0, step=0).targets.shape
    torch.Size([2, 8])
    """
    if task == "causal":
        return causal(windows(text.training, length + 1, rows, seed, step))
    return masked(windows(text.training, length, rows, seed, step), TRAINING, seed, step)


def fixed_batch(content: torch.Tensor, task: str, length: int, rows: int) -> Batch:
    """The same batch for every model and seed, from places spread over a part of a text.

    >>> fixed_batch(text("python").held_out, "masked", 8, 2).tokens.shape
    torch.Size([2, 8])
    """
    if task == "causal":
        return causal(spread_windows(content, length + 1, rows))
    return masked(spread_windows(content, length, rows), LOOKING, 0, 0)
