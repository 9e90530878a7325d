"""What the command prints: tables, one JSON document, a spinner; shared by all commands."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer


def print_json(document: Any) -> None:
    typer.echo(json.dumps(_finite(document), indent=2, allow_nan=False))


def _finite(document: Any) -> Any:
    """The document with null for what JSON has no number for."""
    if isinstance(document, dict):
        return {name: _finite(value) for name, value in document.items()}
    if isinstance(document, list | tuple):
        return [_finite(value) for value in document]
    return None if isinstance(document, float) and not math.isfinite(document) else document


def printable(text: str) -> str:
    """Text with control characters and undecodable bytes shown as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def print_table(title: str, header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=any(header), box=None)
    for index, name in enumerate(header):
        table.add_column(name, overflow="fold", style="bold" if index == 0 else "")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    console = Console()
    console.print(
        Text(printable(title), style="italic")
    )  # a title of the table is cut to its width
    console.print(table)


def print_times(title: str, times: dict[str, dict[str, float]]) -> None:
    rows = [
        (library, case, f"{spent:.2f}", f"{spent / found['copy']:.2f}")
        for library, found in times.items()
        for case, spent in found.items()
    ]
    print_table(title, ("", "", "ms", "x copy"), rows)


def short(value: Any) -> str:
    if isinstance(value, tuple | list) and len(value) > 6:
        return f"{', '.join(f'{item:g}' for item in value[:6])}, ... ({len(value)} values)"
    return str(value)


@contextmanager
def status() -> Iterator[Any]:
    """A spinner on stderr, silent where that is no terminal; yields a way to change its text."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: None
        return
    with console.status("starting") as status:
        yield status.update


@contextmanager
def bar(text: str) -> Iterator[Callable[[float], None] | None]:
    """A progress bar on stderr, for a share of 0 .. 1; None where that is no terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task(text, total=1.0)
        yield lambda share: progress.update(task, completed=share)
