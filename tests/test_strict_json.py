"""The one reader of JSON from outside: hostile texts give one sentence, and at once."""

import ast
import json
import struct
import time
from pathlib import Path

import pytest
from libraries import if_installed

import rotary
from rotary.checkpoint.files import read_checkpoint, read_config, read_json, read_shard
from rotary.strict_json import parsed

explorer = if_installed("rotary.explorer.models")  # needs Starlette

LONG = "9" * 4000
HOSTILE = {
    "numbers of 4000 digits": ('{"a": [' + ",".join([LONG] * 1600) + "]}", "of 4,000 digits"),
    "a number of a million digits": ('{"a": ' + "9" * 10**6 + "}", "of 1,000,000 digits"),
    "a fraction of a million digits": ('{"a": 0.' + "1" * 10**6 + "}", "of 1,000,002 digits"),
    "an exponent of many digits": ('{"a": 1e' + "9" * 10**4 + "}", "of 10,002 digits"),
    "lists in lists": ('{"a": ' + "[" * 10**6, "nested more than 64 deep"),
    "objects in objects": ('{"a":' * 10**5 + "1" + "}" * 10**5, "nested more than 64 deep"),
    "65 levels": ('{"a":' * 65 + "1" + "}" * 65, "nested more than 64 deep"),
    "NaN": ('{"a": NaN}', "NaN is not JSON"),
    "a key twice": ('{"a": 1, "a": 2}', "key 'a' appears twice"),
    "a long key twice": ('{"%s": 1, "%s": 2}' % ((10**6 * "k",) * 2), "appears twice"),
    "a list": ("[]", "must hold an object, got list"),
    "cut off": ('{"a": ', "is not JSON in UTF-8: Expecting value, line 1, column 7"),
    "a byte that is no UTF-8": (b'{"a": "\xff"}', "is not JSON in UTF-8"),
}


@pytest.mark.parametrize("value", ["Infinity", "-Infinity"])
def test_infinity_is_a_number_in_a_config_alone(value, tmp_path):
    """transformers 4 wrote it for Falcon-H1, Bamba and Granite 4, whose RoPE has none of it."""
    text = f'{{"hidden_size": 64, "num_attention_heads": 4, "time_step_limit": [0.0, {value}]}}'
    path = tmp_path / "config.json"
    path.write_text(text)
    assert rotary.from_hf_config(path) == rotary.Rotary(head_dim=16)
    assert read_config(path).data["time_step_limit"] == [0.0, float(value)]
    for call in (lambda: parsed(text, "a text"), lambda: read_json(path)):
        one_sentence(call, f"{value} is not JSON")


def one_sentence(call, words):
    start = time.process_time()
    with pytest.raises(ValueError, match=words) as error:
        call()
    assert time.process_time() - start < 1
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_text_gives_one_sentence_within_a_second_wherever_it_stands(tmp_path, case):
    text, words = HOSTILE[case]
    raw = text if isinstance(text, bytes) else text.encode()
    shard = tmp_path / "model.safetensors"
    shard.write_bytes(struct.pack("<Q", len(raw)) + raw)
    for name in ("config.json", "index.json"):
        (tmp_path / name).write_bytes(raw)
    calls = [
        lambda: parsed(text, "a text"),
        lambda: rotary.from_hf_config(tmp_path / "config.json"),
        lambda: read_json(tmp_path / "index.json"),
    ]
    if raw.startswith(b"{"):
        calls.append(lambda: read_shard(shard))
    if isinstance(text, str):
        calls += [lambda: rotary.Rotary.from_json(text)]
    if isinstance(text, str) and len(text) < 10_000:  # what the page takes
        calls += [lambda: explorer.pasted(text)]
    for call in calls:
        one_sentence(call, words)


def test_levels_and_digits_that_real_files_have_are_read():
    text = '{"a":' * 64 + "1" + "}" * 64
    assert parsed(text, "a text") == json.loads(text)
    data = {"u64": 2**64 - 1, "float": 5e-324, "list": [1.7976931348623157e308, -0.0], "ü": "\n"}
    assert parsed(json.dumps(data).encode("utf-8-sig"), "a text") == data


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"dtype": "U8", "shape": [10**99] * 65, "data_offsets": [0, 1]}, "a shape of 65 axes"),
        ({"dtype": "U8", "shape": [10**99] * 64, "data_offsets": [0, 1]}, "is not 1 bytes"),
        ({"dtype": "x" * 10**6, "shape": [1], "data_offsets": [0, 1]}, "is not known"),
    ],
)
def test_a_header_of_large_numbers_and_names_gives_a_short_sentence(tmp_path, entry, words):
    raw = json.dumps({"n" * 10**6: entry}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + b"x")
    one_sentence(lambda: read_checkpoint(path), words)


def test_nothing_else_reads_json_that_is_not_the_packages_own():
    own = {"strict_json.py": 1, "demo.py": 1, "configs/entries.py": 2, "configs/gguf.py": 1,
           "programs/mlx_lm.py": 1, "explorer/models.py": 1}  # fmt: skip
    root = Path(rotary.__file__).parent
    found = {}
    for path in root.rglob("*.py"):
        calls = [
            node
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Attribute) and ast.unparse(node) in ("json.loads", "json.load")
        ]
        if calls:
            found[path.relative_to(root).as_posix()] = len(calls)
    assert found == own
