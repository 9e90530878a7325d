"""Programs of this repository, run in this process as `python -m module` or `python file` does."""

import runpy
import sys

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
