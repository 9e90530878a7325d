"""What a call on a GPU costs the host, without a GPU: `python -m benchmarks.launches`.

CPU tensors play those of a GPU, Triton's own C launcher runs, and a stub takes the place of libcuda
(`stub_cuda.py`; it needs gcc). So the driver is left out: 1.5 to 3 us of each launch on a device.
Times are those of one thread's processor, for one token of batch 1, 32 and 8 heads of 128 in
bfloat16, the best of several loops.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import rotary

from .stub_cuda import stub_of_cuda

Call = Callable[[], object]
TIME_LIMITS = {"a call": 10.0, "fused": 20.0, "prepared": 6.0, "with gradient": 40.0}  # us
SHAPES = 64


def microseconds(call: Call, count: int, loops: int) -> float:
    """The processor time of one call, the best of so many loops."""
    for _ in range(3):
        call()
    best = float("inf")
    for _ in range(loops):
        start = time.thread_time()
        for _ in range(count):
            call()
        best = min(best, (time.thread_time() - start) / count)
    return best * 1e6


def cases() -> dict[tuple[str, str], Call]:
    """(kind, name) -> a call."""
    spec = rotary.Rotary(head_dim=128, base=5e5)
    q, k = (torch.randn(1, 1, heads, 128).bfloat16() for heads in (32, 8))
    out = torch.empty_like(q), torch.empty_like(k)
    one, table = torch.randn(2, 1, 64).unbind(), torch.randn(2, 4096, 64).unbind()
    ids = torch.tensor([[7]])
    learning = [x.clone().requires_grad_() for x in (q, k)]
    by_table = {"spec": spec, "seq_dim": -3}
    at = {"positions": ids, "seq_dim": -3}
    xs = [
        tuple(torch.randn(batch, 1, heads, 128).bfloat16() for heads in (32, 8))
        for batch in range(1, SHAPES + 1)
    ]
    turn = iter(())

    def in_turn() -> object:
        nonlocal turn
        given = next(turn, None)
        if given is None:
            turn = iter(xs)
            given = next(turn)
        return rotary.rotate(given, *one, **by_table, out=given)

    v = torch.randn(1, 1, 8, 128).bfloat16()
    memory = torch.zeros(2, 64, 8, 128).bfloat16().unbind()
    small, scales = [x.to(torch.float8_e4m3fn) for x in memory], torch.ones(2).unbind()
    norm, slots = rotary.Norm(*torch.ones(2, 128).bfloat16(), 1e-6), torch.tensor([[5]])
    fused = {"tables": one, "seq_dim": -3}
    prepared = {
        "rotate, new": rotary.prepare(rotary.rotate, (q, k), *one, **by_table),
        "rotate positions=, in place": rotary.prepare(
            rotary.rotate, (q, k), *table, **by_table, positions=ids, out=(q, k)
        ),
        "apply positions=, new": rotary.prepare(rotary.apply, spec, q, k, **at),
        "apply positions=, in place": rotary.prepare(rotary.apply, spec, q, k, **at, out=(q, k)),
    }
    steps = {
        "rotate, new": lambda step: step((q, k), *one),
        "rotate positions=, in place": lambda step: step((q, k), *table, positions=ids, out=(q, k)),
        "apply positions=, new": lambda step: step(q, k, positions=ids),
        "apply positions=, in place": lambda step: step(q, k, positions=ids, out=(q, k)),
    }
    return {
        ("a call", "rotate, new"): lambda: rotary.rotate((q, k), *one, **by_table),
        ("a call", "rotate, out="): lambda: rotary.rotate((q, k), *one, **by_table, out=out),
        ("a call", "rotate, in place"): lambda: rotary.rotate((q, k), *one, **by_table, out=(q, k)),
        ("a call", "rotate positions=, new"): lambda: rotary.rotate(
            (q, k), *table, **by_table, positions=ids
        ),
        ("a call", "rotate positions=, in place"): lambda: rotary.rotate(
            (q, k), *table, **by_table, positions=ids, out=(q, k)
        ),
        ("a call", "apply, new"): lambda: rotary.apply(spec, q, k, seq_dim=-3),
        ("a call", "apply positions=, new"): lambda: rotary.apply(spec, q, k, **at),
        ("a call", "apply positions=, in place"): lambda: rotary.apply(
            spec, q, k, **at, out=(q, k)
        ),
        ("a call", f"rotate, in place, {SHAPES} shapes in turn"): in_turn,
        ("fused", "norm, rotate, out="): lambda: rotary.fused(
            q, k, None, spec, norm=norm, out=out, **fused
        ),
        ("fused", "norm, rotate, cache"): lambda: rotary.fused(
            q, k, v, spec, norm=norm, cache=rotary.KVCache(*memory, slots), out=out[:1], **fused
        ),
        ("fused", "norm, rotate, float8 cache, scales in tensors"): lambda: rotary.fused(
            *(q, k, v, spec),
            norm=norm,
            cache=rotary.KVCache(*small, slots, *scales),
            out=out[:1],
            **fused,
        ),
        **{("prepared", name): lambda name=name: steps[name](prepared[name]) for name in steps},
        ("with gradient", "rotate, forward and backward"): lambda: torch.autograd.grad(
            rotary.rotate(learning, *one, **by_table), learning, (q, k)
        ),
        ("with gradient", "apply positions=, forward and backward"): lambda: torch.autograd.grad(
            rotary.apply(spec, *learning, **at), learning, (q, k)
        ),
    }


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="see that every line runs")
    quick = parser.parse_args(arguments).quick
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, stub_of_cuda(Path(folder)) as stub:
        calls = cases()
        for (kind, name), call in calls.items():
            stub.forget()
            call()
            wanted = 2 if kind == "with gradient" else 1
            assert len(stub.launches) == wanted, f"{name} makes {len(stub.launches)} launches"
        print(f"gate passed: {len(calls)} results are one launch each, two with the gradient\n")
        print("| call | us | limit | met |\n|---|---|---|---|")
        for (kind, name), call in calls.items():
            for _ in range(SHAPES):
                call()
            codes = len(stub.loaded)
            time_of = microseconds(call, *((5, 1) if quick else (2000, 7)))
            assert len(stub.loaded) == codes, f"{name} compiled again"
            met = "yes" if time_of <= TIME_LIMITS[kind] else "no"
            print(
                f"| {kind}: {name} | {time_of:.1f} | {TIME_LIMITS[kind]:.0f} | {met} |", flush=True
            )


if __name__ == "__main__":
    main()
