"""Write docs/commands.md, the reference of the command line, from the commands themselves.

`python tools/make_commands.py`
"""

import argparse
import re
from pathlib import Path

import typer

from rotary.cli.app import app

PAGE = Path(__file__).parents[1] / "docs" / "commands.md"
TASKS = {
    "Start": ("demo", "doctor", "bench"),
    "Read a model's RoPE": ("inspect", "freqs", "diff"),
    "Test a rotation": ("identify", "vectors"),
    "Long contexts": ("reach", "plan", "design", "decay", "explore"),
    "Weights": ("convert",),
    "Other programs": ("export-kernel",),
}
EXAMPLES = {
    "bench": "rotary bench",
    "convert": "rotary convert SRC DST --from half --to interleaved --dry-run",
    "decay": "rotary decay config.json",
    "demo": "rotary demo",
    "design": "rotary design --length 8192 --keep 1024 --from config.json --out new.json",
    "diff": "rotary diff config.json",
    "doctor": "rotary doctor config.json",
    "explore": "rotary explore",
    "export-kernel": "rotary export-kernel rope_kernel",
    "freqs": "rotary freqs config.json",
    "identify": "rotary identify my_model/rope.py:apply_rope --head-dim 128",
    "inspect": "rotary inspect config.json",
    "plan": "rotary plan --context 131072 --from config.json",
    "reach": "rotary reach config.json",
    "vectors": "rotary vectors config.json -o vectors.json",
}
TYPES = {"<str>": "TEXT", "<int>": "N", "<int range>": "N", "<float>": "X", "<path>": "PATH"}


def page() -> str:
    """The page: a table of tasks, and a section for each command."""
    commands = typer.main.get_command(app).commands
    named = {name for names in TASKS.values() for name in names}
    tasks = {**TASKS, "More": tuple(name for name in commands if name not in named)}
    rows, sections = [], []
    for task, names in tasks.items():
        for name in (name for name in names if name in commands):
            summary, *_ = commands[name].help.splitlines()
            rows.append(f"| {task} | [{name}](#{name}) | {_text(summary)} |")
            sections.append(_section(name, commands[name]))
            task = ""
    return f"""\
# Commands

Written by `python tools/make_commands.py` from the commands; `rotary COMMAND --help` says the same.

An error is one line on stderr that says what is wrong and how to fix it. The exit status is 0 on
success, 1 after an error or if `doctor` or `identify --check` found a fault, 2 if an option or
argument is missing or malformed. If a signal ends the command, it is 128 plus the number of the
signal: 130 after Ctrl-C, 141 if the program that reads the output ends first, 143 after `kill`.

| task | command | what it does |
|---|---|---|
{chr(10).join(rows)}

{chr(10).join(sections)}"""


def _section(name: str, command: object) -> str:
    context = typer.Context(command, info_name=f"rotary {name}")
    example = EXAMPLES.get(name)
    lines = [f"## {name}", "", *(_text(line) for line in command.help.splitlines()), ""]
    lines += ["```console", f"$ {example}", "```", ""] if example else []
    options = [(option, option.get_help_record(context)) for option in command.get_params(context)]
    lines += ["| | |", "|---|---|"]
    lines += [
        f"| `{_head(record[0])}` | {_text(_required(record[1]))} |"
        for option, record in options
        if record and "--help" not in option.opts
    ]
    return "\n".join([*lines, ""])


def _head(text: str) -> str:
    """The name of an option and what follows it, without the type where a word stands for it."""
    name, _, kind = text.partition(" <")
    word = TYPES.get(f"<{kind}", "") if kind else ""
    is_argument = name.isupper() or not name.startswith("-")
    return name.upper() if is_argument else f"{name} {word}".strip()


def _required(text: str) -> str:
    return re.sub(r"\s*\[required\]", " Required.", text)


def _text(text: str) -> str:
    """Words of a help text as Markdown: what looks like an option or a file is code."""
    text = text.replace("|", "\\|").replace("*", "\\*").replace("<", "&lt;")
    code = r"(?<![\w`-])(--[a-z][\w-]*|[\w/]+\.(?:json|gguf|py|md)\b(?::\w+)?)"
    return re.sub(code, r"`\1`", text)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    PAGE.write_text(page(), encoding="utf-8")
