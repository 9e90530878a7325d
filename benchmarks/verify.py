"""The gate: no time is printed unless what is timed gives the right numbers.

Every kernel, layout and dtype of the benchmark against the law evaluated in float64, and the peers
against the same law within the rounding of their own dtype policy.
"""

import sys
from collections.abc import Iterator

import numpy as np
import torch

from rotary import Rotary, apply, cos_sin
from rotary.kernels import numpy as law
from rotary.kernels.geometry import Options

from . import peers

# float32: three roundings of a product or sum below 2 |x|; the others: one rounding of the result
LIMITS = {torch.float32: 2.0**-22, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
PEER_FACTOR = 4  # peers round tables and products to the dtype of x as well


def main() -> None:
    """Check everything; exit with status 1 and the list of failures if the gate is red."""
    checked, failures = 0, []
    for name, error, limit in errors():
        checked += 1
        if not error <= limit:
            failures.append(f"{name}: {error:.2e} > {limit:.2e}")
    if failures:
        sys.exit("gate is red, no time is measured:\n" + "\n".join(failures))
    print(f"gate is green: {checked} checks against the law in float64")


def errors() -> Iterator[tuple[str, float, float]]:
    """(what, largest error relative to the pair's larger member, limit) of every check."""
    for layout in ("half", "interleaved"):
        spec = Rotary(head_dim=128, base=500_000.0, layout=layout)
        for dtype, limit in LIMITS.items():
            q = torch.randn(1, 4, 515, 128).to(dtype)
            k = torch.randn(1, 2, 515, 128).to(dtype)
            wanted = [_exact(spec, x) for x in (q, k)]
            view = q.transpose(1, 2).contiguous().transpose(1, 2)
            own = q.clone()
            results = {
                "apply": apply(spec, q, k),
                "out=": apply(spec, q, k, out=(torch.empty_like(q), torch.empty_like(k))),
                "in place": (apply(spec, own, out=own),),
                "transposed view": (apply(spec, view),),
            }
            for name, got in results.items():
                yield f"{name} {layout} {dtype}", _error(got, wanted), limit
            cases = (
                peers.transformers_cases(spec, q, k)
                if layout == "half"
                else peers.lucidrains_cases(spec, q, k)
            )
            for name, case in cases.items():
                # the error of a peer's float32 angles is its own: 515 positions of it
                allowed = PEER_FACTOR * limit + 5e-5
                yield f"{name} {layout} {dtype}", _error(case(), wanted), allowed
        x = np.random.default_rng(0).standard_normal((1, 4, 515, 128), np.float32)
        wanted = [_exact(spec, torch.from_numpy(x))]
        yield f"numpy {layout}", _error((apply(spec, x),), wanted), LIMITS[torch.float32]


def _exact(spec: Rotary, x: torch.Tensor) -> np.ndarray:
    tables = (table.astype(np.float64) for table in cos_sin(spec, np.arange(x.shape[-2])))
    wide = x.double().numpy()
    return law.rotate((wide,), *tables, None, Options(spec.layout), False, None)[0]


def _error(got: tuple[object, ...], wanted: list[np.ndarray]) -> float:
    worst = 0.0
    for result, exact in zip(got, wanted, strict=False):
        values = torch.as_tensor(result).double().numpy()
        worst = max(worst, float(np.abs(values - exact).max() / np.abs(exact).max()))
    return worst


if __name__ == "__main__":
    main()
