"""The command `rotary`: the options that many commands share, and how errors are printed."""

import os
import re
import sys
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from .terminal import printable

if TYPE_CHECKING:
    from ..configs.record import Config as ModelConfig
    from ..spec import Rotary

app = typer.Typer(
    help="Rotary Position Embedding (RoPE): inspect, test, plan and convert the RoPE of a model.",
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
    str | None,
    typer.Option(help="The layer type, if layers have different RoPEs, e.g. full_attention."),
]
Part = Annotated[
    str | None,
    typer.Option(help="The part of the model, e.g. vision_config, if it has several."),
]
# what errors of the library say of their arguments -> the same of options
_OPTIONS = {
    r"\bform='(\w+)'": r"--form \1",
    r"(?<!-)\blayer_type\b": "--layer-type",
    r"^at_least\b": "--at-least",
    r"^at_most\b": "--at-most",
    r"^longest_wavelength\b": "--longest-wavelength",
    r"^(context|form|length|port|power|scale|seed|starts|until) must": r"--\1 must",
    r"\bpass part,": "pass --part,",
    r"\bgive the length,": "give --length,",
    r"^both layouts are": "--from and --to are both",
    r"read it with rotary\.configs\.from_gguf": "give the config.json of the model",
}
# UsageError of Click, or of Typer's copy of it
_WRONG_USAGE: type[typer.BadParameter] = typer.BadParameter.__base__  # type: ignore[assignment]


def main() -> None:
    """Run the command; an error is one line on stderr, a warning one line.

    The exit status is 1 after an error, 2 after wrong usage.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        with warnings.catch_warnings():  # which restores `showwarning` as well
            shown, told = warnings.showwarning, set[str]()

            def show(message: Warning | str, category: type[Warning], *where: object) -> None:
                if issubclass(category, UserWarning):  # of a config: no line of ours explains it
                    if (text := printable(str(message))) not in told:
                        typer.echo(f"warning: {text}", err=True)
                    told.add(text)
                else:
                    shown(message, category, *where)  # type: ignore[arg-type]

            warnings.showwarning = show  # type: ignore[assignment]  # of any other arguments
            sys.exit(app(standalone_mode=False) or 0)  # True prints wrong usage on many lines
    except SystemExit as end:
        if not isinstance(end.__context__, BrokenPipeError):
            raise
        # `rotary freqs ... | head`: Typer and Rich end with 1, which says that a fault was found
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except _WRONG_USAGE as error:
        typer.echo(f"error: {printable(_usage(error))}", err=True)
        sys.exit(2)
    except (ValueError, OSError, MemoryError, ImportError) as error:
        text = str(error)
        if isinstance(error, OSError) and error.filename is not None:
            text = f"{error.filename}: {error.strerror}"
        typer.echo(f"error: {printable(_as_options(text))}", err=True)
        sys.exit(1)


def _usage(error: typer.BadParameter) -> str:
    """Return what is wrong with the options and arguments, in one line."""
    text = " ".join(error.format_message().split()).rstrip(".")
    text = re.sub(r"Value error, |, unable to parse string as an? \w+", "", text)
    text = text.replace("Input should be", "must be")
    where = "rotary" if error.ctx is None else error.ctx.command_path
    return f"{text} (see {where} --help)"


def _as_options(text: str) -> str:
    """Return an error of the library with the names of options for those of arguments.

    >>> _as_options("say form='tables', or layer_type")
    'say --form tables, or --layer-type'
    >>> _as_options("until must be in 1 .. 256, got 300")
    '--until must be in 1 .. 256, got 300'
    """
    for words, option in _OPTIONS.items():
        text = re.sub(words, option, text)
    return text


@app.callback(invoke_without_command=True)
def start(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Print the version, or the help if no command is given."""
    if version:
        from .. import __version__

        typer.echo(f"rotary {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def is_gguf(config: str) -> bool:
    return config.lower().endswith(".gguf") and not os.path.isdir(config)


def read_specs(
    config: str, layer_type: str | None, part: str | None
) -> "dict[str | None, Rotary | None]":
    """Return layer type -> RoPE; one entry for a given layer type, or if all have the same."""
    from ..configs import (
        from_diffusers_config,
        from_gguf,
        from_hf_config,
        gguf_layer_types,
        layer_types,
        read_gguf,
    )
    from ..configs.diffusers import is_of_diffusers

    asked = (layer_type,) if layer_type else ()
    if not (is_gguf(config) or layer_type or part) and is_of_diffusers(config):
        specs: dict[str | None, Rotary | None] = {None: from_diffusers_config(config)}
    elif not is_gguf(config):
        kinds = asked or layer_types(config, part=part) or (None,)
        specs = {kind: from_hf_config(config, kind, part=part) for kind in kinds}
    elif part is None:
        metadata = read_gguf(config)
        kinds = asked or gguf_layer_types(metadata) or (None,)
        specs = {kind: from_gguf(metadata, kind) for kind in kinds}
    else:
        raise ValueError(f"{config}: --part {part}: a .gguf has no parts; leave it out")
    if layer_type and specs[layer_type] is None:
        raise ValueError(f"{config}: layer type {layer_type!r} has no rotation")
    return specs


def layers_differ(config: str, kinds: Iterable[str | None]) -> ValueError:
    """Return the error of a command that needs one layer type."""
    listed = ", ".join(map(str, kinds))
    return ValueError(f"{config}: layers differ; pass --layer-type, one of {listed}")


def entry_of(config: str, layer_type: str | None, part: str | None) -> "ModelConfig | None":
    """Return what a config of transformers says; None for GGUF files and diffusers."""
    from ..configs import choose
    from ..configs.diffusers import is_of_diffusers

    if is_gguf(config) or is_of_diffusers(config):
        return None
    return choose(config, layer_type, part)


def read_spec(config: str, layer_type: str | None, part: str | None = None) -> "Rotary":
    specs = read_specs(config, layer_type, part)
    if len(specs) > 1:
        raise layers_differ(config, specs)
    (spec,) = specs.values()
    if spec is None:
        raise ValueError(f"{config}: has no rotation")
    return spec


def read_head(
    config: str, layer_type: str | None, part: str | None
) -> "tuple[Rotary, Rotary, ModelConfig | None]":
    """Return the RoPE of a config, that of all channels of a head, and what the config says."""
    from ..analysis.spectrum import whole_head

    if is_gguf(config):
        raise ValueError(f"{config}: a GGUF file; give the config.json of the model")
    spec, entry = read_spec(config, layer_type, part), entry_of(config, layer_type, part)
    return spec, whole_head(spec, entry.nope_head_dim if entry else 0), entry
