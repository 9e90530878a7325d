"""The command that finds frequencies for a wanted decay."""

import csv
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .app import Json, LayerType, Part, app, read_head
from .context import Plot, check_targets, write_new
from .terminal import bar, print_json, print_table, print_text, short

if TYPE_CHECKING:
    from ..analysis.ladders import Design, Wanted
    from ..spec import Rotary

LEFT_OUT = ("linear", "ntk_mixed", "llama3")  # not plotted: the plot has no room for them
KINDS = "--keep N, --at-least X with --until N, or --curve FILE"
ROUNDING = 1e-12  # a smaller error is rounding, and shown as 0


@app.command()
def design(
    length: Annotated[
        int, typer.Option(min=2, help="The largest distance that counts, in tokens.", metavar="N")
    ],
    config: Annotated[
        str | None,
        typer.Option(
            "--from", metavar="CONFIG", help="Take head_dim and base from this config.json."
        ),
    ] = None,
    head_dim: Annotated[
        int | None, typer.Option(help="Without --from: channels of a head; default 128.")
    ] = None,
    base: Annotated[
        float | None, typer.Option(help="Without --from: rope_theta; default 10000.")
    ] = None,
    keep: Annotated[
        int | None,
        typer.Option(
            help="Want: keep the curve of the base up to N tokens; beyond, B_m >= 0.", metavar="N"
        ),
    ] = None,
    at_least: Annotated[
        float | None, typer.Option(help="Want: B_m / B_0 of at least X up to --until.")
    ] = None,
    until: Annotated[
        int | None,
        typer.Option(help="With --at-least: the distance up to which it holds.", metavar="N"),
    ] = None,
    power: Annotated[
        float | None, typer.Option(help="Beyond --until, let B_m fall like m^-X.")
    ] = None,
    scale: Annotated[
        float | None,
        typer.Option(help="Beyond --until, let B_m fall like exp(-m / X), X in tokens."),
    ] = None,
    at_most: Annotated[
        float | None, typer.Option(help="Beyond --until, keep B_m / B_0 between 0 and X.")
    ] = None,
    curve: Annotated[
        Path | None,
        typer.Option(help="Want: lines of a distance, a comma and B_m / B_0.", metavar="FILE"),
    ] = None,
    longest_wavelength: Annotated[
        float | None,
        typer.Option(help="Upper limit of the wavelength, in tokens; default 64 x --length."),
    ] = None,
    starts: Annotated[
        int, typer.Option(help="Number of searches; more may find better frequencies.")
    ] = 4,
    seed: Annotated[int, typer.Option(help="Seed that chooses the fitted distances.")] = 0,
    layer_type: LayerType = None,
    part: Part = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Write these frequencies into a new FILE: the config of --from, or its keys.",
            metavar="FILE",
        ),
    ] = None,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Find frequencies for a wanted decay by distance.

    The decay says how much a similar key is favoured at each distance. For models that are trained
    with these frequencies from the start. Prints how near they come, how near any could, and
    whether B_m >= 0 is proved; --out writes them as factors of LongRoPE.
    """
    from ..analysis import bounds, ladders
    from ..configs import as_longrope, replace_rope, rope_keys
    from ..spec import Rotary

    check_targets(out, plot)
    if config is None:
        if layer_type or part:
            raise ValueError("--layer-type and --part choose inside a config; give --from as well")
        spec = head = Rotary(
            head_dim=128 if head_dim is None else head_dim, base=10_000.0 if base is None else base
        )
    elif head_dim is not None or base is not None:
        raise ValueError("--head-dim and --base cannot be used with --from: the config has them")
    else:
        spec, head, _ = read_head(config, layer_type, part)
    if out is not None and config is not None:  # before the search: can this config say a result?
        plain = dataclasses.replace(spec, schedule="default", params={})
        replace_rope(config, as_longrope(plain, length), length, layer_type, part=part)
    wanted = _wanted(head, length, keep, at_least, until, power, scale, at_most, curve)
    with bar("searching frequencies") as progress:
        result = ladders.design(
            head, wanted, longest_wavelength=longest_wavelength, starts=starts, seed=seed,
            progress=lambda share: progress(0.8 * share),
        )  # fmt: skip
        others = ladders.alternatives(
            head, length, keep or until, progress=lambda share: progress(0.8 + 0.2 * share)
        )
    specs = {"designed": result.spec, **others}
    designed = dataclasses.replace(result.spec, head_dim=spec.head_dim, start=spec.start)
    written = as_longrope(designed, length)
    if out is not None:
        document = (
            rope_keys(written, length) if config is None
            else replace_rope(config, written, length, layer_type, part=part)
        )  # fmt: skip
        write_new(out, document)
    if plot is not None:
        from .. import plots

        shown = {name: each for name, each in specs.items() if name not in LEFT_OUT}
        plots.save(plots.design(shown, wanted), plot)
    rows = [
        (name, ladders.misses(each, wanted), bounds.first_failure(each, length, seq_len=length))
        for name, each in specs.items()
    ]
    if as_json:
        names = ("method", "error", "first_failure")
        print_json({
            "length": length, "spec": designed.to_dict(), "error": result.error,
            "lower_bound": result.lower_bound, "certificate": result.certificate._asdict(),
            "methods": [dict(zip(names, row, strict=True)) for row in rows],
            "config": rope_keys(written, length),
        })  # fmt: skip
        return
    print_table(f"{config or 'a plain head'}, {length:,} tokens", _rows(result))
    typer.echo()
    lines = [(name, _share(error), "none" if first is None else f"{first:,}")
             for name, error, first in rows]  # fmt: skip
    print_table("Every method", lines, ("method", "error", "first B_m < 0"))
    typer.echo()
    print_text(_verdict(result))


def _wanted(
    spec: "Rotary", length: int, keep: int | None, at_least: float | None, until: int | None,
    power: float | None, scale: float | None, at_most: float | None, curve: Path | None,
) -> "Wanted":  # fmt: skip
    """Return the `Wanted` of the one option that was given: --keep, --at-least or --curve."""
    from ..analysis import ladders

    if sum(each is not None for each in (keep, at_least, curve)) != 1:
        raise ValueError(f"say what is wanted, with exactly one of {KINDS}")
    beyond = {"--until": until, "--power": power, "--scale": scale, "--at-most": at_most}
    used = [name for name, value in beyond.items() if value is not None]
    if at_least is None and used:
        raise ValueError(f"{', '.join(used)} cannot be given without --at-least")
    if sum(each is not None for each in (power, scale, at_most)) > 1:
        raise ValueError("give one of --power, --scale and --at-most")
    if keep is not None:
        if not 1 <= keep <= length:
            raise ValueError(f"--keep must be in 1 .. {length}, the length, got {keep}")
        return ladders.wanted_reach(spec, keep, length)
    if curve is not None:
        values, distances = _read(curve)
        return ladders.wanted_curve(values, length, distances)
    if at_least is None or until is None:
        raise ValueError("--at-least needs --until N: the distance up to which it holds")
    return ladders.wanted_level(at_least, until, length, power=power, scale=scale, at_most=at_most)


def _rows(result: "Design") -> list[tuple[str, str]]:
    proof = result.certificate
    if proof.holds:
        holds = f"proved at every distance to {proof.length:,}"
    elif proof.first_failure is None:
        holds = f"not decided at {proof.undecided:,} distances"
    else:
        holds = f"fails, first at distance {proof.first_failure:,}"
    frequencies = tuple(result.spec.params["inv_freq"])
    return [
        ("error (RMS, share of B_0)", _share(result.error)),
        ("smallest possible error", _share(result.lower_bound)),
        ("floor", holds),
        ("smallest margin above the floor",
         f"{proof.lowest:.3g} of B_0, at distance {proof.lowest_at:,}"),
        ("frequencies may be rounded by", f"{proof.tolerance:.1g} of each"),
        ("frequencies, rad per token", short(frequencies)),
    ]  # fmt: skip


def _share(error: float) -> str:
    return "0" if error < ROUNDING else f"{error:.3g}"


def _verdict(result: "Design") -> str:
    proof = result.certificate
    reached = (
        "The floor holds." if proof.holds else
        "The floor does not hold: want less, a shorter length, or a larger head."
    )  # fmt: skip
    return (
        f"{reached} A model has to be trained with these frequencies: weights that were trained "
        "with others do not fit them. B_m is an average over independent channels and promises "
        "nothing about a trained model: measure it."
    )


def _read(path: Path) -> tuple[list[float], list[int]]:
    """Return values and distances of a file with one pair per line; skip a first line of words."""
    values, distances = [], []
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            rows = list(csv.reader(file))
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(
            f"{path}: not lines of a distance, a comma and a number: {error}"
        ) from None
    for line, row in enumerate(rows, 1):
        if not row or (line == 1 and not _is_number(row[0])):
            continue
        try:
            distance, value = row
            distances.append(int(distance))
            values.append(float(value))
        except ValueError:
            raise ValueError(
                f"{path}, line {line}: must be a whole distance, a comma and a number, got "
                f"{','.join(row)!r:.80}"
            ) from None
    if not values:
        raise ValueError(f"{path}: has no line of a distance and a value")
    return values, distances


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
