"""Commands on this machine: the demonstration, and the timing."""

from typing import Annotated

import typer

from ..layouts import Layout
from ..strict_json import JSON
from .app import Json, app
from .terminal import print_json, print_table, print_times, status


@app.command()
def demo(as_json: Json = False) -> None:
    """Rotate q and k of Llama 3.1 8B: check the result, time it against a copy."""
    from .. import demo as job

    with status() as tell:
        report = job.run(tell)
    if as_json:
        print_json(report)
    else:
        _print_demo(report)
    failed = [each["name"] for each in report["checks"] if not each["error"] <= each["limit"]]
    if failed:
        raise ValueError(f"wrong on this machine: {', '.join(failed)}; see `rotary doctor`")


@app.command()
def bench(
    seq: Annotated[int, typer.Option(min=1, help="Tokens.")] = 4096,
    layout: Annotated[Layout, typer.Option(help="Which channels make a pair.")] = "half",
    rounds: Annotated[int, typer.Option(min=1, help="Counted rounds.")] = 11,
    as_json: Json = False,
) -> None:
    """Time the rotation against a copy of the same bytes, at Llama 3 8B's shape."""
    from importlib.util import find_spec

    from .. import bench as timing
    from ..spec import Rotary

    spec, shape = Rotary(head_dim=128, base=500_000.0, layout=layout), timing.Shape(seq)
    times: dict[str, dict[str, timing.Timing]] = {}
    with status() as tell:
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
        measured = {name: {case: each._asdict() for case, each in cases.items()}
                    for name, cases in times.items()}  # fmt: skip
        print_json({"seq": seq, "seconds": measured, "versions": timing.versions()})
        return
    milliseconds = {
        name: {case: each.median * 1e3 for case, each in cases.items()}
        for name, cases in times.items()
    }
    print_times(f"q 32 x {seq} x 128, k 8 x {seq} x 128, {layout}", milliseconds)


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
    print_table("What every rotation keeps, measured", checks, ("", "error", ""))
    typer.echo()
    print_times("Time, median", report["times_ms"])
