"""What our file for each program says, against what the program computed when it was run.

`make peers` runs the programs, each in an environment of its own; the rows here are what they gave.
"""

import json

import pytest
from peers.table import RECORDED as FOLDER
from peers.table import fault

from rotary.programs import PROGRAMS

RECORDED = {
    program.name: FOLDER / f"{program.name.lower().replace('.', '_').replace('-', '_')}.json"
    for program in PROGRAMS
    if program.name != "transformers"
}
ROWS = [
    pytest.param(
        name, row, id=f"{name}-{row['config']}-{row.get('layer_type')}-{row.get('seq_len')}"
    )
    for name, path in RECORDED.items()
    if path.exists()
    for row in json.loads(path.read_text())["rows"]
]


@pytest.mark.parametrize(("name", "row"), ROWS)
def test_our_file_says_what_the_program_computes(name, row):
    assert fault(row, name) == ""
