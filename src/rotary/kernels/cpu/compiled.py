"""Compile loops with Numba, and cache the machine code on disk in files with checksums.

Numba's own cache does not check its files: a flipped bit in one of them crashes the process, or
gives wrong results. Here every file has a checksum; a file with a wrong one is compiled again and
overwritten. If the cache cannot be read or written, or another release of Numba implements it
differently, every process compiles again. The checksum finds damage, not attacks: whoever can write
to the folder can run code.

The private names of Numba that are used here are listed in docs/private_names.md.
"""

# mypy: disable-error-code="misc"
# the classes of Numba have no types

import functools
import hashlib
import pickle
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FunctionType
from typing import Any

import numba

from ..private import private

with suppress(ImportError):  # Numba itself imports it only when it compiles a C function
    import numba.core.ccallback
_FunctionCache: type = private(numba, "core.caching.FunctionCache", object)
_CacheFiles: type = private(numba, "core.caching.IndexDataCacheFile", object)
_CFunc: Callable[..., Any] | None = private(numba, "core.ccallback.CFunc", None)
_runtime: Any = private(numba, "core.runtime.rtsys", None)
_load: Callable[..., object] | None = private(_FunctionCache, "_load_overload", None)
_OF_FILES = ("_version", "_source_stamp", "_index_path", "_data_path", "_dump", "_open_for_write")
_DIGEST = hashlib.sha256().digest_size  # bytes


def compiled(**options: bool) -> Callable[[FunctionType], Callable[..., Any]]:
    """Decorate a loop: Numba compiles it at its first call, and it runs without the GIL."""

    def decorate(function: FunctionType) -> Callable[..., Any]:
        result = numba.njit(nogil=True, error_model="numpy", **options)(function)
        if not numba.config.DISABLE_JIT:
            _keep(result, function)
        return result

    return decorate


def inlined(function: FunctionType) -> Callable[..., Any]:
    """Decorate a function for loops: Numba compiles it anew in each loop that calls it.

    As a function of its own, it would be compiled once more, optimized in each of its callers, and
    cached on disk; nested ones at every level.
    """
    result: Callable[..., Any] = numba.njit(inline="always", error_model="numpy")(function)
    return result


def c_function(function: FunctionType, signature: Any) -> int:
    """Compile the loop to a C function now; return its address, valid as long as the process.

    The signature is one of Numba, such as `types.int64(types.int64)`.
    """
    if _CFunc is None:
        result: Any = numba.cfunc(signature)(function)
    else:
        result = _CFunc(function, (signature.args, signature.return_type), locals={}, options={})
        _keep(result, function)
        result.compile()
    _alive.append(result)
    return int(result.address)


_alive: list[object] = []  # the code of a C function is freed with the object


def _keep(result: Any, function: FunctionType) -> None:
    """Make Numba cache the machine code on disk, if it can and there is a folder for it."""
    with suppress(RuntimeError, OSError, AttributeError, TypeError):
        result._cache = _Cache(function)


class _Cache(_FunctionCache):
    """Numba's cache of one function; a result that cannot be written is ignored."""

    def __init__(self, function: FunctionType) -> None:
        super().__init__(function)
        locator = self._impl.locator
        stamp = locator.get_source_stamp(), _digest_of_folder(Path(function.__code__.co_filename))
        self._cache_file = _Files(locator.get_cache_path(), self._impl.filename_base, stamp)

    def load_overload(self, signature: object, context: object) -> object:
        """The code on disk, or None.

        Numba's method first sets up the whole compiler, which takes longer than all else in the
        first call of a process. Code on disk needs only the functions of Numba's runtime.
        """
        if _runtime is None or _load is None:
            return super().load_overload(signature, context)
        _runtime.initialize(context)
        return _load(self, signature, context)

    def save_overload(self, signature: object, data: object) -> None:
        with suppress(OSError):
            super().save_overload(signature, data)


class _Files(_CacheFiles):
    """Numba's cache files, each beginning with the SHA-256 of the rest.

    A file with another checksum counts as missing, and so does one of another release of Numba or
    of other sources. The index has the name of the data file of each key. A data file contains its
    key as well, since the index may name an older file: if the disk is full, or if two processes
    write at once.
    """

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        for name in _OF_FILES:
            getattr(self, name)  # AttributeError if this release of Numba does not have it
        self._stamps = [self._version, self._source_stamp]

    def save(self, key: object, data: object) -> None:
        """Write the code of `key`, a signature and a processor."""
        super().save(key, (key, data))

    def load(self, key: object) -> object:
        """Return the code of `key`; None if there is none, or the file has that of another key."""
        saved_key, data = super().load(key) or (None, None)
        return data if saved_key == key else None

    def _load_index(self) -> dict[object, str]:
        return self._load_data(Path(self._index_path).name) or {}

    def _save_index(self, overloads: dict[object, str]) -> None:
        self._save_data(Path(self._index_path).name, overloads)

    def _load_data(self, name: str) -> Any:
        content = _checked(Path(self._data_path(name)))
        if content is None:
            return None
        *stamps, data = pickle.loads(content)  # another Numba may not know the types in the data
        return pickle.loads(data) if stamps == self._stamps else None

    def _save_data(self, name: str, data: object) -> None:
        content = self._dump([*self._stamps, self._dump(data)])
        with self._open_for_write(self._data_path(name)) as file:
            file.write(hashlib.sha256(content).digest() + content)


def _checked(path: Path) -> bytes | None:
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, content = content[:_DIGEST], content[_DIGEST:]
    return content if hashlib.sha256(content).digest() == digest else None


@functools.cache
def _digest_of_folder(path: Path) -> str:
    """Return the SHA-256 of all sources of the folder.

    A loop calls code of other files, and Numba does not notice when those change.
    """
    digest = hashlib.sha256()
    for source in sorted(path.parent.glob("*.py")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()
