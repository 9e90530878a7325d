"""Writes what `to_vllm` makes of a spec of each schedule; vLLM then adds what it computes.

    python tests/golden/make_to_vllm.py
    python tests/peers/vllm.py tests/golden/peers/to_vllm.json tests/golden/peers/to_vllm.json

The second line runs in the environment of tests/peers/requirements/vllm.txt.
"""

import json
from pathlib import Path

from rotary import Rotary
from rotary.configs import to_vllm

OUT = Path(__file__).with_name("peers") / "to_vllm.json"
LISTS = {
    "short_factor": [1.0 + 0.01 * i for i in range(32)],
    "long_factor": [1.0 + 0.5 * i for i in range(32)],
    "original_max_position_embeddings": 4096,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 4096}
BAND = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
SCHEDULES = [
    ("default", {}),
    ("linear", {"factor": 8}),
    ("ntk", {"factor": 4.0}),
    ("yarn", YARN),
    ("yarn", {**YARN, "attention_factor": 1.0}),
    ("yarn", {**YARN, "mscale": 0.707, "mscale_all_dim": 1.0}),
    ("yarn", {**YARN, "mscale": 0.707}),
    ("yarn", {**YARN, "truncate": False, "beta_fast": 16.0, "beta_slow": 2.0}),
    ("llama3", BAND),
    ("proportional", {"partial_rotary_factor": 0.25}),
    ("longrope", {**LISTS, "attention_factor": 1.3}),
    ("longrope", {**LISTS, "factor": 16.0}),
    ("longrope", {**LISTS, "factor": 64.0}),
    ("longrope", {**LISTS, "short_mscale": 1.1, "long_mscale": 1.2}),
]


def specs():
    """Rotary of each schedule, a smaller slice of the plain one among them."""
    yield Rotary(head_dim=64, rotary_dim=32, base=5e5)
    for schedule, params in SCHEDULES:
        yield Rotary(head_dim=64, base=5e5, schedule=schedule, params=params)


def rows():
    """The dict of each spec; LongRoPE twice, for a row within its trained length and beyond it."""
    for spec in specs():
        for seq_len in (4096, 65536) if spec.schedule == "longrope" else (65536,):
            yield {"spec": spec.to_dict(), "seq_len": seq_len, "overrides": to_vllm(spec)}


if __name__ == "__main__":
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows())
    OUT.write_text(f'{{"program": "vLLM", "version": "", "rows": [\n{lines}\n]}}\n')
