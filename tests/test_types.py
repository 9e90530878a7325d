"""The types that a user's editor shows: an array of one library in gives the same library out."""

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

import rotary

ROOT = Path(__file__).parents[1]
# basedpyright is Pyright in a wheel, with the Node.js that it runs on
COMMANDS = {
    # a cache of its own: with other options `make lint` would make it useless
    "mypy": ["--config-file", "tests/mypy.ini", "--cache-dir", ".mypy_cache/user_code"],
    "basedpyright": ["--level", "error", "--pythonpath", sys.executable],
}


@pytest.mark.slow
@pytest.mark.parametrize("checker", COMMANDS)
def test_a_type_checker_infers_the_types_of_user_code(checker):
    if importlib.util.find_spec(checker) is None:
        pytest.skip(f"{checker} is not installed")
    command = [sys.executable, "-m", checker, *COMMANDS[checker], "tests/user_code.py"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_type_checker_sees_what_is_imported_at_its_first_use():
    """In `if TYPE_CHECKING:` there is an import for each name that `__getattr__` imports."""
    tree = ast.parse(Path(rotary.__file__).read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    seen = {alias.asname for node in imports for alias in node.names}
    assert {*rotary._MODULES, *rotary._NEED_TORCH} - seen == set()


def test_any_stands_in_few_lines_of_the_source():
    texts = [path.read_text() for path in Path(rotary.__file__).parent.rglob("*.py")]
    lines = [line for text in texts for line in text.splitlines() if re.search(r"\bAny\b", line)]
    assert len(lines) < 150
