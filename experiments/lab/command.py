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
    threads: int
    out: Path
    dask: str | None


@contextlib.contextmanager
def options(
    doc: str | None,
    folder: Path,
    arguments: list[str] | None = None,
    *,
    fans_out: bool = False,
) -> Iterator[Options]:
    """The options of an experiment whose results belong in `folder`.

    fans_out  whether its runs can be those of the workers of a cluster, by --dask

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
    if fans_out:
        parser.add_argument("--dask", metavar="ADDRESS", help="have the workers of a cluster train")
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    text = given.text or ("python" if given.smoke else "kjv")
    with contextlib.ExitStack() as stack:
        out = given.out
        if out is None:
            out = (
                Path(stack.enter_context(tempfile.TemporaryDirectory())) if given.smoke else folder
            )
        dask = given.dask if fans_out else None
        yield Options(given.smoke, text, given.device, given.threads, out, dask)
