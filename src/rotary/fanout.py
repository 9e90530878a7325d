"""Runs jobs on an executor, small ones in batches, and reports results as they finish."""

import dataclasses
import queue
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from typing import Generic, TypeVar

J = TypeVar("J")
R = TypeVar("R")
BATCH_BYTES = 2**26  # of work, worth a message to another machine, which costs 3 ms of processor
MIN_BATCHES = 64  # if there are as many jobs


@dataclasses.dataclass(frozen=True)
class Batch(Generic[J, R]):
    """Jobs that are submitted together. Not a tuple, which Dask would search for futures."""

    function: Callable[[J], R]
    jobs: tuple[J, ...]


def run_batch(batch: Batch[J, R]) -> list[R]:
    """Return the results of a batch: the function that is submitted to an executor.

    >>> run_batch(Batch(abs, (-1, 2)))
    [1, 2]
    """
    return [batch.function(job) for job in batch.jobs]


def in_batches(jobs: Sequence[J], size_of: Callable[[J], int]) -> Iterator[tuple[J, ...]]:
    """Yield jobs in order, in batches of at most BATCH_BYTES and 1 / MIN_BATCHES of all bytes.

    A larger job is a batch of its own.

    >>> [len(jobs) for jobs in in_batches([2**20] * 1000 + [2**32], lambda size: size)][-3:]
    [64, 40, 1]
    >>> list(in_batches([3, 1], lambda size: size))
    [(3,), (1,)]
    """
    most = min(BATCH_BYTES, sum(map(size_of, jobs)) // MIN_BATCHES)
    batch: list[J] = []
    size = 0
    for job in jobs:
        size += size_of(job)
        if batch and size > most:
            yield tuple(batch)
            batch, size = [], size_of(job)
        batch.append(job)
    if batch:
        yield tuple(batch)


def check_executor(executor: object) -> None:
    """Raise TypeError if `executor` cannot be given a job; None stands for threads.

    >>> check_executor(5)
    Traceback (most recent call last):
    TypeError: executor=5 has no method submit; pass one like ThreadPoolExecutor(4)
    """
    is_class = isinstance(executor, type)
    if executor is not None and (is_class or not callable(getattr(executor, "submit", None))):
        what = "is a class" if is_class else "has no method submit"
        raise TypeError(f"executor={executor!r} {what}; pass one like ThreadPoolExecutor(4)")


def fan_out(
    function: Callable[[J], R],
    jobs: Sequence[J],
    executor: Executor,
    finished: Callable[[list[tuple[J, R]]], None],
    *,
    size_of: Callable[[J], int] = lambda job: BATCH_BYTES,
    stop: Callable[[], None] = lambda: None,
) -> None:
    """Call `function` on every job in the executor, and `finished` here after each batch.

    finished  called with (job, result) of every job of the batch
    size_of   bytes of work in a job, by which `in_batches` groups small jobs
    stop      called if a job fails, before the others are cancelled
    After a failure, jobs that have not begun are cancelled, and running ones are waited for. Their
    results are passed to `finished` as well; then the error is raised.
    """
    # drop results once they are reported: Dask recomputes a held result if its worker dies
    left: dict[Future[list[R]], Batch[J, R]] = {}
    done: queue.SimpleQueue[Future[list[R]]] = queue.SimpleQueue()
    try:
        for group in in_batches(jobs, size_of):
            batch = Batch(function, group)
            future = executor.submit(run_batch, batch)
            left[future] = batch
            future.add_done_callback(done.put)
        while left:
            future = done.get()
            results = future.result()
            finished(list(zip(left.pop(future).jobs, results, strict=True)))
    except BaseException:
        stop()
        rest = [future for future in left if not future.cancel()]
        for future in [each for each in rest if each.exception() is None]:
            finished(list(zip(left[future].jobs, future.result(), strict=True)))
        raise
