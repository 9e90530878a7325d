"""Programs of this repository, run in this process as `python -m module` or `python file` does."""

import re
import runpy
import subprocess
import sys
from typing import Any

import pytest


def ran(program: str, *arguments: str) -> None:
    """Run a module, or a file by its path; SystemExit where it ends with another status than 0."""
    before = sys.modules.pop(program, None)  # or runpy warns that it is there
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(sys, "argv", [program, *arguments])
        try:
            if program.endswith(".py"):
                runpy.run_path(program, run_name="__main__")
            else:
                runpy.run_module(program, run_name="__main__", alter_sys=True)
        except SystemExit as stop:
            if stop.code:
                raise
        finally:
            if before is not None:
                sys.modules[program] = before


def assert_printed(printed: str) -> None:
    """A benchmark or an experiment prints that its gate passed, and a table."""
    assert re.search(r"^gate passed: [1-9]\d* results ", printed, re.MULTILINE)
    assert re.search(r"^\|(?:---\|)+\n(?:\|.*\|\n)+", printed, re.MULTILINE), "no table is printed"


def alone(code: str, *arguments: object, **options: Any) -> str:
    """What code prints in a new interpreter, which ends with status 0; options of `subprocess`."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, **options)
    assert done.returncode == 0, done.stderr or f"ended by signal {-done.returncode}"
    return done.stdout
