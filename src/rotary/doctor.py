"""What this machine offers and what is in the way: the report of `rotary doctor`."""

import importlib
import importlib.metadata
import importlib.util
import platform
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

from .angles import cos_sin
from .kernels import numpy as law
from .kernels.geometry import Options
from .spec import Rotary


class Finding(NamedTuple):
    """One line of the report; `advice` is empty where nothing is in the way."""

    what: str
    found: str
    advice: str = ""


def examine() -> list[Finding]:
    """Look at the libraries, the compiled kernel, its threads and its cache.

    >>> [finding.what for finding in examine()][:2]
    ['rotary', 'python']
    """
    findings = [
        Finding("rotary", importlib.metadata.version("rotary")),
        Finding("python", f"{sys.version.split()[0]} on {platform.machine()}"),
        Finding("numpy", np.__version__),
        *_kernel(),
        _huge_pages(),
    ]
    for name in ("torch", "transformers", "jax"):
        findings.append(_library(name))
    return findings


def _kernel() -> list[Finding]:
    try:
        import numba

        from .kernels import cpu, loops, threads
    except ImportError as error:
        advice = (
            "rotations run on the plain formula, right but slow: pip install 'numba>=0.60', "
            "without NUMBA_DISABLE_JIT"
        )
        return [Finding("kernel", f"no compiled loops: {error}", advice)]
    q = np.random.default_rng(0).standard_normal((1, 16, 512, 128), np.float32)
    tables = cos_sin(Rotary(head_dim=128), np.arange(512))
    results = [
        module.rotate((q,), *tables, None, Options(), False, None)[0] for module in (cpu, law)
    ]
    is_equal = np.array_equal(*results)
    return [
        Finding("numba", numba.__version__),
        Finding(
            "kernel",
            "compiled loops, equal to the reference implementation"
            if is_equal
            else "differs from the reference implementation",
            "" if is_equal else "report this: the compiled loops give wrong numbers here",
        ),
        _threads(threads.count(), threads.pool()),
        _cache(loops.on_numba_threads),
    ]


def _threads(count: int, pool: str) -> Finding:
    advice = (
        "parallel calls run one at a time; install libgomp (Debian: libgomp1)"
        if pool == "workqueue"
        else ""
    )
    return Finding("threads", f"{count}, {pool}", advice)


def _cache(compiled: object) -> Finding:
    stats = getattr(compiled, "stats", None)
    path = getattr(stats, "cache_path", None)
    if path and Path(path).is_dir():
        return Finding("compiled cache", str(path))
    advice = (
        "every process compiles again, 2 seconds; set NUMBA_CACHE_DIR to a folder you can write"
    )
    return Finding("compiled cache", "none can be written", advice)


def _huge_pages() -> Finding:
    try:
        setting = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return Finding("huge pages", "unknown on this system")
    mode = setting[setting.find("[") + 1 : setting.find("]")]
    advice = "new large outputs cost several copies; use out=" if mode == "never" else ""
    return Finding("huge pages", mode, advice)


def _library(name: str) -> Finding:
    if importlib.util.find_spec(name) is None:
        return Finding(name, "not installed")
    return Finding(name, importlib.metadata.version(name))
