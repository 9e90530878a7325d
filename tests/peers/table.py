"""The table of what other programs computed: against our file for each, and against transformers.

    python tests/peers/table.py [folder]    # of results, here those in tests/golden/peers

prints it and writes docs/results/peers.md, and docs/results/fused.md of the rows of `fused.py`. It
runs in the environment of this library.
"""

import json
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np

from rotary.programs import PROGRAMS, readings

ROOT = Path(__file__).resolve().parents[2]
CONFIGS, RECORDED = ROOT / "tests/configs", ROOT / "tests/golden/peers"
PAGE, FUSED_PAGE = ROOT / "docs/results/peers.md", ROOT / "docs/results/fused.md"
RTOL = 1e-5  # tables in float32, and angles measured on rotated vectors
CLASSES = {"diffusers", "timm"}  # their rows are classes, not configs
LISTED = 30  # names in one line of the page
WITH_FILE = {program.name for program in PROGRAMS}
REASONS = {  # programs without a file in rotary.programs, where they differ
    ("litgpt", "phi-3-mini-128k.json"): "it has no LongRoPE",
    ("litgpt", "phi-3.5-mini.json"): "it has no LongRoPE",
    ("litgpt", "phi-4-mini.json"): "it has no LongRoPE",
    ("litgpt", "qwen2.5-7b-yarn.json"): "its YaRN ramp runs the other way; attention factor 1",
    ("torchtune", "phi-3-mini-128k.json"): "it has the Phi-3 of 4096 tokens alone",
}


def apart(row, reading):
    """How far a row is from a reading, in words; "" if they are the same."""
    theirs, ours = np.asarray(row["inv_freq"]), reading.inv_freq
    if theirs.shape != ours.shape:
        return f"{len(theirs)} pairs for {len(ours)}"
    said = []
    if not np.allclose(theirs, ours, rtol=RTOL, atol=0):
        with np.errstate(divide="ignore", invalid="ignore"):
            off = np.where(theirs == ours, 0.0, np.abs(theirs / ours - 1)).max()
        said.append(f"frequencies by {percent(off)}")
    factor = row["attention_factor"] / reading.attention_factor
    if not np.isclose(factor, 1, rtol=RTOL, atol=0):
        said.append(f"attention factor by {percent(abs(factor - 1))}")
    return ", ".join(said)


def percent(share):
    return f"{100 * share:.2g} %" if share < 1 else f"a factor of {share + 1:.3g}"


def read(row, name):
    """Our reading of a row's config for the program `name`; our words if we refuse it for all."""
    where = {key: row.get(key) for key in ("seq_len", "layer_type")}
    try:
        found = readings(CONFIGS / row["config"], **where)
    except ValueError as error:
        return str(error)
    return next(each for each in found if each.framework == name)


def fault(row, name):
    """What is wrong with our file for the program, or "" if the row is what it says."""
    ours = read(row, name)
    if isinstance(ours, str):  # a model type that nobody here knows is no program's matter
        return "" if {"skipped", "refused"} & row.keys() or "is not known" in ours else ours
    if "skipped" in row:
        return "" if ours.not_compared else f"never run: {row['skipped']}"
    if "refused" in row:
        return "" if ours.refuses else f"it refuses: {row['refused']}"
    if ours.inv_freq is None:
        return f"it computes a rotation; ours: {ours.refuses or ours.not_compared}"
    return apart(row, ours)


def kind_of(row, name):
    """equal, different, refused, skipped or class; and why."""
    for kind in ("skipped", "refused"):
        if kind in row:
            return kind, row[kind]
    if "config" not in row or "inv_freq" not in row or name in CLASSES:
        return "class", ""
    reference = read(row, "transformers")
    if isinstance(reference, str):
        return "skipped", f"it ran, but {reference}"
    if reference.inv_freq is None:
        return "skipped", f"it ran, but transformers refuses: {reference.refuses}"
    off = apart(row, reference)
    if not off:
        return "equal", ""
    own = read(row, name) if name in WITH_FILE else None
    why = REASONS.get((name, row["config"]), "")
    if own is not None:
        said = [each for each in (reference.advice, own.advice) if each]
        why = "; ".join(said or own.notes[-1:]) or own.schedule
    return "different", f"{off}: {why}"


def lines_of(folder):
    """The page, line by line."""
    head = ["program", "version", "run on", "compared", "as transformers", "different", "refused",
            "not run", "our file agrees"]  # fmt: skip
    table, details = [head, ["---"] * len(head)], []
    for path in sorted(folder.glob("*.json")):
        data = json.loads(path.read_text())
        if "rows" not in data:
            continue  # hosts.py has a page for it
        if not Path(__file__).with_name(path.name).with_suffix(".py").exists():
            continue  # recorded for one test alone
        name, groups = data["program"], defaultdict(lambda: defaultdict(list))
        faults = 0
        for row in data["rows"]:
            kind, why = kind_of(row, name)
            layer = f" ({row['layer_type']})" if row.get("layer_type") else ""
            length = f" at {row['seq_len']}" if row.get("seq_len") else ""
            config = row.get("config") or ", ".join(map(str, row["arguments"]))
            groups[kind][why].append(config.removesuffix(".json") + layer + length)
            faults += name in WITH_FILE and bool(fault(row, name))
        count = {kind: sum(map(len, whys.values())) for kind, whys in groups.items()}
        ran = count.get("equal", 0) + count.get("different", 0) + count.get("class", 0)
        agrees = f"{len(data['rows']) - faults} of {len(data['rows'])}"
        numbers = [count.get(kind, 0) for kind in ("equal", "different", "refused", "skipped")]
        compared = f"{ran}, none a config" if "class" in count else str(ran)
        table.append([name, data["version"], data.get("date", ""), compared, *map(str, numbers),
                      agrees if name in WITH_FILE else "no file"])  # fmt: skip
        details += ["", f"## {name}", ""]
        for kind in ("different", "refused", "skipped"):
            for why, names in groups[kind].items():
                listed = ", ".join(names) if len(names) <= LISTED else f"{len(names)} configs"
                details.append(f"- {kind}, {why}: {listed}")
    return [*(f"| {' | '.join(row)} |" for row in table), *details]


TEXT = """\
# Other programs, run

Each program was run on every file of `tests/configs`, in an environment of its own, and its
rotation measured on unit vectors: `make peers` does it again. A row is one config, layer type and
length. "As transformers" compares with what `from_hf_config` reads, "our file" with what
`rotary diff` says of the program; frequencies and attention factors count as equal within 1e-5,
what float32 tables hold. "Not run" has the reason below. diffusers and timm read no such config:
their classes, and the `Rotary` that equals each, stand in `tests/test_peers_grids.py`;
megatron-core takes arguments, which `tests/test_megatron.py` holds against `from_megatron`.
"""

FUSED_TEXT = """\
# Fused calls beside other programs

`rotary.fused` and the steps that it replaces, in one run of the other program's environment, on a
CPU: `make peers` does it again. Random arrays of 37 tokens, 8 and 2 heads of 128; a sixth of the
slots is -1; the tables are those of the other program. "Apart" is the largest difference as a share
of the largest result. The other programs round 16-bit numbers after every step, `fused` once.
Equality with Qwen3, Gemma 3 and OLMo 2 of transformers is part of `tests/test_fused_torch.py`.
"""


def fused_page(folder):
    """The page of what `fused.py` recorded in a folder."""
    lines = [FUSED_TEXT]
    for path in sorted(folder.glob("fused_*.json")):
        data = json.loads(path.read_text())
        lines += [f"## {data['program']} {data['version']}, run {data['date']}", "",
                  "| steps of the program | our call | dtype | apart | allowed |",
                  "|---|---|---|---|---|"]  # fmt: skip
        for each in data["rows"]:
            apart = f"{each['apart']:.2g}" if each["apart"] else "0, the same bits"
            apart = apart if each["equal"] else f"**{apart}**"
            lines.append(f"| {' | '.join(each['arguments'])} | {apart} | {each['limit']:.2g} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else RECORDED
    page = "\n".join([TEXT, *lines_of(folder), ""])
    PAGE.write_text(page)
    FUSED_PAGE.write_text(fused_page(folder))
    sys.stdout.write(page)
