"""GGUF files as llama.cpp reads them, and as it reads what we write: against recorded numbers."""

import json
import re
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
from command import run

import rotary
from rotary import Rotary
from rotary.configs import from_gguf, gguf_layer_types, read_gguf, to_gguf
from rotary.configs.gguf import ARCHITECTURES

YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}
DYNAMIC = {"factor": 2.0, "original_max_position_embeddings": 64}
TWO_AMPLITUDES = {
    "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 4096,
    "short_mscale": 1.0, "long_mscale": 1.2,
}  # fmt: skip
PEERS = Path(__file__).parent / "golden" / "peers"


def recorded(name):
    return json.loads((PEERS / name).read_text())["rows"]


FILES = {row["config"]: row["metadata"] for row in recorded("gguf_metadata.json")}
COMPUTED = [row for row in recorded("llama_cpp.json") if "inv_freq" in row]
COMPUTED += [row for file in recorded("gguf_metadata.json") for row in file["short_context"]]


def assert_as_computed(spec, row):
    """`spec` is what llama.cpp's kernel did: its float32 running product is 2^-24 off a pair."""
    ours, amplitude = rotary.inv_freq(spec, row["seq_len"])
    theirs = np.asarray(row["inv_freq"])
    axes = np.asarray(row.get("axes", [0] * len(theirs)))
    still = axes == 3  # the fourth position, which is 0 for text
    assert (theirs[still] == 0).all()
    tolerance = 1e-6 + 2.0**-24 * np.arange(len(theirs))
    assert (np.abs(ours - theirs) <= np.abs(ours) * tolerance)[~still].all()
    assert amplitude == pytest.approx(row["attention_factor"], rel=1e-6)
    assert spec.layout == spec.out_layout == row["layout"]
    assert (spec.rotary_dim, spec.start) == (row["rotary_dim"], row["start"])
    if spec.axes:
        assert list(spec.axes) == axes.tolist()
    else:
        assert "axes" not in row


@pytest.mark.parametrize(
    "row", COMPUTED, ids=lambda row: f"{row['config']}-{row['layer_type']}-{row['seq_len']}"
)
def test_a_gguf_file_is_read_as_llama_cpp_computes_it(row):
    assert_as_computed(from_gguf(FILES[row["config"]], row["layer_type"]), row)


def test_every_layer_type_of_a_file_was_computed():
    for config, metadata in FILES.items():
        types = {row["layer_type"] for row in COMPUTED if row["config"] == config}
        assert types == set(gguf_layer_types(metadata) or (None,)), config


ROWS = recorded("to_gguf.json")


@pytest.mark.parametrize(
    "row", [row for row in ROWS if "spec" not in row], ids=lambda row: row["name"]
)
def test_keys_that_others_may_write_are_read_as_llama_cpp_reads_them(row):
    sizes = {key: value for key, value in FILES[row["config"]].items() if ".rope." not in key}
    metadata = {**{key: sizes[key] for key in sizes if not key.startswith("rope_")}, **row["keys"]}
    if isinstance(row["computed"], str):  # it does not load such a file
        with pytest.raises(ValueError, match=row["message"]):
            from_gguf(metadata)
        return
    for computed in row["computed"]:
        assert_as_computed(from_gguf(metadata, computed["layer_type"]), computed)


@pytest.mark.filterwarnings("ignore:factor 0.5 < 1 shortens the context")
@pytest.mark.parametrize("row", [row for row in ROWS if "spec" in row], ids=lambda row: row["name"])
def test_llama_cpp_computes_the_spec_from_what_is_written(row):
    spec = Rotary.from_dict(row["spec"])
    architecture = row["keys"]["general.architecture"]
    written = to_gguf(spec, architecture, context_length=131072)
    assert written.keys() == row["keys"].keys()
    for key, value in row["keys"].items():
        assert written[key] == (value if isinstance(value, str) else pytest.approx(value)), key
    read = from_gguf(written)
    for computed in row["computed"]:
        assert_as_computed(spec, computed)
        of_read, of_spec = (rotary.inv_freq(each, computed["seq_len"]) for each in (read, spec))
        np.testing.assert_allclose(of_read[0], of_spec[0], rtol=1e-12, atol=1e-29)
        assert of_read[1] == pytest.approx(of_spec[1], rel=1e-12)
    if spec.depends_on_length:
        assert {computed["seq_len"] for computed in row["computed"]} == {4096, 131072}


def test_the_amplitude_of_yarn_is_written_as_llama_cpp_reads_it():
    params = {"factor": 4.0, "original_max_position_embeddings": 32768, "attention_factor": 1.0}
    written = to_gguf(Rotary(head_dim=128, schedule="yarn", params=params), "qwen2")
    assert written["qwen2.rope.scaling.attn_factor"] == pytest.approx(1 / (0.1 * np.log(4) + 1))


@pytest.mark.parametrize(
    ("architecture", "spec", "message"),
    [
        ("gemma3", Rotary(head_dim=8, schedule="ntk", params={"factor": 2.0}),
         "reads no rope_freqs"),
        ("llama", Rotary(head_dim=8, rotary_dim=4, layout="interleaved"), "the whole head"),
        ("minicpm3", Rotary(head_dim=96, rotary_dim=32), "computes start 64"),
        ("qwen2vl", Rotary(head_dim=8), "sections"),
        ("qwen2", Rotary(head_dim=8, axes=(0, 1, 2, 0)), "computes axes"),
        ("mamba", Rotary(head_dim=8), "no RoPE"),
        ("llama", Rotary(head_dim=64), r"layout 'interleaved'.*row_permutation"),
        ("qwen2", Rotary(head_dim=8, rotary_dim=4, start=4), "computes start 0"),
        ("qwen2", Rotary(head_dim=8, sign=-1), "sign"),
        ("qwen2", Rotary(head_dim=8, axes=(0, 1, 0, 1)), "axes"),
        ("qwen2", Rotary(head_dim=8, schedule="dynamic", params=DYNAMIC), "dynamic"),
        ("qwen2", Rotary(head_dim=8, schedule="dynamic_linear", params=DYNAMIC), "the length"),
        ("qwen2", Rotary(head_dim=8, schedule="yarn", params={**YARN, "beta_fast": 16.0}),
         "reads no beta_fast"),
        ("qwen2", Rotary(head_dim=8, schedule="yarn", params={**YARN, "truncate": False}),
         "truncate"),
        ("deepseek2", Rotary(head_dim=192, rotary_dim=64, start=128, layout="interleaved",
                             schedule="yarn", params=YARN), "scale of the scores"),
        ("phi3", Rotary(head_dim=8, schedule="longrope", params=TWO_AMPLITUDES),
         "one attention factor"),
        ("deepseek4", Rotary(head_dim=8, layout="interleaved", schedule="linear",
                             params={"factor": 40.0}), "does not read the scaling"),
    ],
)  # fmt: skip
def test_what_llama_cpp_does_not_compute_is_refused(architecture, spec, message):
    with pytest.raises(ValueError, match=message):
        to_gguf(spec, architecture)


BASE = {
    "general.architecture": "gemma3", "gemma3.attention.key_length": 64,
    "gemma3.rope.freq_base": 1e6,
}  # fmt: skip


@pytest.mark.parametrize(
    ("keys", "layer_type", "message"),
    [
        ({}, "full_attention", "all layers of this file have one RoPE"),
        ({"gemma3.attention.sliding_window": 512}, None, "full_attention, sliding_attention"),
        ({"gemma3.attention.sliding_window": 512}, "sliding", "got 'sliding'"),
        ({"rope_freqs.weight": [1.0] * 32}, None, "reads no rope_freqs.weight"),
        ({"general.architecture": "mamba"}, None, "no RoPE in the architecture"),
        # these two add rows of a table of positions, and Baichuan 13B has ALiBi
        ({"general.architecture": "bert"}, None, "no RoPE in the architecture"),
        ({"general.architecture": "starcoder"}, None, "no RoPE in the architecture"),
        ({"general.architecture": "baichuan", "baichuan.block_count": 40}, None, "has 32 blocks"),
        ({"general.architecture": None}, None, "general.architecture"),
        ({"general.architecture": "gemma33"}, None, "did you mean 'gemma3'"),
        ({"gemma3.rope.freq_bas": 1.0}, None, "did you mean 'rope.freq_base'"),
        ({"gemma3.rope.scaling.type": "yarm"}, None, "did you mean 'yarn'"),
        ({"gemma3.rope.scaling.type": "yarn", "gemma3.rope.scaling.factor": 4.0}, None,
         "original_context_length"),
    ],
)  # fmt: skip
def test_metadata_that_makes_no_sense(keys, layer_type, message):
    with pytest.raises(ValueError, match=message):
        from_gguf({**BASE, **keys}, layer_type)


@pytest.mark.parametrize("name", ["granite", "granitemoe", "granitehybrid"])
def test_a_granite_that_does_not_rotate_is_refused(name):
    """As Granite 4 hybrid; src/models/granite.cpp: the key switches RoPE, true by default."""
    keys = {"general.architecture": name, f"{name}.attention.key_length": 64}
    silent = from_gguf(keys)
    key = f"{name}.rope.scaling.finetuned"
    assert from_gguf({**keys, key: True}) == silent
    with pytest.raises(ValueError, match=f"does not rotate in this file: {key} is false"):
        from_gguf({**keys, key: False})
    with pytest.raises(ValueError, match="does not rotate in this file"):
        gguf_layer_types({**keys, key: False})


def test_the_key_that_turns_granite_off_means_nothing_elsewhere():
    keys = {"general.architecture": "minicpm", "minicpm.attention.key_length": 64}
    assert from_gguf({**keys, "minicpm.rope.scaling.finetuned": False}) == from_gguf(keys)


def test_layers_of_deepseek_v4_without_their_base_are_one_sentence():
    keys = {"general.architecture": "deepseek4", "deepseek4.attention.key_length": 64}
    assert from_gguf(keys, "main").base == 10_000.0
    with pytest.raises(ValueError, match=r"needs deepseek4\.attention\.compress_rope_freq_base"):
        from_gguf(keys, "compress")


def test_a_factor_without_a_type_is_linear():
    read = from_gguf({**BASE, "gemma3.rope.scaling.factor": 8.0})
    assert (read.schedule, dict(read.params)) == ("linear", {"factor": 8.0})
    assert from_gguf({**BASE, "gemma3.rope.scale_linear": 8.0}) == read
    none = {"gemma3.rope.scaling.factor": 8.0, "gemma3.rope.scaling.type": "none"}
    assert from_gguf({**BASE, **none}).schedule == "default"


def written_file(path, metadata, weights=0, words=2, *, big_endian=False):
    """A GGUF file with `metadata`, its RoPE tensors, and a weight of so many floats."""
    gguf = pytest.importorskip("gguf")
    order = gguf.GGUFEndian.BIG if big_endian else gguf.GGUFEndian.LITTLE
    writer = gguf.GGUFWriter(path, metadata["general.architecture"], endianess=order)
    writer.add_token_list([f"word {number}" for number in range(words)])
    writer.add_token_types([1] * words)
    for key, value in metadata.items():
        if key.endswith(".weight"):
            writer.add_tensor(key, np.asarray(value, np.float32))
        elif key != "general.architecture":
            kind = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array"}
            getattr(writer, f"add_{kind[type(value)]}")(key, value)
    writer.add_tensor("token_embd.weight", np.zeros((1, weights + 1), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("config", "layer_type"),
    [
        ("llama-3.1-8b.json", None),
        ("phi-3-mini-128k.json", None),
        ("gemma-3-4b.json", "sliding_attention"),
        ("qwen3-vl-8b.json", None),
    ],
)
def test_a_file_is_read_as_its_metadata(tmp_path, config, layer_type):
    path = written_file(tmp_path / "model.gguf", FILES[config], words=2000)
    of_file, of_keys = from_gguf(path, layer_type), from_gguf(FILES[config], layer_type)
    for length in (4096, 131072):
        ours, theirs = rotary.inv_freq(of_file, length), rotary.inv_freq(of_keys, length)
        np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-7)
        assert ours[1] == pytest.approx(theirs[1], rel=1e-7)
    assert gguf_layer_types(str(path)) == gguf_layer_types(FILES[config])


def test_weights_are_not_read(tmp_path):
    """A file of 20 GB on the disk space of its header."""
    path = written_file(tmp_path / "model.gguf", FILES["llama-3-8b.json"], weights=5 * 10**3)
    assert from_gguf(path).base == 500_000.0
    before = read_gguf(path)
    with path.open("r+b") as stream:
        stream.truncate(20 * 10**9)
    assert read_gguf(path) == before


def test_the_tensors_of_a_model_in_several_files_are_found(tmp_path):
    """A first file of keys alone, as the option --no-tensor-first-split writes it."""
    metadata = FILES["llama-3.1-8b.json"]
    keys = {key: value for key, value in metadata.items() if not key.endswith(".weight")}
    first = tmp_path / "model-00001-of-00002.gguf"
    written_file(first, {**keys, "split.count": 2})
    second = tmp_path / "model-00002-of-00002.gguf"
    with pytest.raises(FileNotFoundError, match="00002-of-00002"):
        from_gguf(first)
    tensor = {key: value for key, value in metadata.items() if key not in keys}
    written_file(second, {"general.architecture": "llama", "split.count": 2, **tensor})
    ours, theirs = from_gguf(first), from_gguf(metadata)
    np.testing.assert_allclose(rotary.inv_freq(ours)[0], rotary.inv_freq(theirs)[0], rtol=1e-7)
    with pytest.raises(ValueError, match="give the first"):
        from_gguf(second)


@pytest.mark.parametrize("count", ["2", 2.5, [2]])
def test_a_number_of_files_that_is_no_whole_number_is_one_line(tmp_path, count):
    """A text and a list were a TypeError of Python."""
    metadata = {**FILES["llama-3-8b.json"], "split.count": count}
    path = written_file(tmp_path / "model-00001-of-00002.gguf", metadata)
    with pytest.raises(ValueError, match=r"split.count must be a whole number, got") as caught:
        read_gguf(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("words", [2, 2000])
def test_a_file_for_big_endian_machines_is_read_as_any_other(tmp_path, words):
    """Its lists were counted with the bytes in the wrong order: "cut short", for a whole file."""
    metadata = FILES["llama-3.1-8b.json"]
    same = from_gguf(written_file(tmp_path / "little.gguf", metadata, words=words))
    path = written_file(tmp_path / "big.gguf", metadata, words=words, big_endian=True)
    assert path.read_bytes()[4:8] == struct.pack(">I", 3)
    assert from_gguf(path) == same


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0"])
def test_divisors_of_another_type_are_refused(tmp_path, kind):
    """The bytes of Q8_0 were taken for the divisors; ggml stops at any type but F32."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    packed = gguf.quants.quantize(np.ones(32, np.float32), gguf.GGMLQuantizationType[kind])
    writer.add_tensor("rope_freqs.weight", packed, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match=f"rope_freqs.weight is {kind}, llama.cpp reads only F32"):
        read_gguf(tmp_path / "model.gguf")


def test_a_damaged_file_is_one_line(tmp_path):
    path = written_file(tmp_path / "model.gguf", FILES["llama-3.1-8b.json"])
    whole = path.read_bytes()
    tensor = whole.index(np.float32(FILES["llama-3.1-8b.json"]["rope_freqs.weight"][40]).tobytes())
    for cut in (0, 3, 20, 100, len(whole) // 2, tensor):
        path.write_bytes(whole[:cut])
        with pytest.raises(ValueError, match="not a GGUF file, or cut short") as caught:
            from_gguf(path)
        assert "\n" not in str(caught.value)
    path.write_text("{}")
    with pytest.raises(ValueError, match="not a GGUF file"):
        from_gguf(path)
    with pytest.raises(FileNotFoundError, match="no such file"):
        from_gguf(tmp_path / "none.gguf")


def test_without_the_package_the_error_says_what_to_install(tmp_path, monkeypatch):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match=r"gguf: pip install gguf$"):
        from_gguf(path)


def test_a_gguf_file_is_no_config(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(ValueError, match=r"a GGUF file; read it with rotary.configs.from_gguf"):
        rotary.from_hf_config(path)


def test_inspect_and_freqs_take_a_gguf_file(tmp_path):
    path = str(written_file(tmp_path / "gemma.gguf", FILES["gemma-3-4b.json"]))
    found = json.loads(run("inspect", path, "--json").out)
    assert found["full_attention"]["spec"]["params"] == {"factor": 8.0}
    assert found["sliding_attention"]["spec"]["base"] == 10_000.0
    pairs = json.loads(run("freqs", path, "--layer-type", "sliding_attention", "--json").out)
    assert len(pairs["pairs"]) == 128
    refused = run("freqs", path)
    assert refused.code == 1
    assert "full_attention, sliding_attention" in refused.err


def test_layouts_are_those_of_llama_cpp():
    """As libllama answers for each architecture; 40 deals out sections in turn."""
    recorded_types = json.loads((PEERS / "gguf_metadata.json").read_text())["rope_types"]
    layouts = {-1: None, 0: "interleaved", 2: "half", 8: "half", 40: "half"}
    newer = {"clef", "dflash", "gemma-embedding2", "k2-horizon"}  # of code that was not read
    unused = {"bert", "starcoder"}  # it has an answer, but their graphs rotate nothing
    assert recorded_types.keys() - ARCHITECTURES.keys() == newer
    for name, number in recorded_types.items():
        if name not in newer:
            model = ARCHITECTURES[name]
            assert model["layout"] == (None if name in unused else layouts[number]), name
            assert (model.get("sections") == "interleaved") == (number == 40), name


LLAMA = {
    "general.architecture": "llama",
    "llama.embedding_length": 64,
    "llama.attention.head_count": 4,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_freqs.weight": ["1"] * 8}, "finite numbers > 0"),
        ({"rope_freqs.weight": [0.0] * 8}, "finite numbers > 0"),
        ({"rope_freqs.weight": 3}, "finite numbers > 0"),
        ({"llama.attention.head_count": 0}, "needs llama.attention.key_length"),
    ],
)
def test_malformed_metadata_is_one_line(change, message):
    with pytest.raises(ValueError, match=message):
        rotary.configs.from_gguf({**LLAMA, **change})


def test_divisors_may_be_an_array():
    divisors = np.linspace(1, 2, 8, dtype=np.float32)
    found = rotary.configs.from_gguf({**LLAMA, "rope_freqs.weight": divisors})
    assert found == rotary.configs.from_gguf({**LLAMA, "rope_freqs.weight": divisors.tolist()})


def test_a_layer_type_of_a_file_whose_layers_are_alike():
    with pytest.raises(ValueError, match="all layers of this file have one RoPE; leave it out"):
        rotary.configs.from_gguf(LLAMA, "sliding_attention")


@pytest.mark.parametrize("length", [-1, 0, "4k", 2.5])
def test_a_length_that_is_written_is_a_whole_number(length):
    spec = rotary.Rotary(head_dim=64)
    with pytest.raises(ValueError, match="context_length must be"):
        rotary.configs.to_gguf(spec, "qwen2", context_length=length)
    with pytest.raises(ValueError, match="max_position_embeddings must be"):
        rotary.configs.to_vllm(spec, max_position_embeddings=length)
    with pytest.raises(TypeError, match="spec must be a Rotary"):
        rotary.configs.to_gguf(spec.to_dict(), "qwen2")


@pytest.mark.parametrize("count", [2**62, 10**9])
@pytest.mark.parametrize("kind", [4, 8, 9])
def test_a_list_of_more_items_than_the_file_has_bytes_is_refused_at_once(tmp_path, count, kind):
    """Each item took its time, and 2^62 of them for ever."""
    name, value = b"general.architecture", b"llama"
    text = struct.pack("<Q", len(name)) + name + struct.pack("<IQ", 8, len(value)) + value
    key = struct.pack("<Q", 7) + b"llama.x" + struct.pack("<IIQ", 9, kind, count) + bytes(640)
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + text + key)
    with pytest.raises(ValueError, match=f"a list of {count} items in a file of"):
        read_gguf(path)


def test_lists_in_lists_in_lists_are_refused(tmp_path):
    key = struct.pack("<Q", 7) + b"llama.x" + struct.pack("<I", 9)
    path = tmp_path / "m.gguf"
    path.write_bytes(
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key + struct.pack("<IQ", 9, 1) * 5000 + bytes(64)
    )
    with pytest.raises(ValueError, match="not a GGUF file, or cut short"):
        read_gguf(path)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("rope.dimension_sections", [2**31 - 1, 2**31 - 1, 0, 0], "whole numbers from 0 to 1,048,"),
        ("rope.dimension_sections", [16, 24, -24, 0], "whole numbers from 0 to"),
        ("rope.dimension_sections", [16, 24.5, 24, 0], "whole numbers from 0 to"),
        ("rope.dimension_sections", 128, "a list of up to four numbers, got 128"),
        ("rope.dimension_sections", "1234", "a list of up to four numbers"),
        ("rope.dimension_sections", [16, 24, 24, 0, 0], "a list of up to four numbers"),
        ("rope.dimension_count", "128", "a whole number from 0 to 1,048,576, got '128'"),
        ("rope.dimension_count", 2**31, "a whole number from 0 to"),
        ("rope.freq_base", [1e6], "a finite number"),
        ("rope.freq_base", float("nan"), "a finite number, got nan"),
        ("rope.scaling.factor", "4.0", "a finite number, got '4.0'"),
        ("rope.scaling.original_context_length", "4096", "a whole number, got '4096'"),
        ("attention.key_length", None, "a whole number from 0 to"),
        ("attention.head_count", ["x"], "whole numbers from 0 to"),
        ("embedding_length", 896.0, "a whole number, got 896.0"),
    ],
)  # fmt: skip
def test_a_value_of_another_type_or_size_is_refused(key, value, words):
    """Files from elsewhere: some of these ended in a TypeError, the first took all memory."""
    metadata = {"general.architecture": "qwen2vl", "qwen2vl.embedding_length": 8192,
                "qwen2vl.attention.head_count": 64,
                "qwen2vl.rope.dimension_sections": [16, 24, 24, 0]}  # fmt: skip
    assert from_gguf(metadata).axes
    with pytest.raises(ValueError, match=rf"^qwen2vl\.{re.escape(key)} must be {words}"):
        from_gguf({**metadata, f"qwen2vl.{key}": value})
