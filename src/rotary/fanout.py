"""Runs jobs on an executor: small jobs in batches, results as they finish, all of them."""

import dataclasses
import queue
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from typing import Generic, TypeVar

J = TypeVar("J")
R = TypeVar("R")
BATCH = 2**26  # bytes of work that are worth a message to another machine, 3 ms of processor
FEWEST = 64  # messages, where there are as many jobs


@dataclasses.dataclass(frozen=True)
class Batch(Generic[J, R]):
    """Jobs that go together; no tuple, for Dask would search all of it for futures of its own."""

    function: Callable[[J], R]
    jobs: tuple[J, ...]


def run_batch(batch: Batch[J, R]) -> list[R]:
    """The results of a batch: what an executor is asked for.

    >>> run_batch(Batch(abs, (-1, 2)))
    [1, 2]
    """
    return [batch.function(job) for job in batch.jobs]


def together(jobs: Sequence[J], size_of: Callable[[J], int]) -> Iterator[tuple[J, ...]]:
    """Jobs in order; small ones together, until they make BATCH bytes or a FEWEST-th of all.

    >>> [len(jobs) for jobs in together([2**20] * 1000 + [2**32], lambda size: size)][-3:]
    [64, 40, 1]
    >>> list(together([3, 1], lambda size: size))
    [(3,), (1,)]
    """
    most = min(BATCH, sum(map(size_of, jobs)) // FEWEST)
    some: list[J] = []
    size = 0
    for job in jobs:
        size += size_of(job)
        if some and size > most:
            yield tuple(some)
            some, size = [], size_of(job)
        some.append(job)
    if some:
        yield tuple(some)


def fan_out(
    function: Callable[[J], R],
    jobs: Sequence[J],
    executor: Executor,
    finished: Callable[[list[tuple[J, R]]], None],
    *,
    size_of: Callable[[J], int] = lambda job: BATCH,
    stop: Callable[[], None] = lambda: None,
) -> None:
    """Call `function` on every job, and `finished` here with those of each batch that is done.

    size_of  bytes of work in a job; small ones go together, as `together` says
    A failure cancels what has not begun, calls `stop`, waits for what runs, and is raised when
    `finished` has been told of that as well.
    """
    # results are dropped when they are told: Dask computes what is held again if its worker dies
    left: dict[Future[list[R]], Batch[J, R]] = {}
    done: queue.SimpleQueue[Future[list[R]]] = queue.SimpleQueue()
    try:
        for some in together(jobs, size_of):
            batch = Batch(function, some)
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
