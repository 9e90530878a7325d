"""An executor of a Dask cluster whose workers have the versions and files of this machine."""

import contextlib
import gc
import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import CancelledError, Executor
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from ..checkpoint.files import State

CONNECT = 10  # seconds to wait for a scheduler, and for its first worker
PACKAGES = ("python", "distributed", "numba", "numpy", "rotary")
Dask = Annotated[
    str | None,
    typer.Option(
        "--dask",
        metavar="ADDRESS",
        help="Run on the workers of the Dask cluster at tcp://HOST:PORT.",
    ),
]


@contextlib.contextmanager
def cluster(
    address: str | None,
    *,
    packages: tuple[str, ...] = (),
    modules: tuple[str, ...] = (),
    files: "Mapping[Path, State] | None" = None,
    folder: Path | None = None,
) -> Iterator[Executor | None]:
    """Yield the executor of the Dask cluster at an address; None without an address.

    packages  packages, besides PACKAGES, whose versions must be the same here and on the workers
    modules   modules that workers must be able to import
    files     files that workers must see as they are on this machine
    folder    a folder that workers must be able to write to; if it does not exist yet, its parent
    Raises ValueError for an invalid address, for workers with other versions or files, and if Dask
    is not installed; OSError if no scheduler answers, or no worker is there or left.

    >>> with cluster(None) as executor:
    ...     print(executor)
    None
    """
    if address is None:
        yield None
        return
    with _connected(address) as client:
        _check_versions(client, (*PACKAGES, *packages))
        seen = {os.path.abspath(path): tuple(state) for path, state in (files or {}).items()}
        above = () if folder is None else (folder.absolute(), *folder.absolute().parents)
        place = next(((str(each), each.stat().st_ino) for each in above if each.exists()), None)
        for worker, problem in client.run(problem_of, modules, seen, place).items():
            if problem:
                raise ValueError(f"worker {worker}: {problem}")
        yield client.get_executor(pure=False)


@contextlib.contextmanager
def _connected(address: str) -> Iterator[Any]:
    """Yield a client of a cluster with a worker; errors and logs of Dask become one line."""
    try:
        from distributed import Client, TimeoutError
        from distributed.scheduler import KilledWorker
        from distributed.versions import VersionMismatchWarning
    except ModuleNotFoundError as error:
        raise ValueError(f"--dask needs {error.name}: pip install 'dask[distributed]'") from error
    with contextlib.ExitStack() as stack:
        logger = logging.getLogger("distributed.client")  # logs what is raised here in one line
        stack.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.CRITICAL + 1)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", VersionMismatchWarning)  # see _check_versions
                opened: Any = Client(  # type: ignore[no-untyped-call]
                    address, timeout=CONNECT, set_as_default=False
                )
            client = stack.enter_context(opened)
        except OSError as error:
            raise OSError(
                f"{address}: no Dask scheduler answers within {CONNECT} s; is it running?"
            ) from error
        except (TypeError, ValueError) as error:
            # Dask leaves the client open: closed only when Python ends, it waits for 20 s there
            # and prints a traceback
            error.__traceback__ = None
            gc.collect()
            raise ValueError(f"{address}: not a Dask address such as tcp://host:8786") from error
        try:
            client.wait_for_workers(1, timeout=CONNECT)
        except TimeoutError as error:
            raise OSError(f"{address}: no worker; start one: dask worker {address}") from error
        try:
            yield client
        except KilledWorker as error:
            raise OSError(
                f"{address}: one job has killed {error.allowed_failures + 1} workers; do they have "
                "enough memory? Repeat the call to continue"
            ) from error
        except CancelledError as error:
            raise OSError(
                f"{address}: the connection is lost; repeat the call to continue"
            ) from error


def _check_versions(client: Any, packages: tuple[str, ...]) -> None:
    """Raise ValueError if a worker has other versions than this process."""
    versions = client.get_versions(packages=list(packages[1:]))
    ours = versions["client"]["packages"]
    for worker, installed in versions["workers"].items():
        for name in packages:
            theirs = installed["packages"].get(name)
            if theirs != ours[name]:
                raise ValueError(
                    f"worker {worker} has {name} {theirs or 'not installed'}, this machine has "
                    f"{ours[name]}; install the same"
                )


def problem_of(
    modules: tuple[str, ...], files: Mapping[str, tuple[int, ...]], folder: tuple[str, int] | None
) -> str:
    """Return why this process cannot be a worker of a job; "" if it can.

    folder  path and inode of a folder to write in

    >>> problem_of(("math",), {}, None)
    ''
    >>> problem_of((), {"no such file": (1, 2, 3)}, None)
    'no such file: not the file of the calling machine; workers must see the same files'
    """
    from ..checkpoint.files import state_of

    for module in modules:
        try:
            spec = find_spec(module)
        except ModuleNotFoundError:  # its package is missing
            spec = None
        if spec is None:
            return f"has no module {module!r}; start it with PYTHONPATH set to the module's folder"
    for path, state in files.items():
        if not os.path.isfile(path) or tuple(state_of(Path(path))) != tuple(state):
            return f"{path}: not the file of the calling machine; workers must see the same files"
    if folder is not None:
        path, inode = folder
        if not os.path.isdir(path) or os.stat(path).st_ino != inode:
            return f"{path}: not the folder of the calling machine; workers must see the same files"
        if not os.access(path, os.W_OK | os.X_OK):
            return f"{path}: this folder cannot be written to"
    return ""
