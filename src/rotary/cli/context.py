"""Commands about lengths: decay of scores, reach of a model, plan for a longer context."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..words import counted
from .app import Config, Json, LayerType, Part, app, read_head
from .cluster import Dask, cluster
from .terminal import bar, print_json, print_table, print_text

if TYPE_CHECKING:
    from ..strict_json import JSON

Plot = Annotated[
    Path | None, typer.Option(help="Draw a plot into FILE: .png, .svg or .pdf.", metavar="FILE")
]
Length = Annotated[
    int | None,
    typer.Option(help="Length in tokens; default: max_position_embeddings of the config."),
]


@app.command()
def decay(
    config: Config,
    length: Length = None,
    layer_type: LayerType = None,
    part: Part = None,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Show how attention scores decay with distance.

    Prints two measures: the mean |S_j| of RoFormer, and B_m, which is larger the more a similar
    key scores above a random one.
    """
    from ..analysis.bounds import similarity
    from ..analysis.decay import decay_curve
    from ..reach import distances_to, of_window, visible

    spec, head, entry = read_head(config, layer_type, part)
    if length is None and entry is not None:
        length = entry.get("max_position_embeddings")
    if length is None:
        raise ValueError(f"{config} has no max_position_embeddings; give --length")
    asked, length = length, length if entry is None else visible(length, entry)
    distances = distances_to(length)
    curve = decay_curve(spec, distances, seq_len=length)
    alike = similarity(head, distances, seq_len=length)
    if plot is not None:
        from .. import plots

        plots.save(plots.decay({config: spec}, length, seq_len=length), plot)
    if as_json:
        columns = {"distance": distances, "mean_partial_sum": curve, "similarity": alike}
        print_json({name: column.tolist() for name, column in columns.items()})
        return
    rows = [
        (f"{distance:,}", f"{mean:.3f}", f"{value:.3f}")
        for distance, mean, value in zip(distances, curve, alike, strict=True)
    ]
    print_table(f"{config}, {counted(length, 'token')}", rows, ("distance", "mean |S_j|", "B_m"))
    if length < asked:
        typer.echo()
        print_text(of_window(length))


@app.command()
def reach(
    config: Config,
    length: Length = None,
    layer_type: LayerType = None,
    part: Part = None,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Show what may limit the context of a model, and why.

    Prints the distances at which a similar key scores lower than a random one (B_m < 0), the
    angles that training did not show, and the precision of float32 angles.
    """
    from ..reach import reaches

    results = reaches(config, layer_type, part=part, length=length)
    if plot is not None:
        from .. import plots

        shown = {" ".join(filter(None, (config, kind))): each
                 for kind, each in results.items() if each}  # fmt: skip
        if not shown:
            raise ValueError(f"{config}: has no rotation, so there is nothing to draw")
        heads = {name: each.head for name, each in shown.items()}
        ends = {name: each.length for name, each in shown.items()}
        plots.save(plots.similarity(heads, ends, seq_len=ends), plot)
    if as_json:
        documents = {str(kind): each and each.to_dict() for kind, each in results.items()}
        print_json(documents if len(results) > 1 else next(iter(documents.values())))
        return
    for kind, each in results.items():
        title = " ".join(filter(None, (config, kind)))
        if each is None:
            print_table(title, [("rotation", "none: these layers have no rotary embedding")])
            continue
        print_table(title, each.rows())
        typer.echo()
        print_text(each.verdict)
        typer.echo()


@app.command()
def plan(
    context: Annotated[int, typer.Option(help="The context to reach, in tokens.")],
    config: Annotated[
        str | None, typer.Option("--from", metavar="CONFIG", help="The config of a trained model.")
    ] = None,
    head_dim: Annotated[
        int | None, typer.Option(help="Without --from: channels of a head.")
    ] = None,
    base: Annotated[
        float | None, typer.Option(help="Without --from: the present rope_theta.")
    ] = None,
    trained: Annotated[
        int | None, typer.Option(help="Without --from: tokens the weights were trained at, if any.")
    ] = None,
    layer_type: LayerType = None,
    part: Part = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Write the config of --from, with the new RoPE, into a new FILE.", metavar="FILE"
        ),
    ] = None,
    plot: Plot = None,
    dask: Dask = None,
    as_json: Json = False,
) -> None:
    """Choose a base or scaling for a longer context, and say why.

    Prints the rope_parameters for transformers; --out writes the whole config.
    """
    from ..analysis.extension import option_rows
    from ..analysis.spectrum import whole_head
    from ..configs import replace_rope
    from ..plan import plan as make_plan
    from ..plan import plan_model, recommend_model
    from ..spec import Rotary

    of_config = {"--head-dim": head_dim, "--base": base, "--trained": trained}
    names = [name for name, value in of_config.items() if value is not None]
    if config is not None and names:
        raise ValueError(f"{', '.join(names)} cannot be used with --from: the config has them")
    if config is None and (layer_type or part):
        raise ValueError("--layer-type and --part choose inside a config; give --from as well")
    if out is not None and config is None:
        raise ValueError("--out writes the config of a trained model; give --from as well")
    check_targets(out, plot)
    document: dict[str, JSON] = {}
    if out is not None:  # before the search, which takes minutes
        advice = recommend_model(config, context, layer_type, part=part)
        length = advice.rope_parameters["max_position_embeddings"]  # its own, if its RoPE is kept
        document = replace_rope(config, advice.recommended, length, layer_type, part=part)
    with cluster(dask) as executor, bar("searching the bases") as progress:
        if config is not None:
            result = plan_model(
                config, context, layer_type, part=part, progress=progress, executor=executor
            )
        else:
            spec = Rotary(
                head_dim=128 if head_dim is None else head_dim,
                base=10_000.0 if base is None else base,
            )
            result = make_plan(context, spec, trained, progress=progress, executor=executor)
    if out is not None:
        write_new(out, document)
    if plot is not None:
        from .. import plots

        both = {
            name: whole_head(spec, result.nope_head_dim)
            for name, spec in (("as it is", result.spec), ("recommended", result.recommended))
        }
        plots.save(plots.similarity(both, result.context, seq_len=result.context), plot)
    if as_json:
        print_json(result.to_dict())
        return
    print_table(f"{config or 'a plain spectrum'}, {result.context:,} tokens", result.rows())
    if result.options and result.trained:
        header, *rows = option_rows(result.options)
        factor = result.context / result.trained
        typer.echo()
        print_table(f"Every method, with factor {factor:,.4g}", rows, header)
    typer.echo()
    print_text(result.reason)
    typer.echo()
    typer.echo(json.dumps(result.rope_parameters, indent=2))


def check_targets(out: Path | None, plot: Path | None) -> None:
    """Refuse files that cannot be written, before a search of minutes."""
    if plot is not None:
        from ..plots.files import check_target

        check_target(plot)
    if out is not None and os.path.lexists(out):  # a link to nothing as well: no file is opened
        raise ValueError(f"--out {out}: the file exists; name a new one")
    if out is not None and plot is not None and out.resolve() == plot.resolve():
        raise ValueError(f"--out and --plot are one file, {out}; name two")
    if out is not None and not out.parent.is_dir():
        raise ValueError(f"--out {out}: there is no folder {out.parent}; make it")


def write_new(out: Path, document: "dict[str, JSON]") -> None:
    """Write a config into a new file; if that fails, leave no file."""
    text = json.dumps(document, indent=2) + "\n"
    with open(out, "x", encoding="utf-8") as file:
        try:
            file.write(text)
            file.flush()
        except OSError:  # such as a full disk
            out.unlink()
            raise


@app.command()
def explore(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int | None, typer.Option(help="Default: the first free port from 7860 on.")
    ] = None,
    browser: Annotated[bool, typer.Option(help="Open the page in a browser.")] = True,
) -> None:
    """Open a page of interactive plots on this machine.

    There you choose models, change base and factor, and compare two models.
    """
    try:
        from ..explorer import serve
    except ModuleNotFoundError as error:
        raise ValueError(f"the page needs {error.name}: pip install starlette uvicorn") from error
    serve(host, port, browser, lambda address: typer.echo(f"{address} (Ctrl-C ends it)"))
