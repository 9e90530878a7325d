"""The types that a user's editor shows: an array of one library in gives the same library out."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import rotary

FILE = Path(__file__).parent / "user_code.py"
COMMANDS = {
    "mypy": ["--strict", "--warn-unused-ignores"],
    "pyright": ["--pythonpath", sys.executable],
}


@pytest.mark.slow
@pytest.mark.parametrize("checker", COMMANDS)
def test_a_type_checker_infers_the_types_of_user_code(checker, tmp_path):
    if importlib.util.find_spec(checker) is None:
        pytest.skip(f"{checker} is not installed")
    command = [sys.executable, "-m", checker, *COMMANDS[checker], str(FILE)]
    environment = {"MYPY_CACHE_DIR": str(tmp_path)}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert result.returncode == 0, result.stdout


def test_any_stands_in_few_lines_of_the_source():
    words = [
        line
        for path in Path(rotary.__file__).parent.rglob("*.py")
        for line in path.read_text().splitlines()
        if "Any" in line.replace(",", " ").replace("]", " ").replace("[", " ").split()
    ]
    assert len(words) < 150
