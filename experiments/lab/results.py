"""Results: one line of JSON for each finished run, and tables made of them."""

import hashlib
import importlib.metadata
import io
import json
import os
import platform
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from PIL import Image, PngImagePlugin
from rich.console import Console

from rotary import plots

Row = dict[str, Any]


def append(path: Path, row: Row) -> None:
    """Add one run to a file, with the versions it ran under; a line is whole or not there.

    A line that a kill cut short before is dropped.
    """
    line = json.dumps({**row, "versions": versions()}, sort_keys=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+b") as file:
        file.seek(0)
        whole = file.read().rpartition(b"\n")
        file.truncate(len(whole[0]) + len(whole[1]))
        file.write(line.encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def rows(path: Path) -> list[Row]:
    """All finished runs of a file, the oldest first; none if there is no file.

    >>> rows(Path("no such file"))
    []
    """
    if not path.exists():
        return []
    lines = path.read_text().rpartition("\n")[0].splitlines()
    return [json.loads(line) for line in lines]


def is_done(found: Iterable[Row], run: Row) -> bool:
    """Whether a run with these very settings is among the rows.

    >>> is_done([{"run": {"seed": 0}, "loss": 2.0}], {"seed": 0})
    True
    """
    wanted = json.loads(json.dumps(run))
    return any(row["run"] == wanted for row in found)


def versions() -> dict[str, str]:
    """What the numbers depend on: Python, the packages, the processor."""
    packages = {name: importlib.metadata.version(name) for name in ("rotary", "torch", "numpy")}
    return {"python": platform.python_version(), **packages, "machine": platform.machine()}


def mean_spread(values: Sequence[float], form: str = ".3f") -> str:
    """Mean and standard deviation of a few runs, as they are written in a table.

    >>> mean_spread([1.0, 2.0, 3.0], ".1f"), mean_spread([1.0], ".1f")
    ('2.0 ± 1.0', '1.0')
    """
    mean = f"{float(np.mean(values)):{form}}"
    if len(values) == 1:
        return mean
    return f"{mean} ± {float(np.std(values, ddof=1)):{form.lstrip('+')}}"


def table(heads: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    """A Markdown table.

    >>> print(table(["a"], [[1]]))
    | a |
    |---|
    | 1 |
    """
    shown = [f"| {' | '.join(str(cell) for cell in line)} |" for line in lines]
    return "\n".join([f"| {' | '.join(heads)} |", "|" + "---|" * len(heads), *shown])


BEGIN, END = "<!-- result -->", "<!-- end of result -->"


def put(readme: Path, text: str) -> None:
    """Write a result between the two marks of a README. Raises ValueError without them."""
    before, begin, rest = readme.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{readme.name} needs the marks {BEGIN} and {END}")
    readme.write_text(f"{before}{begin}\n{text}\n{end}{after}")


def tell(out: Path, text: str) -> None:
    """Print a result, and put it into the README of its folder if there is one."""
    Console().print(text, soft_wrap=True, markup=False)
    if (out / "README.md").exists():
        put(out / "README.md", text)


def report(
    out: Path,
    table: Callable[[Sequence[Row]], str],
    figure: Callable[[Sequence[Row]], Figure],
    picture: str,
) -> None:
    """The table on the screen and in the README of a folder, and the figure beside it, twice.

    NAME-dark.png is for dark pages.
    """
    path = out / "results.jsonl"
    found = rows(path)
    draw(figure(found), out / picture, digest(path))
    tell(out, table(found))


def digest(path: Path) -> str:
    """What tells one file of results from another: the SHA-256 of its bytes."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def draw(figure: Figure, path: Path, of: str) -> None:
    """Write a figure for light pages, and beside it one for dark pages.

    The text `Rows` of both is the digest `of` the results that they are drawn from.
    """
    info = PngImagePlugin.PngInfo()
    info.add_text("Rows", of)
    light = plots.rendered(figure, ".png")  # first, for `dark` changes the figure itself
    dark = plots.rendered(plots.dark(figure), ".png")
    for target, content in ((path, light), (path.with_stem(f"{path.stem}-dark"), dark)):
        Image.open(io.BytesIO(content)).save(target, pnginfo=info, optimize=True)


def shown(readme: Path) -> str:
    """What stands between the marks of a README."""
    return readme.read_text().partition(BEGIN)[2].partition(END)[0].strip("\n")
