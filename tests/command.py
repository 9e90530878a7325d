"""The command as a user runs it, and in this process: shared by the tests of commands."""

import importlib
import json
import os
import re
import subprocess
import sys
from typing import Any, NamedTuple

from rotary import cli

SETTINGS = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "TERM", "PYTHONIOENCODING")
START = "from rotary.cli import main; main()"


class Done(NamedTuple):
    """What a command left."""

    code: int
    out: str
    err: str


def environment(**changes: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    return {**kept, "PYTHONWARNINGS": "error::UserWarning", **changes}


def run(*arguments: str, code: str = START, cwd: Any = None, **changes: str) -> Done:
    """The command in a new process; `code` may prepare it."""
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(
        command, capture_output=True, env=environment(**changes), cwd=cwd, timeout=120
    )
    out, err = (stream.decode("utf-8", "backslashreplace") for stream in (done.stdout, done.stderr))
    return Done(done.returncode, out, err)


def in_process(monkeypatch: Any, capsys: Any) -> Any:
    """The command in this process: faster, and its parts can be replaced."""
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)

    def call(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["rotary", *arguments])
        try:
            cli.main()
        except SystemExit as stop:
            return Done(stop.code or 0, *capsys.readouterr())
        return Done(0, *capsys.readouterr())

    return call


def kept(monkeypatch: Any, module: str, name: str) -> None:
    """Keep the first answer of a function: what a command prints in many ways is computed once."""
    owner, answers = importlib.import_module(module), []
    function = getattr(owner, name)

    def answer(*arguments: Any, **options: Any) -> Any:
        answers.extend([] if answers else [function(*arguments, **options)])
        return answers[0]

    monkeypatch.setattr(owner, name, answer)


def document(done: Done) -> Any:
    """The one JSON document on stdout, strictly read; nothing else was said."""
    assert (done.code, done.err) == (0, "")

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(done.out, parse_constant=refuse)


def assert_refused(done: Done, *parts: str) -> None:
    """Status 1, one line on stderr, nothing on stdout."""
    assert (done.code, done.out) == (1, "")
    assert re.fullmatch(r"error: [^\n]+\n", done.err), done.err
    for part in parts:
        assert part in done.err
