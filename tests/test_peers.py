"""What our file for each program says, against what the program computed when it was run.

`make peers` runs the programs, each in an environment of its own; the rows here are what they gave.
"""

import json

import numpy as np
import pytest
from peers.measure import without_bases
from peers.table import CONFIGS, FUSED_PAGE, fault, fused_page, lines_of
from peers.table import RECORDED as FOLDER

import rotary
from rotary.configs import layer_types
from rotary.programs import PROGRAMS, readings

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


SILENT = json.loads((FOLDER / "mlx_lm_silent.json").read_text())["rows"]


@pytest.mark.parametrize("row", SILENT, ids=lambda row: f"{row['config']}-{row['layer_type']}")
def test_the_base_that_mlx_lm_takes_by_itself(row):
    """Of a config that says none; each published one does, so a wrong default showed nowhere."""
    config = without_bases(json.loads((CONFIGS / row["config"]).read_text()))
    try:
        kind = row["layer_type"] or next(iter(layer_types(config)), None)
        found = readings(config, seq_len=row["seq_len"], layer_type=kind)
    except ValueError as error:  # transformers, which all are compared with, does not read it
        if "needs rope_theta" in str(error):
            return
        raise
    (ours,) = (each for each in found if each.framework == "mlx-lm")
    if "refused" in row:
        assert ours.refuses
    else:
        np.testing.assert_allclose(ours.inv_freq[[1, -1]], row["inv_freq"], rtol=1e-5)


@pytest.mark.parametrize("name", ["mlx_lm", "keras_hub", "litgpt"])
def test_the_channels_that_turn_together_are_those_of_our_spec(name):
    for row in json.loads((FOLDER / f"{name}.json").read_text())["rows"]:
        if "inv_freq" not in row or row["config"] == "glm-4-9b-chat-hf.json":
            continue  # nothing turns; mlx-lm rotates the whole head of glm
        spec = rotary.from_hf_config(CONFIGS / row["config"], row["layer_type"])
        ours = (spec.layout, spec.rotary_dim, spec.sign)
        assert ours == (row["layout"], row["rotary_dim"], row.get("sign", 1)), row["config"]


def test_fused_calls_were_equal_to_the_steps_of_other_programs():
    rows = [row for path in sorted(FOLDER.glob("fused_*.json"))
            for row in json.loads(path.read_text())["rows"]]  # fmt: skip
    assert len(rows) >= 20
    assert [row["arguments"] for row in rows if not row["equal"]] == []
    assert FUSED_PAGE.read_text() == fused_page(FOLDER)


def test_the_table_leaves_out_what_hosts_recorded_in_the_same_folder(tmp_path):
    (tmp_path / "in_lmcache.json").write_text(json.dumps({"program": "LMCache", "tables": {}}))
    (tmp_path / "timm.json").write_text((FOLDER / "timm.json").read_text())
    assert [line.split()[1] for line in lines_of(tmp_path) if line[:1] == "|"][2:] == ["timm"]
