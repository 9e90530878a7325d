"""Commands about lengths: how a score decays, how far a model reaches, how to reach farther."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .app import Config, Json, LayerType, Part, app, read_spec
from .cluster import Dask, cluster
from .terminal import bar, print_json, print_table, print_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..analysis.extension import Row
    from ..plan import Plan
    from ..reach import Reach

Plot = Annotated[
    Path | None, typer.Option(help="Draw it into FILE: .png, .svg or .pdf.", metavar="FILE")
]
Length = Annotated[
    int | None,
    typer.Option(help="Tokens; default the max_position_embeddings of the config."),
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

    Two measures: mean |S_j| of RoFormer, and B_m, by how much a similar key is preferred to a
    random one.
    """
    from ..analysis.bounds import similarity
    from ..analysis.decay import decay_curve
    from ..configs import choose
    from ..reach import distances_to, lengths

    spec = read_spec(config, layer_type, part)
    length = length if length is not None else lengths(spec, choose(config, layer_type, part))[1]
    if length is None:
        raise ValueError(f"{config} says no max_position_embeddings; give --length")
    distances = distances_to(length)
    curve = decay_curve(spec, distances, seq_len=length)
    alike = similarity(spec, distances, seq_len=length)
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
    print_table(f"{config}, {length:,} tokens", rows, ("distance", "mean |S_j|", "B_m"))


@app.command()
def reach(
    config: Config,
    length: Length = None,
    layer_type: LayerType = None,
    part: Part = None,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Show up to which length the RoPE of a model works, and why.

    Distances at which a similar key is not preferred (B_m < 0), angles that training did not
    show, and the precision of float32 angles.
    """
    from ..reach import reaches

    results = reaches(config, layer_type, part=part, length=length)
    if plot is not None:
        from .. import plots

        specs = {" ".join(filter(None, (config, kind))): each.spec
                 for kind, each in results.items() if each}  # fmt: skip
        longest = max(each.length for each in results.values() if each)
        plots.save(plots.similarity(specs, longest, seq_len=longest), plot)
    if as_json:
        documents = {str(kind): each and each.to_dict() for kind, each in results.items()}
        print_json(documents if len(results) > 1 else next(iter(documents.values())))
        return
    for kind, each in results.items():
        title = " ".join(filter(None, (config, kind)))
        if each is None:
            print_table(title, [("rotation", "none: these layers see no position")])
            continue
        print_table(title, _reach_rows(each))
        typer.echo()
        print_text(each.verdict)
        typer.echo()


def _reach_rows(result: "Reach") -> list[tuple[str, str]]:
    first = result.first_failure
    return [
        ("length", f"{result.length:,} tokens; trained at {result.trained:,}"),
        ("first B_m < 0", "none" if first is None else f"distance {first:,}"),
        ("all B_m < 0", f"{result.failures:,} of {result.length:,} distances"),
        ("lowest B_m / n", f"{result.lowest:.4f} at distance {result.lowest_distance:,}"),
        ("critical dimension", f"{result.critical_dimension} of {2 * result.pairs} channels"),
        ("less than one turn", f"{result.never_turning} of {result.pairs} pairs, in training"),
        ("angles not seen then", f"{result.unseen:.1%} up to {result.length:,} tokens"),
        ("longest wavelength", f"{result.longest_wavelength:,.0f} tokens"),
        ("float32 angles", f"within 1e-2 rad up to position {result.float32_positions:,}"),
    ]


@app.command()
def plan(
    context: Annotated[int, typer.Option(help="The context to reach, in tokens.")],
    config: Annotated[
        str | None, typer.Option("--from", metavar="CONFIG", help="The config of a trained model.")
    ] = None,
    head_dim: Annotated[
        int | None, typer.Option(help="Without --from: channels of a head.")
    ] = None,
    base: Annotated[float | None, typer.Option(help="Without --from: rope_theta as it is.")] = None,
    trained: Annotated[
        int | None, typer.Option(help="Without --from: tokens the weights were trained at, if any.")
    ] = None,
    layer_type: LayerType = None,
    part: Part = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Write the config of --from with this RoPE into a new FILE.", metavar="FILE"
        ),
    ] = None,
    plot: Plot = None,
    dask: Dask = None,
    as_json: Json = False,
) -> None:
    """Choose a base or scaling for a longer context, and say why.

    Prints the rope_parameters for transformers; --out writes the whole config.
    """
    from ..configs import replace_rope
    from ..plan import plan as make_plan
    from ..plan import plan_model
    from ..spec import Rotary

    of_config = {"--head-dim": head_dim, "--base": base, "--trained": trained}
    names = [name for name, value in of_config.items() if value is not None]
    if config is not None and names:
        raise ValueError(f"{', '.join(names)} cannot be given beside --from: the config says it")
    if config is None and (layer_type or part):
        raise ValueError("--layer-type and --part choose inside a config; give --from as well")
    if out is not None and config is None:
        raise ValueError("--out writes the config of a trained model; give --from as well")
    if out is not None and out.exists():
        raise ValueError(f"--out {out}: the file exists; name a new one")
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
    if plot is not None:
        from .. import plots

        both = {"as it is": result.spec, "recommended": result.recommended}
        plots.save(plots.similarity(both, context, seq_len=context), plot)
    if out is not None:
        document = replace_rope(config, result.recommended, context, layer_type, part=part)
        text = json.dumps(document, indent=2) + "\n"
        with open(out, "x", encoding="utf-8") as file:
            try:
                file.write(text)
                file.flush()
            except OSError:  # a full disk: leave no half of a config
                out.unlink()
                raise
    if as_json:
        print_json(result.to_dict())
        return
    print_table(f"{config or 'a plain spectrum'}, {context:,} tokens", _plan_rows(result))
    if result.options:
        header = ("method", "first B_m < 0", "all", "unseen angles", "fastest pair x", "slowest x")
        typer.echo()
        print_table("Every method for this length", _option_rows(result.options), header)
    typer.echo()
    print_text(result.reason)
    typer.echo()
    typer.echo(json.dumps(result.rope_parameters, indent=2))


def _plan_rows(result: "Plan") -> list[tuple[str, str]]:
    first, safe, spec = result.first_failure, result.safe_base, result.recommended
    params = ", ".join(f"{name} {value:g}" for name, value in spec.params.items()
                       if isinstance(value, int | float))  # fmt: skip
    how = f"{result.action}: {spec.schedule}, base {spec.base:,.15g} {params}".rstrip()
    least = result.shown(result.min_base.base)
    return [
        ("recommended", how),
        ("first B_m < 0 now", "none" if first is None else f"distance {first:,}"),
        ("smallest base", f"{least}, certified for head_dim {result.spec.head_dim}, rounded up"),
        ("safe base", f"{result.shown(safe.base)}; {safe.passing_share:.0%} of the bases between "
                      "pass"),
    ]  # fmt: skip


def _option_rows(options: "Sequence[Row]") -> list[tuple[str, ...]]:
    return [
        (row.method, "none" if row.first_failure is None else f"{row.first_failure:,}",
         f"{row.failures:,}", f"{row.unseen:.1%}", f"{row.fastest_ratio:.3g}",
         f"{row.slowest_ratio:.3g}")
        for row in options
    ]  # fmt: skip


@app.command()
def explore(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int | None, typer.Option(help="Default: the first free one from 7860 on.")
    ] = None,
    browser: Annotated[bool, typer.Option(help="Open the page in a browser.")] = True,
) -> None:
    """Open a page of interactive plots on this machine.

    Choose models, change base and factor, compare two.
    """
    try:
        from ..explorer import serve
    except ModuleNotFoundError as error:
        raise ValueError(f"the page needs {error.name}: pip install starlette uvicorn") from error
    serve(host, port, browser, lambda address: typer.echo(f"{address} (Ctrl-C ends it)"))
