"""Jobs dealt out to an executor: small ones together, results as they come, none left behind."""

import dataclasses
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Any, Generic, TypeVar

J = TypeVar("J")
R = TypeVar("R")
BATCH = 2**26  # bytes of work that are worth a message to another machine
FEWEST = 64  # batches to be dealt out, where there are as many jobs


@dataclasses.dataclass(frozen=True)
class Batch(Generic[J]):
    """Jobs that go together; no tuple, for Dask would search all of it for futures of its own."""

    jobs: tuple[J, ...]


def batches(jobs: Sequence[J], size_of: Callable[[J], int]) -> list[Batch[J]]:
    """Jobs in order; small ones together, until they make BATCH bytes or a FEWEST-th of all.

    >>> made = batches([2**20] * 1000 + [2**32], lambda size: size)
    >>> [len(batch.jobs) for batch in made][-3:]
    [64, 40, 1]
    >>> batches([3, 1], lambda size: size)
    [Batch(jobs=(3,)), Batch(jobs=(1,))]
    """
    most = min(BATCH, sum(map(size_of, jobs)) // FEWEST)
    found: list[list[J]] = []
    held = 0
    for job in jobs:
        held += size_of(job)
        if not found or held > most:
            found.append([])
            held = size_of(job)
        found[-1].append(job)
    return [Batch(tuple(batch)) for batch in found]


def fan_out(
    function: Callable[[J], R],
    jobs: Sequence[J],
    executor: Executor,
    finished: Callable[[list[tuple[J, R]]], None],
    stop: Callable[[], None] = lambda: None,
) -> None:
    """Call `function` on every job, and `finished` here, with all that is done by then.

    A failure cancels what has not begun, calls `stop`, waits for what runs, and is raised when
    `finished` has been told of that as well.
    """
    # results are dropped when they are told: Dask computes what is held again if its worker dies
    left: dict[Future[R], J] = {}
    done: queue.SimpleQueue[Future[R]] = queue.SimpleQueue()

    def deal(job: J) -> None:
        future = executor.submit(function, job)
        left[future] = job
        future.add_done_callback(done.put)

    try:
        for job in jobs:
            deal(job)
        while left:
            _tell(_ready(done), left, finished)
    except BaseException:
        stop()
        rest = [future for future in left if not future.cancel()]
        whole = [(left[each], each.result()) for each in rest if each.exception() is None]
        if whole:
            finished(whole)
        raise


def _ready(done: Any) -> list[Any]:
    """What is done; waits until anything is."""
    found = [done.get()]
    while not done.empty():
        found.append(done.get())
    return found


def _tell(ready: list[Future[R]], left: dict[Future[R], J], finished: Any) -> None:
    """Tell of the results that are there, also where one of them is an error."""
    results = []
    try:
        for future in ready:
            result = future.result()
            results.append((left.pop(future), result))
    finally:
        if results:
            finished(results)
