"""Every version that pyproject.toml promises, in an environment of its own: `make matrix`.

`nox -l` lists the sessions, `nox -s oldest` runs one, and `python -m tools.versions` prints what
they gave. With NOX_DEFAULT_VENV_BACKEND=uv an environment takes seconds to make and not minutes.
A Python that is not installed is left out, by name. So is torch where Python is not that of
constraints.txt: a bare torch downloads gigabytes of CUDA. `nox -- torch` has it everywhere. Of each
test a tenth of the cases is run, 8 at least; `nox -- all` runs them all.
"""

import sys
from pathlib import Path

import nox

sys.path.append(str(Path(__file__).parent))
from tools.versions import RESULTS, floor, pythons

nox.options.envdir = "build/nox"
nox.options.error_on_missing_interpreters = False
nox.options.sessions = ["newest", "oldest", "absent"]

PROJECT = nox.project.load_toml("pyproject.toml")["project"]
EXTRAS = PROJECT["optional-dependencies"]
PYTHONS = pythons(PROJECT)
PINNED = "3.11"  # of constraints.txt
TOOLS = ["pytest", "hypothesis", "mpmath", "ml_dtypes", "safetensors"]

# The numbers and the calls of every array library. Left out is what no version changes, because it
# is text and whole numbers alone (names in checkpoints, predictions of `benchmarks`), and what
# tests this repository or another program; .ci/run does that, with the pinned versions.
TESTS = [
    *["schedules", "spec", "layouts", "angles", "positions", "cache", "vectors", "kernels"],
    *["rotate_spec", "built_in", "few_tokens", "prepare", "fused", "rerotate", "moved_blocks"],
    *["strict_json", "private_names", "short_floats"],
    *["jax", "fused_jax", "jax_sharding", "attention_jax", "attention_linear"],
    *["attention_softmax", "attention_encodings", "attention_distances"],
    *["bounds", "decay", "extension", "simulate", "spectrum", "search", "reach", "plan"],
    *["hostile_configs", "identify_errors"],
]
TESTS_OF_TORCH = [
    *["torch", "torch_arrays", "torch_edges", "torch_repeat", "torch_route", "torch_export"],
    *["fused_torch", "operators", "nn", "modes", "dtensor"],
]
TESTS_OF_TRANSFORMERS = ["configs", "mutated_configs", "from_model", "patch_functions"]


def run_tests(session: nox.Session, *files: str) -> None:
    """The tests, and what `tools.versions` makes a row of."""
    name = session.name.replace("(library='", "-").replace("')", "")
    session.run("python", "-m", "tools.versions", name)
    paths = [f"tests/test_{file}.py" for file in files]
    session.run(
        *["python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow"],
        *["-W", "ignore::DeprecationWarning:typer"],  # of the oldest typer, with the newest click
        # of mpmath 1.4, which sympy of torch 2.8 uses for the numbers of a compiled program
        *["-W", "ignore:the rational private module:DeprecationWarning"],
        *["-W", "ignore:the math2 module:DeprecationWarning"],
        # of torch on Python 3.13.0, and of hypothesis on 3.14
        *["-W", "ignore:Guards may run slower:RuntimeWarning"],
        *["-W", "ignore:It looks like `register_random`"],
        *["-o", "junit_family=xunit1"],  # a test records how long it took
        # what a version breaks, it breaks in more than one of a hundred cases
        *([] if "all" in session.posargs else ["--tenth"]),
        "--continue-on-collection-errors",  # a file that cannot be imported fails alone
        *[f"--junitxml={RESULTS / name}.xml", *paths],
        env={"OMP_WAIT_POLICY": "PASSIVE"},
    )


def with_torch(session: nox.Session) -> list[str]:
    """What installs torch and transformers; nothing where torch would be gigabytes of CUDA."""
    if "torch" in session.posargs:
        return [*EXTRAS["torch"], *EXTRAS["transformers"]]
    if session.python == PINNED:
        return ["-c", "constraints.txt", "torch", *EXTRAS["transformers"]]
    session.warn(f"without torch and transformers: 'nox -s {session.name} -- torch' has them")
    return []


@nox.session(python=PYTHONS)
def newest(session: nox.Session) -> None:
    """The newest versions that this Python can have."""
    torch = with_torch(session)
    if torch:
        session.install(*torch)
    session.install(".", *EXTRAS["jax"], *TOOLS)
    run_tests(session, *TESTS, *(TESTS_OF_TORCH + TESTS_OF_TRANSFORMERS if torch else []))


@nox.session(python=PYTHONS[0])
def oldest(session: nox.Session) -> None:
    """The oldest versions that pyproject.toml allows, and no others."""
    torch = with_torch(session)
    wanted = [*PROJECT["dependencies"], *EXTRAS["jax"], *torch]
    session.install(*map(floor, wanted), *TOOLS)
    session.install("--no-deps", ".")
    run_tests(session, *TESTS, *(TESTS_OF_TORCH + TESTS_OF_TRANSFORMERS if torch else []))


@nox.session(python=PINNED)
@nox.parametrize("library", ["torch", "numba", "jax"])
def absent(session: nox.Session, library: str) -> None:
    """Everything but one library."""
    if library != "torch":
        session.install(*with_torch(session))
    session.install(".", *EXTRAS["jax"], *TOOLS)
    installer = ["uv"] if session.venv_backend == "uv" else []
    session.run(*installer, "pip", "uninstall", "-y", "-q", library)
    run_tests(session, *TESTS, *([] if library == "torch" else TESTS_OF_TORCH))


@nox.session(python=PINNED)
def newest_transformers(session: nox.Session) -> None:
    """What the newest transformers changed: each class that differs is a line at the end."""
    session.install("-c", "constraints.txt", "torch")
    session.install(".", *TOOLS, "--upgrade", *EXTRAS["transformers"])
    session.run("python", "-m", "tools.versions", "transformers")
    session.run("python", "-m", "pytest", "-q", "-rfE", "--tb=line", "tests/test_parity.py")
