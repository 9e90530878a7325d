"""Commands that read a config, a model or a function: its RoPE, and what may be wrong."""

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..strict_json import JSON
from ..words import counted
from .app import (
    Config,
    ConfigOrGguf,
    Json,
    LayerType,
    Part,
    app,
    entry_of,
    is_gguf,
    layers_differ,
    read_spec,
    read_specs,
)
from .terminal import of_user, overwrite, print_json, print_table, print_text, short

if TYPE_CHECKING:
    from ..spec import Rotary

SeqLen = Annotated[int | None, typer.Option(min=1, help="Length of the sequence, in tokens.")]


@app.command()
def inspect(
    config: ConfigOrGguf,
    layer_type: LayerType = None,
    part: Part = None,
    as_json: Json = False,
) -> None:
    """Show the RoPE of a config, for each layer type.

    Prints the schedule and its parameters, the slice of the head, the layout, the wavelengths, and
    how many layers take no rotation.
    """
    from ..configs import parts

    specs = read_specs(config, layer_type, part)
    reports = {kind: _inspected(spec) for kind, spec in specs.items()}
    asked = (part,) if part else ("text_config", "thinker_config", "llm_config")
    others = [] if is_gguf(config) else [name for name in parts(config) if name not in asked]
    if as_json:
        one = reports.get(layer_type) if len(reports) == 1 else None
        print_json(one or {str(kind): report for kind, report in reports.items()})
        return
    for kind, report in reports.items():
        title = " ".join(word for word in (config, part, kind) if word)
        if report is None:
            print_table(title, [("rotation", "none: these layers have no rotary embedding")])
        else:
            entry = entry_of(config, kind, part)
            unrotated = entry.layers_without_rotation if entry else ""
            rows = _inspection_rows(report)
            print_table(title, [*rows, ("layers", unrotated)] if unrotated else rows)
    if others:
        typer.echo(f"other parts: {', '.join(others)}; choose one with --part", err=True)


def _inspected(spec: "Rotary | None") -> dict[str, JSON] | None:
    from ..angles import inv_freq

    if spec is None:
        return None
    frequencies, factor = inv_freq(spec)
    turning = [math.tau / abs(value) for value in frequencies.tolist() if value]
    return {
        "spec": spec.to_dict(),
        "attention_factor": factor,
        "shortest_wavelength": min(turning, default=None),
        "longest_wavelength": max(turning, default=None),
        "pairs_that_stand_still": len(frequencies) - len(turning),
        "depends_on_length": spec.depends_on_length,
    }


def _inspection_rows(report: dict[str, JSON]) -> list[tuple[str, str]]:
    spec = dict(report["spec"])
    params, axes = spec.pop("params"), spec.pop("axes")
    rows = [(name, str(value)) for name, value in spec.items()]
    rows += [(f"  {name}", short(value)) for name, value in params.items()]
    if axes:
        counts = ", ".join(f"{axes.count(axis)} by axis {axis}" for axis in sorted(set(axes)))
        rows.append(("pairs", counts))
    rows.append(("attention factor", f"{report['attention_factor']:.6g}, on cos and sin"))
    if report["shortest_wavelength"]:
        shortest, longest = report["shortest_wavelength"], report["longest_wavelength"]
        rows.append(("wavelengths", f"{shortest:.4g} to {longest:,.0f} tokens"))
    if report["pairs_that_stand_still"]:
        rows.append(("stand still", counted(report["pairs_that_stand_still"], "pair")))
    if report["depends_on_length"]:
        rows.append(("depends on", "the length of each row"))
    return rows


@app.command()
def freqs(
    config: ConfigOrGguf,
    layer_type: LayerType = None,
    part: Part = None,
    seq_len: SeqLen = None,
    as_json: Json = False,
) -> None:
    """List the frequency and wavelength of every pair."""
    from ..angles import inv_freq

    spec = read_spec(config, layer_type, part)
    frequencies, factor = inv_freq(spec, seq_len)
    pairs = [
        {
            "pair": index,
            "axis": spec.axes[index] if spec.axes else 0,
            "inv_freq": value,
            "wavelength": math.tau / abs(value) if value else None,
        }
        for index, value in enumerate(frequencies.tolist())
    ]
    if as_json:
        print_json({"attention_factor": factor, "pairs": pairs})
        return
    rows = [
        (
            str(pair["pair"]),
            f"{pair['inv_freq']:.12g}",
            f"{pair['wavelength']:,.6g}" if pair["wavelength"] else "stands still",
        )
        for pair in pairs
    ]
    print_table(config, rows, ("pair", "rad per token", "wavelength, tokens"))
    if spec.depends_on_length and seq_len is None:
        typer.echo(
            "these are for sequences up to the trained length; for a longer one pass --seq-len",
            err=True,
        )


@app.command()
def vectors(
    config: ConfigOrGguf,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="File to write; default: print.")
    ] = None,
    layer_type: LayerType = None,
    part: Part = None,
) -> None:
    """Write test vectors (JSON), to check code in any language.

    They hold cos, sin, and q and k before and after the rotation.
    There is one case for each RoPE of the config, and two if the frequencies depend on the length.
    An existing file is overwritten. The page docs/conformance.md describes the format.
    """
    from .. import testing

    document = testing.to_json(testing.vectors(read_specs(config, layer_type, part)))
    if output is None:
        typer.echo(document, nl=False)
    else:
        overwrite(output, document)


@app.command()
def doctor(
    target: Annotated[
        str | None,
        typer.Argument(
            help="A config.json, a model folder, or module:object; default: this machine. With "
            "--distributed: FILE.py:FUNCTION that returns positions or (positions, cos, sin)."
        ),
    ] = None,
    distributed: Annotated[
        bool,
        typer.Option("--distributed", help="Compare all ranks; start it with torchrun -m rotary."),
    ] = False,
    config: Annotated[
        str | None, typer.Option(help="With --distributed: a config.json, or its folder.")
    ] = None,
    seq_len: Annotated[
        int | None, typer.Option(min=1, help="With --distributed: tokens of the whole sequence.")
    ] = None,
    layer_type: Annotated[
        str | None,
        typer.Option(help="With --distributed: the layer type, if layers have different RoPEs."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check this machine, a config, a folder or a model.

    It reports what makes the rotation slow on this machine, or what is wrong in a config or model.
    The exit status is 1 if a config, its weights or a model are wrong.
    With module:object or FILE.py:FUNCTION the module is imported and called: name only files whose
    code you would run. A config or a folder is only read.
    """
    if distributed:
        from .ranks import examine_ranks

        examine_ranks(target, config, seq_len, layer_type, as_json)
        return
    if (config, seq_len, layer_type) != (None, None, None):
        raise ValueError("--config, --seq-len and --layer-type need --distributed")
    if target is None:
        from ..doctor import examine

        findings = [each._asdict() for each in examine()]
    else:
        from ..audit import audit
        from ..identify import load

        subject: object = target
        with of_user():
            if ":" in target and not os.path.exists(target):
                subject = load(target)
                # not a model but a function, or a class, that makes one
                if isinstance(subject, type) or not hasattr(subject, "modules"):
                    subject = _made_by(subject, target)
            audited = audit(subject)
        findings = [
            {"where": each.where, "found": each.found, "advice": each.advice,
             "is_fault": each.is_fault}
            for each in audited
        ]  # fmt: skip
    if as_json:
        print_json(findings)
    else:
        rows = [tuple(each.values())[:3] for each in findings]
        print_table(f"rotary doctor {target or ''}".strip(), rows, ("", "found", "advice"))
    if any(each.get("is_fault") for each in findings):
        raise typer.Exit(1)


def _made_by(function: Callable[[], object], target: str) -> object:
    from ..blackbox.probe import one_line

    try:
        return function()
    except (Exception, SystemExit) as error:  # whatever a stranger's function raises
        raise ValueError(
            f"{target}: calling it without arguments failed: {one_line(error)}; give a model, or a "
            "function without arguments that returns one; to examine a rotation use rotary identify"
        ) from error


@app.command()
def identify(
    target: Annotated[str, typer.Argument(help="module:function or path/to/file.py:function.")],
    head_dim: Annotated[int, typer.Option(min=1, help="Channels of a head.")],
    num_axes: Annotated[int, typer.Option(min=1, help="Axes of a position.")] = 1,
    form: Annotated[
        str | None,
        typer.Option(
            help="positions for f(x, positions), tables for f(q, k, cos, sin); default: by its "
            "arguments.",
            metavar="FORM",
        ),
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Exit with status 1 if the function is not a RoPE or has a finding."
        ),
    ] = False,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            help="With --check: accept this finding, such as float32_angles.",
            metavar="CODE",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Find out which RoPE a function computes, and its faults.

    The function is f(x, positions) or f(q, k, cos, sin).
    The module is imported and called: name only files whose code you would run.
    """
    from ..identify import identify as examine
    from ..identify import load

    if allow and not check:
        raise ValueError("--allow needs --check")
    with of_user():
        result = examine(load(target), head_dim, num_axes=num_axes, form=form)
    if as_json:
        print_json(result.to_dict())
    else:
        typer.echo(str(result))
    if check and (result.spec is None or set(result.codes) - set(allow or ())):
        raise typer.Exit(1)


@app.command()
def diff(
    config: Config,
    seq_len: SeqLen = None,
    layer_type: LayerType = None,
    part: Part = None,
    as_json: Json = False,
) -> None:
    """Compare what other programs compute from the same config.

    The programs are transformers, vLLM, SGLang, llama.cpp, mlx-lm and keras-hub.
    """
    from ..configs import layer_types
    from ..programs import diff as compare

    if layer_type is None and len(kinds := layer_types(config, part=part)) > 1:
        raise layers_differ(config, kinds)
    result = compare(config, seq_len=seq_len, layer_type=layer_type, part=part)
    if as_json:
        print_json(result.to_dict())
        return
    differences = {each.framework: each for each in result.differences}
    rows = []
    for each in result.readings:
        gap = differences.get(each.framework)
        factor = "" if each.attention_factor is None else f"{each.attention_factor:.6g}"
        off_by = "" if gap is None else f"{gap.inv_freq:.2g}"
        if gap is not None and not gap.agrees and len(result.lengths) > 1:
            off_by += f" at {gap.seq_len:,}"
        last = each.refuses or each.not_compared or each.switch
        rows.append((f"{each.framework} {each.version}", each.schedule, factor, off_by, last))
    last = "changes with the length, or why refused"
    header = ("", "schedule", "attention factor", "off by", last)
    print_table(config, rows, header)
    print_text(result.verdict)
