"""The command that converts a checkpoint to the other layout."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ..layouts import Layout
from .app import Json, app
from .cluster import Dask, cluster
from .terminal import bar, print_json, print_table, printable

if TYPE_CHECKING:
    from ..checkpoint.plan import Move


@app.command()
def convert(
    source: Annotated[
        Path, typer.Argument(help="A folder of safetensors, or one file.", show_default=False)
    ],
    from_layout: Annotated[
        Layout, typer.Option("--from", help="The layout of the weights.", show_default=False)
    ],
    to_layout: Annotated[
        Layout, typer.Option("--to", help="The layout to convert to.", show_default=False)
    ],
    target: Annotated[
        Path | None, typer.Argument(help="A new folder; not needed with --dry-run.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="The model's config.json, in place of that of the source.")
    ] = None,
    trust_source: Annotated[
        bool,
        typer.Option(
            "--trust-source",
            help="Trust --from even against the config: for weights converted elsewhere.",
        ),
    ] = False,
    leave: Annotated[
        list[str] | None,
        typer.Option(
            "--leave",
            help="A tensor that is neither query nor key: copy it unchanged. * matches any text.",
            metavar="NAME",
        ),
    ] = None,
    verify: Annotated[
        Literal["sample", "full"],
        typer.Option(
            help="sample: compare the scores of 3 layers. full: of all layers, and every byte "
            "of the files."
        ),
    ] = "sample",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the plan, write nothing.")
    ] = False,
    dask: Dask = None,
    as_json: Json = False,
) -> None:
    """Convert a checkpoint to the other layout.

    Reorders the rows of the q and k projections, copies every other tensor, and verifies the
    files that it wrote.
    """
    from ..checkpoint.convert import carry_out, check_ready, prepare

    if target is None and not dry_run:
        raise typer.BadParameter("TARGET is needed, a new folder, unless --dry-run is given")
    work = prepare(
        source, target or source, from_layout, to_layout, config, trust_source, leave or (), verify
    )
    todo, shards = work.plan, work.checkpoint.shards
    not_copied = [str(path) for path in work.checkpoint.left]
    header: tuple[str, ...] = ("", "")
    document = {**todo.to_dict(), "not_copied": not_copied, "warning": work.warning}
    warnings = () if as_json else work.warnings
    if dry_run:
        _warn(warnings)
        title = f"{source}: {todo.source} to {todo.target}, {len(todo.moves)} tensors move"
        header = ("tensor", "kind", "heads", "rows", "in all")
        rows = [_row(move) for move in todo.moves.values()]
    else:
        files = {shard.path: shard.state for shard in shards}
        check_ready(work)
        with _ended_by_signals(), cluster(dask, files=files, folder=target) as executor:
            _warn(warnings)  # before the work, which may take hours
            with bar("converting", sum(state.size for state in files.values())) as advance:
                done = carry_out(work, executor, advance)
        proof = done.proof
        document |= {"written": done.written, "proof": proof._asdict()}
        title = f"{target}: {to_layout}"
        moved_back = f"{proof.tensors} tensors; moved back, they have the bytes of the source"
        rows = [
            ("tensors moved", str(len(todo.moves))),
            ("like q or k, left as they are", str(len(todo.left))),
            ("shards written", f"{len(done.written)} of {len(shards)}"),
            ("read again", moved_back),
            ("scores compared", f"layers {', '.join(map(str, proof.layers)) or 'none'}"),
            ("largest difference", f"{proof.error:.1e} of the largest score"),
        ]
    if as_json:
        print_json(document)
        return
    print_table(title, rows, header)
    if dry_run and todo.left:
        print_table("tensors like q or k, left as they are", todo.left, ("tensor", "why"))
    if not_copied:
        print_table("not converted and not copied", [(name,) for name in not_copied], ("",))


def _warn(warnings: tuple[str, ...]) -> None:
    for warning in warnings:
        typer.echo(f"warning: {printable(warning)}", err=True)


def _row(move: "Move") -> tuple[str, ...]:
    """Return a row of the plan: which rows move, of a run of heads those of the first."""
    rows = ", ".join(
        f"{run.begin} to {run.begin + move.rotary_dim - 1}"
        + f" and again every {run.stride}" * (run.heads > 1)
        for run in move.runs
    )
    in_all = f"{move.heads * move.rotary_dim:,} of {move.size:,}"
    return move.tensor, move.kind, str(move.heads), rows, in_all


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the command like an error, so that no file is half written."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
