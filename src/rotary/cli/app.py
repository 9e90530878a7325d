"""The command itself: its options that many commands share, and how errors are told."""

import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from .terminal import printable

if TYPE_CHECKING:
    from ..spec import Rotary

app = typer.Typer(
    help="Rotary Position Embedding: what a model's RoPE is, and what it costs.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Config = Annotated[
    str, typer.Argument(metavar="CONFIG", help="A config.json, or the folder that holds it.")
]
ConfigOrGguf = Annotated[
    str,
    typer.Argument(metavar="CONFIG", help="A config.json, the folder that holds it, or a .gguf."),
]
LayerType = Annotated[
    str | None, typer.Option(help="Which entry of rope_parameters nested by layer type.")
]
Part = Annotated[str | None, typer.Option(help="Which part of a model of several, by its key.")]


def main() -> None:
    """Run the command; an error is one line on stderr and exit status 1."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        app()
    except BrokenPipeError:  # `rotary freqs ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except (ValueError, OSError, MemoryError, ImportError) as error:
        typer.echo(f"error: {printable(str(error))}", err=True)
        sys.exit(1)


@app.callback(invoke_without_command=True)
def start(context: typer.Context) -> None:
    """Without a command: the help."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def is_gguf(config: str) -> bool:
    return config.endswith(".gguf")


def refuse_part(config: str, part: str | None) -> None:
    """A GGUF file holds one model."""
    if part is not None:
        raise ValueError(f"{config}: --part {part}: a .gguf has no parts; leave it out")


def read_spec(config: str, layer_type: str | None, part: str | None = None) -> "Rotary":
    from ..configs import from_gguf, from_hf_config

    if is_gguf(config):
        refuse_part(config, part)
        return from_gguf(config, layer_type)
    spec = from_hf_config(config, layer_type, part=part)
    if spec is None:
        raise ValueError(f"{config}: layer type {layer_type!r} has no rotation")
    return spec
