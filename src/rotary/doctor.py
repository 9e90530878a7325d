"""Examines this machine for `rotary doctor`: what is installed, and what makes rotation slow."""

import importlib.util
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import numpy as np

from .angles import cos_sin
from .kernels import numpy as reference
from .kernels.geometry import Options
from .spec import Rotary


class Finding(NamedTuple):
    """One line of the report; `advice` is empty if there is nothing to improve."""

    what: str
    found: str
    advice: str = ""


def examine() -> list[Finding]:
    """Look at the libraries, the compiled kernel, its threads and its cache.

    >>> [finding.what for finding in examine()][:2]
    ['rotary', 'python']
    """
    beside = [
        Finding(name, version(name) if importlib.util.find_spec(name) else "not installed")
        for name in ("torch", "transformers", "jax", "mlx")
    ]
    return [
        Finding("rotary", version("rotary")),
        Finding("python", f"{sys.version.split()[0]} on {platform.machine()}"),
        Finding("numpy", np.__version__),
        *_kernel(),
        _huge_pages(),
        *beside,
    ]


def _kernel() -> list[Finding]:
    try:
        import numba

        from .kernels.cpu import kernel as cpu
        from .kernels.cpu import loops, threads
    except ImportError as error:
        advice = (
            "plain NumPy code rotates, which is right but slow: pip install 'numba>=0.60', unset "
            "NUMBA_DISABLE_JIT, and use a Python with a global lock"
        )
        return [Finding("kernel", f"no compiled loops: {error}", advice)]
    q = np.random.default_rng(0).standard_normal((1, 16, 512, 128), np.float32)
    tables = cos_sin(Rotary(head_dim=128), np.arange(512))
    results = [
        module.rotate((q,), *tables, None, Options(), None)[0] for module in (cpu, reference)
    ]
    kernel = Finding("kernel", "compiled loops, equal to the reference implementation")
    if not np.array_equal(*results):
        advice = "report this: the compiled loops give wrong numbers here"
        kernel = Finding("kernel", "differs from the reference implementation", advice)
    pool, advice = threads.pool(), ""
    if pool == "workqueue":
        advice = "only one call at a time can use all threads; install libgomp (Debian: libgomp1)"
    return [
        Finding("numba", numba.__version__),
        kernel,
        Finding("threads", f"{threads.count()}, {pool}", advice),
        _cache(loops.on_numba_threads),
    ]


def _cache(compiled: object) -> Finding:
    stats = getattr(compiled, "stats", None)
    path = getattr(stats, "cache_path", None)
    if path and Path(path).is_dir():
        return Finding("compiled cache", str(path))
    advice = (
        "every process compiles the loops again, which takes 2 to 3 seconds; set NUMBA_CACHE_DIR "
        "to a folder that you can write to"
    )
    return Finding("compiled cache", "none can be written", advice)


def _huge_pages() -> Finding:
    try:
        setting = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return Finding("huge pages", "unknown on this system")
    mode = setting[setting.find("[") + 1 : setting.find("]")]
    advice = "new large outputs take several times as long as a copy; use out="
    return Finding("huge pages", mode, advice if mode == "never" else "")
