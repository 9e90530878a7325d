"""Finds the base that a context needs, by a certified search, and tests which bases pass.

Men et al. (arXiv 2405.14591, Eq. 11) ask for B_m(b) = sum_i cos(m b^(-2i/d)) >= 0 at every distance
m of the context. `loops.py` excludes bases interval by interval. Here the range of ln b is split
into chunks, for threads or an executor like those of concurrent.futures. Their results are used in
order, so the answer does not depend on the number of workers, if all processors are of one kind.
"""

import math
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import closing, nullcontext
from decimal import ROUND_CEILING, Context, Decimal
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..fanout import check_executor
from ..spec import Rotary
from .bounds import first_failure, similarity
from .spectrum import MAX_LENGTH, Array, still_pairs, whole_number

Progress = Callable[[float], None] | None

MAX_CONTEXT = 2**22
MAX_HEAD_DIM = 2**14
MAX_LOG_BASE = math.log(1e37)  # a larger base has frequencies that 64-bit turns cannot hold
_CHUNK = 1 / 32  # the range of ln b that one job searches
_AHEAD = 64  # jobs that wait in an executor at a time


def _silent(share: float) -> None:
    """Ignore the progress: the default of `progress`."""


class MinBase(NamedTuple):
    """The smallest base that passes; see `min_base`."""

    base: float
    binding: int | None
    next_failing: int | None
    undecided: int


class SafeBase(NamedTuple):
    """A base above every failing one of a grid; see `safe_base`."""

    base: float
    largest_failing: float
    passing_share: float
    searched_to: float
    step: float


def min_base(
    context: int,
    head_dim: int = 128,
    *,
    rotary_dim: int | None = None,
    progress: Progress = None,
    executor: Executor | None = None,
) -> MinBase:
    """Find the smallest base with B_m >= 0 at every distance 1 .. context, certified.

    base          inf {b > 1 : B_m(b) >= 0 for m = 1 .. context}, from above, to 1e-9
    binding       the distance that fails just below `base`; None if no base fails
    next_failing  the first distance > context that fails at `base`; None if none up to 2**24
    undecided     how many intervals below `base`, of relative width 5e-10, are not proved to fail
    Some larger bases fail: see `comb` and `safe_base`. If at most half of the head is rotated, no
    base fails and the result is 1. context <= 2**22, head_dim even and <= 2**14; `progress` is
    called with a share that grows from 0 to 1. `executor` runs the search (with Dask,
    `client.get_executor(pure=False)`); by default as many threads as Numba uses. The result does
    not depend on it. Raises ValueError for another size, and if no base up to 1e37 passes;
    ImportError without Numba.
    Source: Men et al., arXiv 2405.14591, Eq. 11 and Table 2, with the whole head rotated.

    >>> least = min_base(1024)
    >>> round(least.base, 4), least.binding, least.next_failing
    (4293.4376, 1009, 1077)
    """
    context = whole_number("context", context, 1, MAX_CONTEXT)
    k, still = _geometry(head_dim, rotary_dim)
    if still >= len(k):
        return MinBase(1.0, None, None, 0)
    x, binding, undecided = _first_passing(context, k, still, progress or _silent, executor)
    if binding:
        x, binding, hidden = _refined(x, binding, k, still, context)
        undecided += hidden
    later = first_failure(_spec(x, k), MAX_LENGTH, still=still)
    return MinBase(math.exp(x), binding or None, later, undecided)


def safe_base(
    context: int,
    head_dim: int = 128,
    *,
    rotary_dim: int | None = None,
    start: float | None = None,
    progress: Progress = None,
    executor: Executor | None = None,
) -> SafeBase:
    """Find a base above all failing bases of a grid, from the smallest passing base b* to >= 12 b*.

    base             the first base of the grid above `largest_failing`
    largest_failing  the largest base of the grid with B_m < 0 in 1 .. context; b* if there is none
    passing_share    the share of the grid that passes; the grid is even in ln b
    searched_to      the end of the grid: 12 b*, extended while its last tenth has a failing base
    step             of the grid, in ln b: 1e-5 up to 8192 tokens, 2e-4 at 131,072
    Not certified: a base between two points of the grid, or above it, may fail. `start` is b*, if
    known. `executor`, limits and errors are those of `min_base`.

    >>> safe = safe_base(1024)
    >>> round(safe.largest_failing), round(safe.passing_share, 2)
    (6018, 0.87)
    """
    context = whole_number("context", context, 1, MAX_CONTEXT)
    k, still = _geometry(head_dim, rotary_dim)
    report, done = progress or _silent, 0.0
    if start is None:
        start = min_base(
            context,
            head_dim,
            rotary_dim=rotary_dim,
            progress=lambda share: report(share / 2),
            executor=executor,
        ).base
        done = 0.5
    low = float(_logs([start])[0])
    step = 1e-5 * max(1.0, context / 8192) ** (math.log(20) / math.log(16))
    count = int(math.log(12) / step) + 1
    passes = _comb(
        context, low + step * np.arange(count), k, still, executor,
        lambda share: report(done + (1 - done) * share),
    )  # fmt: skip
    while not passes[-(count // 10) :].all():
        more = low + step * (len(passes) + np.arange(count // 10))
        if more[-1] > MAX_LOG_BASE:
            raise ValueError(f"no base is safe for {context:,} tokens: bases up to 1e37 fail")
        passes = np.append(passes, _comb(context, more, k, still, executor))
    failing = np.flatnonzero(~passes)
    last, above = (failing[-1], failing[-1] + 1) if len(failing) else (0, 0)
    return SafeBase(
        base=math.exp(low + step * above),
        largest_failing=math.exp(low + step * last),
        passing_share=float(passes.mean()),
        searched_to=math.exp(low + step * (len(passes) - 1)),
        step=step,
    )


def comb(
    context: int,
    bases: npt.ArrayLike,
    head_dim: int = 128,
    *,
    rotary_dim: int | None = None,
    executor: Executor | None = None,
) -> npt.NDArray[np.bool_]:
    """Whether each base passes: B_m >= 0 at every m in 1 .. context; bool, of the shape of `bases`.

    `executor`, limits and errors are those of `min_base`; ValueError also for a base that is not in
    1 .. 1e37.

    >>> comb(1024, [4293.0, 4294.0, 6018.0, 6100.0])
    array([False,  True, False,  True])
    """
    context = whole_number("context", context, 1, MAX_CONTEXT)
    k, still = _geometry(head_dim, rotary_dim)
    logs = _logs(bases)
    rising, places = np.unique(logs, return_inverse=True)
    return _comb(context, rising, k, still, executor)[places].reshape(logs.shape)


def rounded_up(
    base: float,
    context: int,
    head_dim: int = 128,
    *,
    rotary_dim: int | None = None,
    digits: int = 6,
) -> Decimal:
    """Round a passing base up to a decimal number for printing that passes too.

    It is the first decimal number at or above `base` of `digits` significant digits, or of as many
    more as it takes until `Rotary(base=...)` has B_m >= 0 at every m in 1 .. context. A base
    rounded to the nearest may be below the smallest that passes. One rounded up may fail too,
    because the bases that pass are not an interval. Raises ValueError if `base` itself fails; sizes
    as in `min_base`.

    >>> base = min_base(4096).base  # 26,952.33923
    >>> f"{rounded_up(base, 4096):,f}", f"{rounded_up(base, 4096, digits=2):,f}"  # 27,000 fails
    ('26,952.4', '26,960')
    """
    context = whole_number("context", context, 1, MAX_CONTEXT)
    digits = whole_number("digits", digits, 1, 17)
    _geometry(head_dim, rotary_dim)
    _logs([base])
    for count in range(digits, 18):  # 17 digits identify every float64
        shown = Context(prec=count, rounding=ROUND_CEILING).create_decimal(Decimal(base))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of base 1, where no distance fails
            spec = Rotary(head_dim=head_dim, rotary_dim=rotary_dim, base=float(shown))  # type: ignore[arg-type]
        if first_failure(spec, context) is None:
            return shown
    raise ValueError(
        f"base {base!r} has B_m < 0 at a distance up to {context:,}, with head_dim {head_dim}"
    )


def _geometry(head_dim: int, rotary_dim: int | None) -> tuple[Array, float]:
    """Return 2i/d of every pair, and half the number of channels that are not rotated."""
    head_dim = whole_number("head_dim", head_dim, 2, MAX_HEAD_DIM)
    if head_dim % 2:
        raise ValueError(f"head_dim must be even, got {head_dim}")
    spec = Rotary(head_dim=head_dim, rotary_dim=rotary_dim)  # type: ignore[arg-type]
    pairs = spec.rotary_dim // 2
    return np.arange(pairs) / pairs, still_pairs(spec)


def _spec(x: float, k: Array) -> Rotary:
    """The RoPE of the base e^x, also where that is 1 or too large for a schedule."""
    params = {"inv_freq": np.exp(-k * x)}
    return Rotary(head_dim=2 * len(k), schedule="custom", params=params)


def _logs(bases: npt.ArrayLike) -> Array:
    values = np.asarray(bases)
    if values.dtype.kind not in "iuf":
        raise ValueError(f"bases must be numbers, got {values.dtype}")
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(values.astype(np.float64))
    wrong = ~((logs >= 0) & (logs <= MAX_LOG_BASE))
    if wrong.any():
        raise ValueError(f"a base must be in 1 .. 1e37, got {values[wrong].flat[0]}")
    return logs


def _first_passing(
    context: int,
    k: Array,
    still: float,
    progress: Callable[[float], None],
    executor: Executor | None,
) -> tuple[float, int, int]:
    """(ln b, binding distance, undecided) of the first base that passes."""
    undecided, share, before = 0, 0.0, 0
    edges = _CHUNK * np.arange(int(MAX_LOG_BASE / _CHUNK) + 1)
    chunks = ((*edge, k, still, context) for edge in pairwise(edges.tolist()))
    progress(0.0)
    with closing(_in_order("search", chunks, executor)) as results:
        for n, (x, binding, gaps, largest) in enumerate(results):
            undecided += gaps
            if x < edges[n + 1]:
                progress(1.0)
                return x, binding or before, undecided
            before = binding
            # the work of a chunk is proportional to the square of the distances that fail in it
            share = max(share, min(0.99, (largest / context) ** 2))
            progress(share)
    raise ValueError(f"no base passes at every distance up to {context:,}: bases up to 1e37 fail")


def _refined(
    x: float, binding: int, k: Array, still: float, context: int
) -> tuple[float, int, int]:
    """(ln of the base where B_m turns positive at the binding distance m, that m, undecided).

    If rounding hid a sign from the search, another distance binds above x; each is undecided.
    """
    from .loops import GAP

    def value(at: float) -> float:
        return float(similarity(_spec(at, k), [binding], still=still)[0])

    for hidden in range(64):
        low, width = x - 2 * GAP, GAP
        while value(x + width) < 0 and width < 1:
            width *= 2
        high = x + width
        while high - low > 1e-13 * max(1.0, x):
            middle = (low + high) / 2
            low, high = (low, middle) if value(middle) >= 0 else (middle, high)
        for margin in (1e-12, 1e-11, 1e-10):  # in ln b, tried until no distance fails
            x = high + margin
            failing = first_failure(_spec(x, k), context, still=still)
            if failing is None:
                return x, binding, hidden + (width > GAP)
        binding = failing or binding
    raise ValueError(f"float64 does not tell which base passes at {context:,} distances")


def _comb(
    context: int,
    logs: Array,
    k: Array,
    still: float,
    executor: Executor | None,
    progress: Callable[[float], None] = _silent,
) -> npt.NDArray[np.bool_]:
    if still >= len(k):
        return np.ones(len(logs), np.bool_)
    edges = np.linspace(0, len(logs), min(len(logs), 64) + 1).astype(int)
    parts = [(logs[slice(*edge)], k, still, context) for edge in pairwise(edges)]
    passes = [np.zeros(0, np.bool_)]
    with closing(_in_order("passing", parts, executor)) as results:
        for each in results:
            passes.append(each)
            progress((len(passes) - 1) / len(parts))
    return np.concatenate(passes)


def _loop(name: str, *arguments: object) -> Any:
    """Run a function of `loops.py`. The import is here so that only a search loads Numba."""
    from . import loops

    return getattr(loops, name)(*arguments)


def _in_order(
    name: str, jobs: Iterable[tuple[object, ...]], executor: Executor | None
) -> Generator[Any]:
    """Yield the results of function `name` of `loops.py` for `(*job, stop)`, in the jobs' order.

    Closing the generator cancels the jobs that wait. Jobs that run in this process see `stop` and
    end early; those in other processes run to their end.
    """
    try:
        import numba
    except ImportError as error:
        raise ImportError(f"a search of bases needs Numba ({error}): pip install numba") from error
    check_executor(executor)
    stop = np.zeros(1, np.int64)
    threads = numba.get_num_threads()
    ahead = threads if executor is None else _AHEAD
    with ThreadPoolExecutor(threads) if executor is None else nullcontext(executor) as pool:
        waiting: deque[Future[Any]] = deque()
        try:
            for job in jobs:
                waiting.append(pool.submit(_loop, name, *job, stop))
                if len(waiting) > ahead:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            stop[0] = 1
            for each in waiting:
                each.cancel()
