"""What every runner in this folder shares: read the configs, measure a rotation, write the rows.

Standard library and NumPy only, because it runs in the environments of the other programs. A runner
imports it first and then calls `leave_this_folder`, for its own file is named like the program.
"""

import importlib
import json
import sys
from datetime import date
from pathlib import Path

import numpy as np

ENOUGH = 64.0  # radians: a float32 angle is then known to 1e-7 of itself


def leave_this_folder():
    """Take this folder off the import path, so that `import vllm` finds the program."""
    here = Path(__file__).resolve().parent
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != here]


def beside(name):
    """A module of tests/ that uses rotary, of this checkout."""
    root = Path(__file__).resolve().parent.parent.parent
    sys.path += [str(root / "src"), str(root / "tests")]
    return importlib.import_module(name)


def configs(folder):
    """(file name, config) of every config.json in `folder`."""
    for path in sorted(Path(folder).glob("*.json")):
        yield path.name, json.loads(path.read_text())


def without_bases(config):
    """A config that does not say a base: a program then takes the one of its own code."""
    bases = ("rope_theta", "rotary_emb_base", "rope_local_base_freq")
    return {
        key: without_bases(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if key not in bases
    }


def measured(rotate, head_dim, farthest=2**30):
    """Frequencies, amplitude, layout and slice of a rotation, from what it does to unit vectors.

    rotate(position) -> (head_dim, head_dim): row j is unit vector j, rotated at that position.
    Position 0 shows where each channel is written. Positions double until a pair has turned ENOUGH
    radians, and each one tells the whole turns of the next.
    """
    written = np.asarray(rotate(0), np.float64)
    to = np.abs(written).argmax(1)

    def at(position):
        return np.asarray(rotate(position), np.float64)[:, to]

    near, far = at(1), at(min(2**16, farthest))
    turned = np.abs(near) + np.abs(far)
    np.fill_diagonal(turned, 0)
    turns_with = np.where(turned.max(1) > 1e-7, turned.argmax(1), -1)
    turning = np.flatnonzero(turns_with >= 0)
    if not len(turning):
        raise ValueError("nothing turns")
    start = int(turning[0])
    step = int(turns_with[start]) - start
    rotary_dim = 2 * step if step > 1 else int(turning[-1]) + 1 - start
    a = start + np.arange(rotary_dim // 2) * (2 if step == 1 else 1)
    b = a + step
    if not np.isin(turns_with[a], (-1, *b)).all() or (turns_with[a] - b)[turns_with[a] >= 0].any():
        raise ValueError(f"not pairs at one distance: {turns_with.tolist()}")
    inv_freq, position = np.zeros(len(a)), 1
    while position <= farthest:
        matrix = at(position)
        angle = np.arctan2(matrix[a, b], matrix[a, a])
        angle += 2 * np.pi * np.round((inv_freq * position - angle) / (2 * np.pi))
        near_enough = np.abs(inv_freq) * position < 2 * ENOUGH
        inv_freq = np.where(near_enough, angle / position, inv_freq)
        position *= 2
    found = {"inv_freq": np.abs(inv_freq).tolist(),
             "attention_factor": float(written[a[0], to[a[0]]]),
             "layout": "interleaved" if step == 1 else "half",
             "rotary_dim": rotary_dim, "start": start}  # fmt: skip
    if (to != np.arange(head_dim)).any():
        found["out_layout"] = "interleaved" if to[b[0]] == to[a[0]] + 1 else "half"
    if (inv_freq < 0).any():
        found["sign"] = -1
    return found


def row(config, layer_type=None, seq_len=None, **fields):
    """One row of a recorded result; numbers with nine significant digits."""
    if "inv_freq" in fields:
        fields["inv_freq"] = [nine(value) for value in fields["inv_freq"]]
        fields["attention_factor"] = nine(fields["attention_factor"])
    return {"config": config, "layer_type": layer_type, "seq_len": seq_len, **fields}


def nine(value):
    return float(f"{float(value):.9g}")


def reason(error):
    """An exception in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def write(path, program, version, rows):
    """The recorded result: one row per line."""
    about = {"program": program, "version": version, "date": date.today().isoformat()}
    head = json.dumps(about)[:-1] + ', "rows": [\n'
    body = ",\n".join(json.dumps(each, separators=(",", ":")) for each in rows)
    Path(path).write_text(f"{head}{body}\n]}}\n")
