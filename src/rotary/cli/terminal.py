"""The output of all commands: tables, one JSON document, a file, a spinner, a progress bar."""

import contextlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TextIO

import typer

from ..whole_files import replacing


def print_json(document: object) -> None:
    typer.echo(json.dumps(_finite(document), indent=2, allow_nan=False))


def _finite(document: object) -> object:
    """Return the document with None in place of NaN and infinities, which JSON does not have."""
    if isinstance(document, dict):
        return {name: _finite(value) for name, value in document.items()}
    if isinstance(document, list | tuple):
        return [_finite(value) for value in document]
    return None if isinstance(document, float) and not math.isfinite(document) else document


def printable(text: str) -> str:
    """Return text with control characters and undecodable bytes as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def print_table(
    title: str, rows: Sequence[tuple[str, ...]], header: tuple[str, ...] = ("", "")
) -> None:
    """Print a table, or each row as a list if the terminal is too narrow for its longest words."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    # the title of a Table is cut to the width of the table
    console.print(Text(printable(title), style="italic"))
    lines = [tuple(map(printable, row)) for row in rows]
    widths = _widths([header, *lines], console.width)
    if widths is None:
        for first, *others in lines:
            console.print(Text(f"{header[0]} {first}".strip(), style="bold"), overflow="fold")
            for name, cell in zip(header[1:], others, strict=True):
                if cell:
                    console.print(Text(f"{name}: {cell}" if name else f"  {cell}"), overflow="fold")
        return
    table = Table(show_header=any(header), box=None)
    for index, (name, width) in enumerate(zip(header, widths, strict=True)):
        # Rich left alone makes a column narrower than its longest word
        table.add_column(name, width=width, overflow="fold", style="" if index else "bold")
    for line in lines:
        table.add_row(*map(Text, line))
    console.print(table)


def _widths(rows: Sequence[tuple[str, ...]], room: int) -> list[int] | None:
    """Return the width of each column in a table of `room`; None if their words do not fit.

    Beside each column is a space on both sides. What the longest words leave is shared out, so
    that the columns that need least of it are not wrapped.
    """
    from rich.cells import cell_len

    columns = list(zip(*rows, strict=True))
    widths = [max((cell_len(word) for cell in column for word in cell.split()), default=0)
              for column in columns]  # fmt: skip
    left = room - sum(widths) - 2 * len(widths)
    if left < 0:
        return None
    wanted = [max(map(cell_len, column)) - width
              for column, width in zip(columns, widths, strict=True)]  # fmt: skip
    by_need = sorted(range(len(wanted)), key=wanted.__getitem__)
    for done, index in enumerate(by_need):
        more = min(wanted[index], left // (len(by_need) - done))
        widths[index] += more
        left -= more
    return widths


def print_text(text: str) -> None:
    """Print a paragraph, wrapped at the width of the terminal."""
    from rich.console import Console
    from rich.text import Text

    Console(highlight=False).print(Text(printable(text)), overflow="fold")


def print_times(title: str, times: dict[str, dict[str, float]]) -> None:
    rows = [
        (library, case, f"{spent:.2f}", f"{spent / cases['copy']:.2f}")
        for library, cases in times.items()
        for case, spent in cases.items()
    ]
    print_table(title, rows, ("", "", "ms", "x copy"))


def short(value: object) -> str:
    if isinstance(value, tuple | list) and len(value) > 6:
        return f"{', '.join(f'{item:g}' for item in value[:6])}, ... ({len(value)} values)"
    return str(value)


def overwrite(path: Path, text: str) -> None:
    """Write a text into a file; an old file stays until the new one is complete."""
    if path.exists() and not path.is_file():  # such as /dev/stdout or a pipe
        path.write_text(text, encoding="utf-8")
        return
    try:
        with replacing(Path(os.path.realpath(path))) as file:  # a link is followed, not replaced
            file.write(text.encode())
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def of_user() -> contextlib.redirect_stdout[TextIO]:
    """Send what a user's module prints to stderr: stdout has the result alone."""
    return contextlib.redirect_stdout(sys.stderr)


@contextlib.contextmanager
def status() -> Iterator[Callable[[str], None]]:
    """Show a spinner on stderr, if that is a terminal; yield a function that changes its text."""
    from rich.console import Console

    with Console(stderr=True).status("starting") as spinner:
        yield spinner.update


@contextlib.contextmanager
def bar(text: str, size: int | None = None) -> Iterator[Callable[[float], None]]:
    """Show a progress bar on stderr, if that is a terminal; yield a function that advances it.

    Without `size` it takes the share that is done, 0 .. 1; with `size`, the number of bytes done
    since its last call.
    """
    from rich import progress as rich
    from rich.console import Console

    of_bytes = (rich.BarColumn(), rich.DownloadColumn(), rich.TransferSpeedColumn(),
                rich.TimeRemainingColumn())  # fmt: skip
    console = Console(stderr=True)
    with rich.Progress(
        *(of_bytes if size else ()),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task(text, total=size or 1.0)
        if size:
            yield lambda count: progress.advance(task, count)
        else:
            yield lambda share: progress.update(task, completed=share)
