"""Commands that run on this machine: the demo and the benchmark."""

from typing import Annotated

import typer

from ..layouts import Layout
from ..strict_json import JSON
from .app import Json, app
from .terminal import print_json, print_table, print_times, status


@app.command()
def demo(as_json: Json = False) -> None:
    """Rotate q and k of Llama 3.1 8B; check and time it."""
    from .. import demo as job

    with status() as show:
        report = job.run(show)
    if as_json:
        print_json(report)
    else:
        _print_demo(report)
    failed = [each["name"] for each in report["checks"] if not each["error"] <= each["limit"]]
    if failed:
        raise ValueError(f"wrong on this machine: {', '.join(failed)}; see `rotary doctor`")


@app.command()
def bench(
    seq: Annotated[int, typer.Option(min=1, max=2**31, help="Tokens.")] = 4096,
    layout: Annotated[Layout, typer.Option(help="Which channels make a pair.")] = "half",
    rounds: Annotated[int, typer.Option(min=1, help="Number of timed rounds.")] = 11,
    as_json: Json = False,
) -> None:
    """Time the rotation against a copy of the same bytes.

    The shape is that of Llama 3 8B.
    """
    from .. import bench as timing
    from ..spec import Rotary

    spec, shape = Rotary(head_dim=128, base=500_000.0, layout=layout), timing.Shape(seq)
    with status() as show:
        dtypes = ("float32", "bfloat16", "float16")
        times = timing.measure_libraries(spec, shape, dtypes, rounds, show)
    if as_json:
        measured = {name: {case: each._asdict() for case, each in cases.items()}
                    for name, cases in times.items()}  # fmt: skip
        print_json({"seq": seq, "seconds": measured, "versions": timing.versions()})
        return
    title = f"q 32 x {seq} x 128, k 8 x {seq} x 128, {layout}"
    print_times(title, timing.medians_in_ms(times))


def _print_demo(report: dict[str, JSON]) -> None:
    spec = report["spec"]
    rope = [
        ("schedule", f"{spec['schedule']}, base {spec['base']:,.0f}"),
        ("pairs", f"{spec['rotary_dim'] // 2} of head_dim {spec['head_dim']}, {spec['layout']}"),
        ("q", " x ".join(map(str, report["q"]))),
        ("k", " x ".join(map(str, report["k"]))),
    ]
    print_table(f"{report['model']}: its RoPE", rope)
    checks = [
        (each["name"], f"{each['error']:.1e}", "ok" if each["error"] <= each["limit"] else "WRONG")
        for each in report["checks"]
    ]
    checks.append(("  the same with float32 angles", f"{report['float32_error']:.1e}", ""))
    typer.echo()
    print_table("Properties of every rotation, measured", checks, ("", "error", ""))
    typer.echo()
    print_times("Time, median", report["times_ms"])
