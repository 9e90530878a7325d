"""The command line that every experiment has."""

import argparse
import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from .data import SOURCES


class Options(NamedTuple):
    """What was asked for; a smoke run is small, and leaves no files unless told where."""

    smoke: bool
    text: str
    device: str
    out: Path


@contextlib.contextmanager
def options(doc: str | None, folder: Path, arguments: list[str] | None = None) -> Iterator[Options]:
    """The options of an experiment whose results belong in `folder`.

    >>> with options(None, Path("experiments"), ["--smoke"]) as found:
    ...     found.text, found.device, found.out == Path("experiments")
    ('python', 'cpu', False)
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="a small run of under two minutes")
    parser.add_argument("--text", choices=list(SOURCES), help="default: kjv; python for --smoke")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="of each process; bits depend on it")
    parser.add_argument("--out", type=Path, help="where results, checkpoints and figures go")
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    text = given.text or ("python" if given.smoke else "kjv")
    with contextlib.ExitStack() as stack:
        out = given.out
        if out is None:
            out = (
                Path(stack.enter_context(tempfile.TemporaryDirectory())) if given.smoke else folder
            )
        yield Options(given.smoke, text, given.device, out)
