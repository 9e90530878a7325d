"""Quantized weights after a move, and the permutations of other programs."""

import checkpoints
import gguf
import numpy as np
import pytest
import torch
import transformers.core_model_loading as loading
from checkpoints import moved, tensor_of
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig

from rotary import layouts
from rotary.checkpoint import shards
from rotary.checkpoint.channels import Place
from rotary.checkpoint.files import Tensor
from rotary.checkpoint.plan import plan

examples = settings(max_examples=30, deadline=None, derandomize=True)
Q = "model.layers.0.self_attn.q_proj."


def config_of(heads, head_dim, **values):
    sizes = {"num_attention_heads": heads, "head_dim": head_dim, "hidden_size": 64}
    return {"model_type": "llama", **sizes, **values}


def carried(arrays, config, source="half"):
    """Arrays of one projection after their moves, and the reason for each that is left."""
    named = {Q + name: array for name, array in arrays.items()}
    after, todo = checkpoints.carried(named, config, source, trust_source=True)
    result = {name.removeprefix(Q): array for name, array in after.items()}
    return result, {left.tensor.removeprefix(Q): left.reason for left in todo.left}


def half_to_interleaved(heads, head_dim):
    """Old row of every new one, head by head: first members at even places, second at odd ones."""
    return [
        head * head_dim + half * (head_dim // 2) + pair
        for head in range(heads)
        for pair in range(head_dim // 2)
        for half in (0, 1)
    ]


# --- bytes ---


@pytest.mark.parametrize("dtype", ["BF16", "F8_E4M3", "F32"])
def test_bytes_are_carried_whatever_they_mean(dtype):
    random, size = np.random.default_rng(0), {"BF16": 2, "F8_E4M3": 1, "F32": 4}[dtype]
    raw = random.integers(0, 256, 64 * 3 * size, dtype=np.uint8)  # NaN of every kind among them
    tensor = Tensor(dtype, (64, 3), 7, 7 + raw.nbytes)
    config = config_of(4, 16, hidden_size=3)
    (move,) = plan({Q + "weight": tensor}, config, "half", "interleaved").moves.values()
    got = moved(raw, tensor, move)
    wanted = raw.reshape(64, 3 * size)[half_to_interleaved(4, 16)]
    np.testing.assert_array_equal(got, wanted.reshape(-1))
    assert got.dtype == np.uint8
    assert got.shape == raw.shape
    assert not np.shares_memory(got, raw)


def test_half_bytes_are_carried_by_whole_rows_only():
    rows = Tensor("F4", (64, 6), 0, 64 * 3)
    (move,) = plan({Q + "weight": rows}, config_of(4, 16), "half", "interleaved").moves.values()
    raw = np.arange(192, dtype=np.uint8)
    assert moved(raw, rows, move)[3:6].tolist() == [24, 25, 26]  # row 8 comes second
    odd = {Q + "weight": Tensor("F4", (64, 1), 0, 32)}
    with pytest.raises(ValueError, match=r"F4 \(64, 1\): a channel is not whole bytes"):
        plan(odd, config_of(4, 16), "half", "interleaved")


# --- words of 32 bits, after the formulas of the formats ---


def packed(values, lanes, bits):
    """(rows, columns) whole numbers as (rows, columns * bits / 32) words, one column at a time."""
    words = np.zeros((values.shape[0], values.shape[1] * bits // 32), np.uint32)
    for row in range(values.shape[0]):
        for word in range(words.shape[1]):
            columns = [word * len(lanes) + lane for lane in lanes]
            words[row, word] = sum(
                int(values[row, column]) << (bits * place) for place, column in enumerate(columns)
            )
    return words.view(np.int32)


@examples
@given(st.sampled_from([2, 4, 8]), st.integers(1, 3), st.sampled_from([16, 32]), st.booleans())
def test_gptq_weights_are_those_of_the_moved_rows(bits, heads, head_dim, with_order):
    random = np.random.default_rng(bits * heads)
    inputs, groups, size = 64, 2, heads * head_dim
    values = random.integers(0, 2**bits, (inputs, size))
    zeros = random.integers(0, 2**bits - 1, (groups, size))
    scales = random.random((groups, size), np.float32)
    of_input = random.permutation(np.arange(inputs) % groups).astype(np.int32)

    def arrays(order):
        in_order = tuple(range(32 // bits))
        return {
            "qweight": packed(values[:, order].T, in_order, bits).T.copy(),
            "qzeros": packed(zeros[:, order], in_order, bits),
            "scales": scales[:, order],
            **({"g_idx": of_input} if with_order else {}),
        }

    after, left = carried(arrays(np.arange(size)), config_of(heads, head_dim))
    for name, wanted in arrays(half_to_interleaved(heads, head_dim)).items():
        np.testing.assert_array_equal(after[name], wanted, err_msg=name)
    assert left == ({"g_idx": "of the input channels"} if with_order else {})
    back, _ = carried(after, config_of(heads, head_dim), "interleaved")
    for name, wanted in arrays(np.arange(size)).items():
        np.testing.assert_array_equal(back[name], wanted, err_msg=name)


@examples
@given(st.integers(1, 3), st.sampled_from([8, 16]))
def test_awq_weights_are_those_of_the_moved_rows(heads, head_dim):
    random = np.random.default_rng(heads)
    inputs, groups, size = 12, 2, heads * head_dim
    values = random.integers(0, 16, (inputs, size))
    zeros = random.integers(0, 16, (groups, size))
    scales = random.random((groups, size), np.float32)

    def arrays(order):
        lanes = (0, 2, 4, 6, 1, 3, 5, 7)
        return {
            "qweight": packed(values[:, order], lanes, 4),
            "qzeros": packed(zeros[:, order], lanes, 4),
            "scales": scales[:, order],
        }

    after, left = carried(arrays(np.arange(size)), config_of(heads, head_dim))
    for name, wanted in arrays(half_to_interleaved(heads, head_dim)).items():
        np.testing.assert_array_equal(after[name], wanted, err_msg=name)
    assert left == {}


def test_a_word_of_awq_is_the_published_one():
    """AutoAWQ packs the columns 0 to 7 as 0x75316420."""
    place = Place(1, 4, (0, 2, 4, 6, 1, 3, 5, 7))
    word = np.array([[0x75316420]], np.uint32)
    swapped = shards.moved(word.view(np.uint8)[0], np.array([1, 0, 2, 3, 4, 5, 6, 7]), place)
    assert hex(swapped.view(np.uint32)[0]) == "0x75306421"
    assert packed(np.arange(8)[None], place.lanes, 4).view(np.uint32)[0, 0] == word[0, 0]


# --- scales ---


@pytest.mark.parametrize(
    ("name", "shape"),
    [("weight_scale", (64, 1)), ("weight_scale", (64,)), ("SCB", (64,)), ("scales", (64, 2)),
     ("biases", (64, 2)), ("weight_scale", (64, 4))],
)  # fmt: skip
def test_scales_of_rows_move_along(name, shape):
    random = np.random.default_rng(0)
    weight = random.integers(-128, 128, (64, 64)).astype(np.int8)
    scale = random.random(shape, np.float32)
    after, left = carried({"weight": weight, name: scale}, config_of(4, 16))
    order = half_to_interleaved(4, 16)
    np.testing.assert_array_equal(after["weight"], weight[order])
    np.testing.assert_array_equal(after[name], scale[order])
    assert left == {}


@pytest.mark.parametrize("name", ["weight_scale", "weight_scale_2", "weight_format"])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_one_scale_for_a_tensor_stays(name, shape):
    arrays = {"weight": np.zeros((64, 64), np.int8), name: np.ones(shape, np.float32)}
    _, left = carried(arrays, config_of(4, 16))
    assert left == {name: "one for the whole tensor"}


@pytest.mark.parametrize("name", ["pre_quant_scale", "input_scale", "input_global_scale",
                                  "smooth_scales", "act_scales"])  # fmt: skip
@pytest.mark.parametrize("shape", [(), (64,)])
def test_scales_of_the_inputs_stay(name, shape):
    """As many as output channels, where the projection is square. NVIDIA's ModelOpt writes the
    first beside its AWQ weights, and programs that load these multiply x by it."""
    arrays = {"weight": np.zeros((64, 64), np.int8), name: np.ones(shape, np.float32)}
    _, left = carried(arrays, config_of(4, 16))
    assert left == {name: "of the input channels"}


def test_a_scale_of_more_numbers_than_inputs_moves():
    arrays = {"weight": np.zeros((64, 32), np.int8), "new_scale": np.ones(64, np.float32)}
    assert carried(arrays, config_of(4, 16))[1] == {}


@pytest.mark.parametrize(
    ("heads", "head_dim", "values"),
    [(4, 128, {}), (3, 64, {}), (1, 512, {"partial_rotary_factor": 0.25}),
     (4, 32, {"quantization_config": {"weight_block_size": [32, 32]}})],
)  # fmt: skip
def test_weights_in_scaled_blocks_are_those_of_the_moved_rows(heads, head_dim, values):
    random = np.random.default_rng(0)
    size = heads * head_dim
    block = values.get("quantization_config", {}).get("weight_block_size", [128])[0]
    weight = random.integers(-128, 128, (size, 8)).astype(np.int8)
    scale = random.random((-(-size // block), 1), np.float32)
    config = config_of(heads, head_dim, **values)
    if "partial_rotary_factor" in values:
        config = {**config, "model_type": "phi3", "num_key_value_heads": 1}
    arrays = {"weight": weight, "weight_scale_inv": scale}
    after, left = carried(arrays, config)
    order = np.arange(size)
    rotary_dim = int(head_dim * values.get("partial_rotary_factor", 1))
    order.reshape(heads, head_dim)[:, :rotary_dim] = (
        np.array(half_to_interleaved(heads, rotary_dim)).reshape(heads, rotary_dim)
        + (np.arange(heads) * (head_dim - rotary_dim))[:, None]
    )

    def real(x):
        return x["weight"] * np.repeat(x["weight_scale_inv"], block, axis=0)[:size]

    np.testing.assert_array_equal(real(after), real(arrays)[order])
    assert left == {"weight_scale_inv": "its blocks hold whole slices"}


# --- what is refused ---


def i4(*shape):
    return np.zeros(shape, np.int32)


def i1(*shape):
    return np.zeros(shape, np.int8)


def f4(*shape):
    return np.zeros(shape, np.float32)


@pytest.mark.parametrize(("heads", "arrays", "message"), [
    ((2, 16), {"qweight": i4(8, 32)}, r"q_proj.qweight' needs 'model.*q_proj.scales' beside it"),
    ((2, 16), {"qweight": i4(8, 32), "scales": f4(1, 32), "qzeros": i4(1, 3)},
     "3 words for 32 channels, which is not 2, 4 or 8 bits"),
    ((2, 16), {"qweight": i4(8, 8), "scales": f4(1, 32)},
     "packs 8 bits along the output channels; AWQ packs 4"),
    ((2, 16), {"qweight": f4(8, 32), "scales": f4(1, 32)}, "must be two axes of 32-bit words"),
    ((4, 16), {"weight": i1(64, 64), "new_scale": f4(64)},
     "input or output channels, 64 of each; if input, name it"),
    ((4, 16), {"weight": i1(64, 32).view(np.uint8), "new_scale": f4(64)},  # 2 inputs in a byte?
     "input or output channels"),
    ((2, 256), {"weight": i1(512, 8), "weight_scale_inv": i4(4, 1)},
     "scales blocks of 128 rows, and rows would leave"),
    ((2, 256), {"weight": i1(512, 8), "weight_scale_inv": i4(3, 1)},
     r"\(3, 1\): neither one number, nor 512 rows, nor 4 x 1"),
    ((8, 64), {"weight": i4(512, 64), "weight_scale": f4(4, 512)},  # a row for each block
     "packs several numbers in 32 bits, as AMD Quark does"),
    ((2, 64), {"weight": i1(128, 128), "weight_scale": f4(1, 128)},
     "nor 128 rows, nor 1 x 1 blocks of 128 x 128"),
    ((8, 64), {"weight_packed": i4(512, 8), "weight_zero_point": i4(64, 1)},  # 8 rows in a word
     r"\(pack-quantized\); convert the weights"),
    ((8, 64), {"weight_packed": i4(512, 8), "weight_scale": f4(64, 1)},
     r"\(64, 1\): neither one number, nor 512 rows$"),
])  # fmt: skip
def test_what_does_not_fit_its_format_is_refused(heads, arrays, message):
    with pytest.raises(ValueError, match=message):
        carried(arrays, config_of(*heads))


@pytest.mark.parametrize("name", ["weight.absmax", "weight.quant_state.bitsandbytes__nf4", "W_q",
                                  "codes", "lora_embedding_A.default"])  # fmt: skip
def test_formats_with_blocks_across_rows_are_refused_by_name(name):
    arrays = {"weight": np.zeros((2048, 1), np.uint8), name: np.zeros(64, np.uint8)}
    with pytest.raises(ValueError, match=f"tensor '{Q}{name}'.*before they are quantized"):
        carried(arrays, config_of(4, 16))


# --- what other programs do ---


def test_transformers_permutes_queries_as_we_do_and_keys_of_grouped_heads_wrongly():
    config = LlamaConfig(hidden_size=4096, num_attention_heads=32, num_key_value_heads=8)
    rows = {32: torch.arange(4096.0)[:, None], 8: torch.arange(1024.0)[:, None]}
    wrong = {}
    for heads, weight in rows.items():
        ours = layouts.row_permutation(heads, 128, "interleaved", "half")
        theirs = loading.PermuteForRope()._permute_for_rope(weight, config)
        wrong[heads] = float((theirs[:, 0] != torch.from_numpy(ours)).float().mean())
    assert wrong[32] == 0
    assert wrong[8] == 0.75


def permuted_for_gguf(weight, heads):
    """llama.cpp, convert_hf_to_gguf.py: two halves of each head become neighbours."""
    parts = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return np.moveaxis(parts, 1, 2).reshape(weight.shape)


@examples
@given(st.integers(1, 5), st.integers(1, 8), st.booleans())
def test_gguf_files_of_llama_are_interleaved(heads, pairs, is_key):
    name = f"blk.0.attn_{'k' if is_key else 'q'}.weight"
    weight = np.random.default_rng(pairs).random((heads * 2 * pairs, 3), np.float32)
    config = config_of(5 if is_key else heads, 2 * pairs, hidden_size=3)
    config["num_key_value_heads"] = heads
    raw, tensors = weight.reshape(-1).view(np.uint8), {name: tensor_of(weight)}
    there = plan(tensors, config, "half", "interleaved").moves[name]
    got = moved(raw, tensors[name], there).view(np.float32).reshape(weight.shape)
    np.testing.assert_array_equal(got, permuted_for_gguf(weight, heads))
    back = plan(tensors, config, "interleaved", "half").moves[name]
    undone = moved(got.reshape(-1).view(np.uint8), tensors[name], back)
    np.testing.assert_array_equal(undone, raw)


def test_a_gguf_file_is_recognised_and_undone(tmp_path):
    random = np.random.default_rng(0)
    original = {"attn_q": (64, 64), "attn_k": (32, 64), "attn_v": (32, 64), "ffn_up": (96, 64)}
    original = {f"blk.0.{k}.weight": random.random(v, np.float32) for k, v in original.items()}
    writer = gguf.GGUFWriter(tmp_path / "small.gguf", "llama")
    for name, weight in original.items():
        heads = {"blk.0.attn_q.weight": 4, "blk.0.attn_k.weight": 2}.get(name)
        writer.add_tensor(name, permuted_for_gguf(weight, heads) if heads else weight)
    quantized = permuted_for_gguf(original["blk.0.attn_q.weight"], 4)
    quantized = gguf.quants.quantize(quantized, gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("blk.1.attn_q.weight", quantized, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    read = {part.name: part for part in gguf.GGUFReader(tmp_path / "small.gguf").tensors}
    tensors = {
        name: Tensor(part.tensor_type.name, tuple(map(int, part.shape[::-1])), 0, part.n_bytes)
        for name, part in read.items()
    }
    config = config_of(4, 16, num_key_value_heads=2)
    made = plan(tensors, config, "interleaved", "half")
    assert set(made.moves) == {"blk.0.attn_q.weight", "blk.0.attn_k.weight", "blk.1.attn_q.weight"}
    for name, weight in original.items():
        raw = np.array(read[name].data).reshape(-1).view(np.uint8)
        raw = moved(raw, tensors[name], made.moves[name]) if name in made.moves else raw
        np.testing.assert_array_equal(raw.view(np.float32).reshape(weight.shape), weight)
    last = "blk.1.attn_q.weight"  # whole rows of blocks: nothing is decoded
    raw = moved(np.array(read[last].data).reshape(-1), tensors[last], made.moves[last])
    wanted = gguf.quants.quantize(original["blk.0.attn_q.weight"], gguf.GGMLQuantizationType.Q8_0)
    np.testing.assert_array_equal(raw, wanted.reshape(-1))
