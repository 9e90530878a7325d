"""The command on weights: a checkpoint in the other pair layout."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from .app import Json, app
from .cluster import Dask, cluster
from .terminal import bar, print_json, print_table, printable

if TYPE_CHECKING:
    from ..checkpoint.plan import Move, Plan

Layout = Literal["half", "interleaved"]


@app.command()
def convert(
    source: Annotated[
        Path, typer.Argument(help="A folder of safetensors, or one file.", show_default=False)
    ],
    target: Annotated[
        Path | None, typer.Argument(help="A new folder; not needed with --dry-run.")
    ] = None,
    from_layout: Annotated[
        Layout, typer.Option("--from", help="Layout that the weights have.", show_default=False)
    ] = ...,  # type: ignore[assignment]  # typer's way to ask for an option
    to_layout: Annotated[
        Layout, typer.Option("--to", help="Layout that they get.", show_default=False)
    ] = ...,  # type: ignore[assignment]
    config: Annotated[
        Path | None, typer.Option(help="The model's config.json, where the source has none.")
    ] = None,
    trust_source: Annotated[
        bool, typer.Option("--trust-source", help="The weights were moved before: believe --from.")
    ] = False,
    leave: Annotated[
        list[str] | None,
        typer.Option(
            "--leave",
            help="A tensor to leave as it is, * for any text; for what is no query and no key.",
            metavar="NAME",
        ),
    ] = None,
    verify: Annotated[
        Literal["sample", "full"],
        typer.Option(help="Layers whose scores are compared; full reads every byte again."),
    ] = "sample",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the plan, write nothing.")
    ] = False,
    dask: Dask = None,
    as_json: Json = False,
) -> None:
    """Move the weights of a checkpoint to the other pair layout, and prove it."""
    from ..checkpoint.convert import carry_out, prepare

    config_path = None if config is None else str(config)
    work = prepare(
        source, target, from_layout, to_layout, config_path, trust_source, leave or (), verify
    )
    todo = work.plan
    not_copied = [str(path) for path in work.checkpoint.left]
    if dry_run:
        if as_json:
            print_json({**todo.to_dict(), "not_copied": not_copied, "warning": work.warning})
        else:
            _print_plan(str(source), todo)
            _print_not_copied(not_copied)
            _print_warning(work.warning)
        return
    if target is None:
        raise typer.BadParameter("TARGET is needed, a new folder; or ask with --dry-run")
    files = {shard.path: shard.state for shard in work.checkpoint.shards}
    with (
        _ended_by_signals(),
        cluster(dask, files=files, folder=target) as executor,
        bar("converting", work.size) as advance,
    ):
        done = carry_out(work, executor, advance)
    proof = done.proof
    if as_json:
        document = {"written": done.written, "not_copied": not_copied, "proof": proof._asdict()}
        print_json({**todo.to_dict(), **document, "warning": done.warning})
        return
    rows = [
        ("tensors moved", str(len(todo.moves))),
        ("left as they are", str(len(todo.left))),
        ("shards written", f"{len(done.written)} of {len(work.checkpoint.shards)}"),
        ("read again", f"{proof.tensors} tensors; undoing the move gives the bytes of the source"),
        ("scores compared", f"layers {', '.join(map(str, proof.layers)) or 'none'}"),
        ("largest difference", f"{proof.error:.1e} of the largest score"),
    ]
    print_table(f"{target}: {to_layout}", rows)
    _print_not_copied(not_copied)
    _print_warning(done.warning)


def _print_plan(title: str, todo: "Plan") -> None:
    rows = [
        (move.tensor, move.kind, str(move.heads), _slices(move), _rows(move))
        for move in todo.moves.values()
    ]
    head = ("tensor", "kind", "heads", "slices", "rows")
    print_table(f"{title}: {todo.source} to {todo.target}, {len(rows)} tensors move", rows, head)
    if todo.left:
        left = [(left.tensor, left.reason) for left in todo.left]
        print_table("stay as they are", left, ("tensor", "why"))


def _slices(move: "Move") -> str:
    """Where the rotated slices are: the first of each run, and the distance to the next."""
    return ", ".join(
        f"{run.begin}:{run.begin + move.rotary_dim}"
        + (f" every {run.stride}" if run.heads > 1 else "")
        for run in move.runs
    )


def _rows(move: "Move") -> str:
    return f"{move.heads * move.rotary_dim:,} of {move.size:,}"


def _print_not_copied(names: list[str]) -> None:
    if names:
        print_table("not converted and not copied", [(name,) for name in names], ("",))


def _print_warning(text: str) -> None:
    if text:
        typer.echo(f"warning: {printable(text)}", err=True)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end the command as an error does, so that no file is left half written."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
