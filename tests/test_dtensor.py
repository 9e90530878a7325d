"""DTensors against the whole tensors they are cut from, on 2 and 4 processes of gloo.

The checks are in `dtensor_ranks.py`: one process starts, and all ranks are forked from it. Each
reports every check by name.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch.distributed.tensor")

import dtensor_ranks  # noqa: E402

import rotary  # noqa: E402

RANKS = Path(dtensor_ranks.__file__)
LAWS = [
    pytest.param(launch, check.__name__, marks=() if launch == "2 ranks" else pytest.mark.slow)
    for launch, (_, checks) in dtensor_ranks.LAUNCHES.items()
    for check in checks
    if check not in dtensor_ranks.SAVED
]


def reports(folder):
    """What every rank says of each check: its traceback, empty if it passed."""
    return [json.loads(file.read_text()) for file in sorted(folder.glob("rank*.json"))]


@pytest.fixture
def launched(once, request):
    """The folder that has the reports of every launch that this session's tests ask for."""
    asked = {item.name.partition("-")[0] for item in request.session.items}
    launches = [
        launch
        for launch in dtensor_ranks.LAUNCHES
        if launch == "2 ranks" or f"test_on_every_rank[{launch}" in asked
    ]
    return once("dtensor", lambda folder: start(folder, launches))


def start(folder, launches):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(RANKS), str(folder), *launches],
        capture_output=True,
        text=True,
        timeout=600,
        env=environment,
        cwd=RANKS.parent.parent,
    )
    for launch in launches:
        assert len(reports(folder / launch)) == dtensor_ranks.LAUNCHES[launch][0], done.stderr


@pytest.mark.parametrize(("launch", "name"), LAWS)
def test_on_every_rank(launched, launch, name):
    if name == "second_gradients_are_those_of_the_whole" and torch.__version__.startswith("2.8."):
        pytest.skip("DTensor.to_local of torch 2.8 has no second derivative")
    said = [report[name] for report in reports(launched / launch)]
    assert not any(said), "\n".join(f"rank {rank}: {text}" for rank, text in enumerate(said))


def test_all_ranks_together_say_what_transformers_says(launched):
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    whole, together = torch.load(launched / "2 ranks" / "together.pt")
    angles = torch.arange(16)[:, None] * 500.0 ** -(torch.arange(0, 8, 2) / 8)
    wide = torch.cat((angles, angles), -1)[None]
    wanted = llama.apply_rotary_pos_emb(*whole, wide.cos(), wide.sin())
    torch.testing.assert_close(together, wanted, rtol=0, atol=2e-6)


def test_where_a_dtensor_is_refused_its_part_is_named():
    """`torch.from_dlpack` of a DTensor is a tensor at address 0, which ends the process."""
    hint = rotary.kernels.hint_for(torch.distributed.tensor.DTensor)
    assert hint == "; go on with x.to_local(), the part that this process holds"
