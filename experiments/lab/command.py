"""The command line that every experiment has, and the check before it trains anything."""

import argparse
import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console

from . import gate
from .data import SOURCES

SEEDS, QUICK_SEEDS = 5, 1


class Options(NamedTuple):
    """What was asked for; a quick run is small, and leaves no files unless told where."""

    quick: bool
    text: str
    device: str
    threads: int
    seeds: tuple[int, ...]
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
    """The options of an experiment whose results belong in `folder`, once its gate has passed.

    fans_out  whether its runs can be those of the workers of a cluster, by --dask

    Within, torch computes with as many threads as were asked for. Exits with status 1 where the
    rotation that the models use is wrong.

    >>> with options(None, Path("experiments"), ["--quick"]) as found:
    ...     found.text, found.seeds, found.out == Path("experiments")
    gate passed: 4 results of rotate and its gradient against complex numbers in float64
    ('python', (0,), False)
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="tiny models and few steps: seconds, and no result"
    )
    parser.add_argument("--seeds", type=int, help=f"how many; default {SEEDS}, or 1 with --quick")
    parser.add_argument("--text", choices=list(SOURCES), help="default: kjv; python with --quick")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="of each process; bits depend on it")
    parser.add_argument("--out", type=Path, help="where results, checkpoints and figures go")
    if fans_out:
        parser.add_argument("--dask", metavar="ADDRESS", help="have the workers of a cluster train")
    given = parser.parse_args(arguments)
    text = given.text or ("python" if given.quick else "kjv")
    seeds = tuple(range(given.seeds or (QUICK_SEEDS if given.quick else SEEDS)))
    passed = gate.check()
    if os.environ.get("RANK", "0") == "0":
        Console().print(passed, soft_wrap=True)
    with contextlib.ExitStack() as stack:
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(given.threads)
        out = given.out
        if out is None:
            out = (
                Path(stack.enter_context(tempfile.TemporaryDirectory())) if given.quick else folder
            )
        dask = given.dask if fans_out else None
        yield Options(given.quick, text, given.device, given.threads, seeds, out, dask)
