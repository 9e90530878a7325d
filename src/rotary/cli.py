"""The command `rotary`."""

import json
import math
import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .spec import Rotary

Layout = Literal["half", "interleaved"]
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
    except (ValueError, OSError, MemoryError) as error:
        typer.echo(f"error: {_printable(str(error))}", err=True)
        sys.exit(1)


@app.callback(invoke_without_command=True)
def start(context: typer.Context) -> None:
    """Without a command: the help."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def demo(as_json: Json = False) -> None:
    """Rotate q and k of Llama 3.1 8B: check the laws, time it against a copy."""
    from . import demo as job

    with _status() as tell:
        report = job.run(tell)
    if as_json:
        _print_json(report)
    else:
        _print_demo(report)
    broken = [law["name"] for law in report["laws"] if not law["error"] <= law["limit"]]
    if broken:
        raise ValueError(f"broken on this machine: {', '.join(broken)}; see `rotary doctor`")


@app.command()
def inspect(
    config: Config, layer_type: LayerType = None, part: Part = None, as_json: Json = False
) -> None:
    """What RoPE a config has, for each layer type: schedule, slice, layout, wavelengths."""
    from .configs import layer_types, parts

    kinds = (layer_type,) if layer_type else layer_types(config, part=part) or (None,)
    reports = {kind: _inspected(config, kind, part) for kind in kinds}
    if layer_type and reports[layer_type] is None:
        raise ValueError(f"{config}: layer type {layer_type!r} has no rotation")
    asked = (part,) if part else ("text_config", "thinker_config", "llm_config")
    others = [name for name in parts(config) if name not in asked]
    if as_json:
        one = reports.get(layer_type) if len(reports) == 1 else None
        _print_json(one if one else {str(kind): report for kind, report in reports.items()})
        return
    for kind, report in reports.items():
        title = " ".join(word for word in (config, part, kind) if word)
        if report is None:
            _print_table(title, ("", ""), [("rotation", "none: these layers see no position")])
        else:
            _print_table(title, ("", ""), _inspection_rows(report))
    if others:
        typer.echo(f"other parts: {', '.join(others)}; ask with --part", err=True)


def _inspected(config: str, layer_type: str | None, part: str | None) -> dict[str, Any] | None:
    from .angles import inv_freq
    from .hf import from_hf_config

    spec = from_hf_config(config, layer_type, part=part)
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


def _inspection_rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    spec = dict(report["spec"])
    params, axes = spec.pop("params"), spec.pop("axes")
    rows = [(name, str(value)) for name, value in spec.items()]
    rows += [(f"  {name}", _short(value)) for name, value in params.items()]
    if axes:
        counts = ", ".join(f"{axes.count(axis)} by axis {axis}" for axis in sorted(set(axes)))
        rows.append(("pairs", counts))
    rows.append(("attention factor", f"{report['attention_factor']:.6g}, on cos and sin"))
    if report["shortest_wavelength"]:
        shortest, longest = report["shortest_wavelength"], report["longest_wavelength"]
        rows.append(("wavelengths", f"{shortest:.4g} to {longest:,.0f} tokens"))
    if report["pairs_that_stand_still"]:
        rows.append(("stand still", f"{report['pairs_that_stand_still']} pairs"))
    if report["depends_on_length"]:
        rows.append(("depends on", "the length of each row"))
    return rows


@app.command()
def freqs(
    config: Config,
    layer_type: LayerType = None,
    seq_len: Annotated[int | None, typer.Option(help="Length of the row, in tokens.")] = None,
    as_json: Json = False,
) -> None:
    """Frequency and wavelength of every pair."""
    from .angles import inv_freq

    spec = _read(config, layer_type)
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
        _print_json({"attention_factor": factor, "pairs": pairs})
        return
    rows = [
        (
            str(pair["pair"]),
            f"{pair['inv_freq']:.12g}",
            f"{pair['wavelength']:,.6g}" if pair["wavelength"] else "stands still",
        )
        for pair in pairs
    ]
    _print_table(f"{config}", ("pair", "rad per token", "wavelength, tokens"), rows)


@app.command()
def bench(
    seq: Annotated[int, typer.Option(min=1, help="Tokens.")] = 4096,
    layout: Annotated[Layout, typer.Option(help="Which channels make a pair.")] = "half",
    rounds: Annotated[int, typer.Option(min=1, help="Counted rounds.")] = 11,
    as_json: Json = False,
) -> None:
    """Time the rotation against a copy of the same bytes, at Llama 3 8B's shape."""
    from importlib.util import find_spec

    from . import bench as timing
    from .spec import Rotary

    spec, shape = Rotary(head_dim=128, base=500_000.0, layout=layout), timing.Shape(seq)
    times: dict[str, dict[str, timing.Timing]] = {}
    with _status() as tell:
        tell("timing NumPy float32")
        times["NumPy float32"] = timing.measure(timing.numpy_cases(spec, shape), rounds=rounds)
        if find_spec("torch") is not None:
            import torch

            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                name = f"PyTorch {str(dtype).removeprefix('torch.')}"
                tell(f"timing {name}")
                times[name] = timing.measure(
                    timing.torch_cases(spec, shape, dtype),
                    rounds=rounds,
                    between=timing.torch_matmul(),
                )
    if as_json:
        measured = {name: {case: each._asdict() for case, each in found.items()}
                    for name, found in times.items()}  # fmt: skip
        _print_json({"seq": seq, "seconds": measured, "versions": timing.versions()})
        return
    milliseconds = {
        name: {case: each.median * 1e3 for case, each in found.items()}
        for name, found in times.items()
    }
    _print_times(f"q 32 x {seq} x 128, k 8 x {seq} x 128, {layout}", milliseconds)


@app.command()
def doctor(
    target: Annotated[
        str | None,
        typer.Argument(
            help="A config.json, a model folder, or module:object; default this machine."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """What is in the way: of speed on this machine, or of exact RoPE in a config or a model."""
    if target is None:
        from .doctor import examine

        findings: list[tuple[str, ...]] = [tuple(each) for each in examine()]
        names = ("what", "found", "advice")
    else:
        from .audit import audit
        from .identify import load

        subject: Any = target
        if ":" in target and not os.path.exists(target):
            subject = load(target)
            subject = (
                subject() if callable(subject) and not hasattr(subject, "modules") else subject
            )
        findings = [tuple(each) for each in audit(subject)]
        names = ("where", "found", "advice")
    if as_json:
        _print_json([dict(zip(names, each, strict=True)) for each in findings])
        return
    _print_table(f"rotary doctor {target or ''}".strip(), ("", *names[1:]), findings)


@app.command()
def identify(
    target: Annotated[str, typer.Argument(help="module:function or path/to/file.py:function.")],
    head_dim: Annotated[int, typer.Option(min=1, help="Channels of a head.")],
    num_axes: Annotated[int, typer.Option(min=1, help="Axes of a position.")] = 1,
    as_json: Json = False,
) -> None:
    """Which RoPE a function computes: f(x, positions) or f(q, k, cos, sin)."""
    from .identify import identify as examine
    from .identify import load

    found = examine(load(target), head_dim, num_axes=num_axes)
    if as_json:
        _print_json(found.to_dict())
        return
    typer.echo(str(found))


@app.command()
def diff(
    config: Config,
    seq_len: Annotated[int | None, typer.Option(help="Length of the row, in tokens.")] = None,
    layer_type: LayerType = None,
    as_json: Json = False,
) -> None:
    """The same config as transformers, vLLM, SGLang, llama.cpp, mlx-lm and keras-hub read it."""
    from .diff import diff as compare

    found = compare(config, seq_len=seq_len, layer_type=layer_type)
    if as_json:
        _print_json(found.to_dict())
        return
    apart = {each.framework: each for each in found.differences}
    rows = []
    for each in found.readings:
        gap = apart.get(each.framework)
        rows.append(
            (
                f"{each.framework} {each.version}",
                "refuses" if each.refuses else each.schedule,
                "" if each.attention_factor is None else f"{each.attention_factor:.6g}",
                "" if gap is None else f"{gap.inv_freq:.2g}",
                each.refuses or each.switch,
            )
        )
    header = ("", "schedule", "amplitude", "off by", "changes with the length, or why refused")
    _print_table(config, header, rows)
    typer.echo(found.verdict)


def _read(config: str, layer_type: str | None) -> "Rotary":
    from .hf import from_hf_config

    spec = from_hf_config(config, layer_type)
    if spec is None:
        raise ValueError(f"{config}: layer type {layer_type!r} has no rotation")
    return spec


def _print_json(document: Any) -> None:
    typer.echo(json.dumps(_finite(document), indent=2, allow_nan=False))


def _finite(document: Any) -> Any:
    """The document with null for what JSON has no number for."""
    if isinstance(document, dict):
        return {name: _finite(value) for name, value in document.items()}
    if isinstance(document, list | tuple):
        return [_finite(value) for value in document]
    return None if isinstance(document, float) and not math.isfinite(document) else document


def _printable(text: str) -> str:
    """Text with control characters and undecodable bytes shown as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _print_table(title: str, header: tuple[str, ...], rows: "Sequence[tuple[str, ...]]") -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=Text(_printable(title)), title_justify="left", show_header=any(header), box=None
    )
    for index, name in enumerate(header):
        table.add_column(name, overflow="fold", style="bold" if index == 0 else "")
    for row in rows:
        table.add_row(*(Text(_printable(cell)) for cell in row))
    Console().print(table)


def _print_times(title: str, times: dict[str, dict[str, float]]) -> None:
    rows = [
        (library, case, f"{spent:.2f}", f"{spent / found['copy']:.2f}")
        for library, found in times.items()
        for case, spent in found.items()
    ]
    _print_table(title, ("", "", "ms", "x copy"), rows)


def _print_demo(report: dict[str, Any]) -> None:
    spec = report["spec"]
    rope = [
        ("schedule", f"{spec['schedule']}, base {spec['base']:,.0f}"),
        ("pairs", f"{spec['rotary_dim'] // 2} of head_dim {spec['head_dim']}, {spec['layout']}"),
        ("q", " x ".join(map(str, report["q"]))),
        ("k", " x ".join(map(str, report["k"]))),
    ]
    _print_table(f"{report['model']}: its RoPE", ("", ""), rope)
    laws = [
        (law["name"], f"{law['error']:.1e}", "holds" if law["error"] <= law["limit"] else "BROKEN")
        for law in report["laws"]
    ]
    laws.append(("  the same with float32 angles", f"{report['float32_error']:.1e}", ""))
    typer.echo()
    _print_table("The laws, on this run", ("", "error", ""), laws)
    typer.echo()
    _print_times("Time, median", report["times_ms"])


def _short(value: Any) -> str:
    if isinstance(value, tuple | list) and len(value) > 6:
        return f"{', '.join(f'{item:g}' for item in value[:6])}, ... ({len(value)} values)"
    return str(value)


@contextmanager
def _status() -> "Iterator[Any]":
    """A spinner on stderr, silent where that is no terminal; yields a way to change its text."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: None
        return
    with console.status("starting") as status:
        yield status.update
