"""Libraries that a test may have to do without: what asks for one that is absent is skipped."""

import importlib

import pytest


def enable_x64(is_wide):
    """A block in which JAX has types of 64 bits, or has none."""
    jax = pytest.importorskip("jax")

    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(is_wide)
    from jax import experimental  # jax 0.4.34 has it there

    return experimental.enable_x64(is_wide)


def of_transformers(name):
    """A module of transformers whose functions older releases lack; skips the test under those."""
    pytest.importorskip("transformers", minversion="5.23")
    return importlib.import_module(name)


class Absent:
    """Stands for a library that is not installed, or for what is in it.

    It may stand in a table at the top of a file. A test that calls it is skipped; so is the whole
    file where the top of the file calls it.
    """

    def __init__(self, name):
        self._name = name

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "dtype":  # a question of NumPy, which would refuse the answer
            self()
        return Absent(f"{self._name}.{name}")

    def __call__(self, *_, **__):
        pytest.skip(f"needs {self._name}", allow_module_level=True)

    def __mro_entries__(self, _):
        self()

    def __neg__(self):
        self()

    def __instancecheck__(self, _):
        return False

    def __repr__(self):
        return self._name


def if_installed(name):
    """The module of this name, or of ours that needs a library; `Absent` where there is none.

    >>> if_installed("math").floor(2.5)
    2
    >>> if_installed("no_such_library").no_such_name
    no_such_library.no_such_name
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if (error.name or "").startswith("rotary."):
            raise  # a module of ours that there is not
        return Absent(name)
