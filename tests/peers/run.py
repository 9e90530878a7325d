"""Run other programs on every config, each in an environment of its own, and print the table.
Those of `fused.py` run no config: steps of theirs beside `rotary.fused`.

    python tests/peers/run.py [program ...]    # all of them where none is named

Environments are made once in .venv-peers/, from tests/peers/requirements; results go to
build/peers/ and are compared with those recorded in tests/golden/peers. A program that does not
install or run is a line with the reason. To record a new release: pin it, run, copy its result, run
table.py. A plug-in of ours is run inside its program, and what it is compared with is that program
without it.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import table

HERE = Path(__file__).resolve().parent
ENVIRONMENTS, OUT = table.ROOT / ".venv-peers", table.ROOT / "build/peers"
FUSED = {"fused_diffusers": "torch", "fused_vllm": "vllm"}  # `fused.py` with a program
SHARED = FUSED | dict.fromkeys(  # program -> requirements that it shares with others
    ("diffusers", "litgpt", "onnxruntime", "rotary_embedding_torch", "torchtune", "x_transformers"),
    "torch",
)
PLUGINS = {"vllm_plugin": "vllm"}  # script that runs a plug-in of ours -> program
NO_DEPS = "# no-deps"  # first words of a requirements file that lists everything
HOURS_2 = 7200


def environment(name):
    """The Python of an environment, made if it is not there or its requirements have changed."""
    requirements = HERE / "requirements" / f"{name}.txt"
    folder = ENVIRONMENTS / name
    python, stamp = folder / "bin/python", folder / "requirements.txt"
    wanted = requirements.read_text()
    if not stamp.exists() or stamp.read_text() != wanted:
        call([sys.executable, "-m", "venv", "--clear", folder])
        no_deps = ["--no-deps"] if wanted.startswith(NO_DEPS) else []
        pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        call([*pip, *no_deps, "-r", requirements])
        stamp.write_text(wanted)
    return python


def call(command):
    """Run a command; RuntimeError with the last line that it wrote if it fails."""
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        list(map(str, command)), cwd=table.ROOT, env=clean, capture_output=True, text=True,
        timeout=HOURS_2, check=False,
    )  # fmt: skip
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise RuntimeError(f"{last} (exit {done.returncode})")


def compared(name):
    """How the fresh result of a program differs from the recorded one, in words."""
    fresh, recorded = (
        {key_of(row): row for row in json.loads((folder / f"{name}.json").read_text())["rows"]}
        for folder in (OUT, table.RECORDED)
    )
    moved = [key for key in fresh.keys() | recorded.keys()
             if not same(fresh.get(key), recorded.get(key))]  # fmt: skip
    if not moved:
        return f"as recorded, {len(fresh)} rows"
    return f"{len(moved)} of {len(fresh)} rows are others: {sorted(map(str, moved))[:5]}"


def key_of(row):
    """What a row was run on: a config, or the arguments of a program that reads none."""
    return row.get("config") or str(row["arguments"]), row.get("layer_type"), row.get("seq_len")


def same(fresh, recorded):
    if fresh is None or recorded is None or fresh.keys() != recorded.keys():
        return False
    return all(
        np.shape(fresh[key]) == np.shape(recorded[key])
        and np.allclose(fresh[key], recorded[key], rtol=table.RTOL, atol=0)
        if key in ("inv_freq", "attention_factor")
        else key == "apart" or fresh[key] == recorded[key]  # "equal" says whether that is allowed
        for key in recorded
    )


def ran(name):
    """What became of one program, in words."""
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / f"{name}.json").unlink(missing_ok=True)
    try:
        python = environment(SHARED.get(name, name))
    except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:
        return f"does not install: {error}"
    try:
        script, given = HERE / f"{name}.py", table.CONFIGS
        if name in FUSED:
            script, given = HERE / "fused.py", name.removeprefix("fused_")
        call([python, "-W", "ignore", script, given, OUT / f"{name}.json"])
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        return f"does not run: {error}"
    return compared(name)


def plugged(name):
    """What became of a program with our plug-in in it, in words and as a table."""
    OUT.mkdir(parents=True, exist_ok=True)
    page = OUT / f"{name}.md"
    page.unlink(missing_ok=True)
    try:
        python = environment(PLUGINS[name])
        call([python, "-m", "pip", "install", "--quiet", "--no-deps", "-e", table.ROOT])
        call([python, "-W", "ignore", HERE / f"{name}.py", page])
        words = "all is well"
    except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:
        words = f"a run is wrong: {error}"
    return f"{words}\n{page.read_text() if page.exists() else ''}"


if __name__ == "__main__":
    own = {path.stem for path in (HERE / "requirements").glob("*.txt")}
    programs = sorted(SHARED.keys() | PLUGINS.keys() | own - {"torch"})
    for name in sys.argv[1:] or programs:
        if name not in programs:
            sys.exit(f"no program {name!r}; there are {', '.join(programs)}")
        sys.stdout.write(f"{name}: {plugged(name) if name in PLUGINS else ran(name)}\n")
        sys.stdout.flush()
    sys.stdout.write("\n".join(["", *table.lines_of(OUT), ""]))
