"""Libraries that a test may have to do without: what asks for one that is absent is skipped."""

import contextlib
import importlib

import pytest


def enable_x64(is_wide):
    """A block in which JAX has types of 64 bits, or has none."""
    jax = pytest.importorskip("jax")

    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(is_wide)
    from jax import experimental  # jax 0.4.34 has it there

    return experimental.enable_x64(is_wide)


def is_jax_on_cpu():
    """Whether JAX puts arrays on the host: there their numbers are checked, elsewhere not."""
    return pytest.importorskip("jax").default_backend() == "cpu"


def older_loops():
    """The option by which XLA takes its older code for loops, which takes half as long to compile.

    JAX 0.4 passes it in another way, and JAX 0.12 has it no more.
    """
    jax = pytest.importorskip("jax")
    is_there = (0, 5) <= jax.__version_info__[:2] < (0, 12)
    return {"xla_cpu_use_fusion_emitters": False} if is_there else {}


@contextlib.contextmanager
def quick_xla():
    """A block in which JAX compiles without most optimizations, in a third of the time."""
    jax = pytest.importorskip("jax")
    from jax._src import compiler

    options = compiler.get_compile_options

    def with_older_loops(*arguments, **given):
        made = options(*arguments, **given)
        if jax.config.read("jax_disable_most_optimizations") and is_jax_on_cpu():
            made.env_option_overrides = [*older_loops().items()]
        return made

    if older_loops():
        compiler.get_compile_options = with_older_loops
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", False)
        compiler.get_compile_options = options
        jax.clear_caches()  # what comes afterwards is compiled as users have it


def of_transformers(name):
    """A module of transformers whose functions older releases lack; skips the test under those."""
    pytest.importorskip("transformers", minversion="5.24")
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
