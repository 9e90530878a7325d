"""What our file for each program says, against what the program computed when it was run.

`make peers` runs the programs, each in an environment of its own; the rows here are what they gave.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from rotary.programs import PROGRAMS, readings

HERE = Path(__file__).parent
RECORDED = {
    program.name: HERE
    / "golden"
    / "peers"
    / f"{program.name.lower().replace('.', '_').replace('-', '_')}.json"
    for program in PROGRAMS
    if program.name != "transformers"
}
FLOAT32_RTOL = 1e-5  # tables in float32, and angles measured on rotated vectors
ROWS = [
    pytest.param(
        name, row, id=f"{name}-{row['config']}-{row.get('layer_type')}-{row.get('seq_len')}"
    )
    for name, path in RECORDED.items()
    if path.exists()
    for row in json.loads(path.read_text())["rows"]
]


def disagreement(name, row):
    """What is wrong with our reading of `row`, or "" if it is what the program gave."""
    where = {key: row.get(key) for key in ("seq_len", "layer_type")}
    try:
        found = readings(HERE / "configs" / row["config"], **where)
    except ValueError as error:
        unknown = "model_type" in str(error) and "is not known" in str(error)  # to us, as to diff
        return "" if "skipped" in row or "refused" in row or unknown else str(error)
    (ours,) = (each for each in found if each.framework == name)
    if "skipped" in row:
        return "" if ours.not_compared else f"never run: {row['skipped']}"
    if "refused" in row:
        return "" if ours.refuses else f"it refuses: {row['refused']}"
    if ours.inv_freq is None:
        return f"it computes a rotation; ours: {ours.refuses or ours.not_compared}"
    theirs = np.asarray(row["inv_freq"])
    if theirs.shape != ours.inv_freq.shape:
        return f"it turns {len(theirs)} pairs, ours {len(ours.inv_freq)}"
    if not np.allclose(ours.inv_freq, theirs, rtol=FLOAT32_RTOL, atol=0):
        return f"frequencies: {np.abs(ours.inv_freq / theirs - 1).max():.1e} apart"
    if not np.isclose(ours.attention_factor, row["attention_factor"], rtol=FLOAT32_RTOL, atol=0):
        return f"amplitude {row['attention_factor']}, ours {ours.attention_factor}"
    return ""


@pytest.mark.parametrize(("name", "row"), ROWS)
def test_our_file_says_what_the_program_computes(name, row):
    assert disagreement(name, row) == ""
