"""Moves of a checkpoint: against direct definitions, packed formats, and what must be refused."""

import json
import pickle

import numpy as np
import pytest
from checkpoints import OTHER, carried
from hypothesis import given, settings
from hypothesis import strategies as st

from rotary import Rotary
from rotary.checkpoint.channels import Place, runs_of
from rotary.checkpoint.files import Tensor
from rotary.checkpoint.names import Name
from rotary.checkpoint.plan import Move, plan
from rotary.configs import choose

examples = settings(max_examples=40, deadline=None, derandomize=True)
BYTES = {"F32": 4, "BF16": 2, "I32": 4, "U8": 1, "F8_E4M3": 1, "F16": 2, "I8": 1}
LAYER = "model.layers.0.self_attn."
LLAMA = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}


def shapes(dtype="F32", **given):
    """Tensors of layer 0 by the end of their name, where __ stands for a dot."""
    found = {}
    for name, shape in given.items():
        size = int(np.prod(shape)) * BYTES[dtype]
        found[LAYER + name.replace("__", ".")] = Tensor(dtype, shape, 0, size)
    return found


def turned(head, rotary_dim, source, start=0):
    """The definition: channel by channel, pair by pair, along the first axis."""
    result, pairs = head.copy(), rotary_dim // 2
    for pair in range(pairs):
        for half, interleaved in ((pair, 2 * pair), (pair + pairs, 2 * pair + 1)):
            old, new = (half, interleaved) if source == "half" else (interleaved, half)
            result[start + new] = head[start + old]
    return result


# --- every packing against its definition ---


@st.composite
def projections(draw):
    """(name, config, rows, function that moves by definition) of one way to pack heads."""
    pairs, kv_heads, group = (draw(st.integers(1, size)) for size in (6, 3, 3))
    head_dim = 2 * pairs + 2 * draw(st.integers(0, 3))
    heads, size = kv_heads * group, head_dim
    rotary_dim = 2 * pairs
    config = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim,
              "hidden_size": heads * head_dim}  # fmt: skip
    share = {"partial_rotary_factor": (rotary_dim + 0.5) / head_dim} if size > rotary_dim else {}

    def turn(x, source):
        return turned(x, rotary_dim, source)

    def heads_of(x, source):
        return np.concatenate([turn(each, source) for each in np.split(x, len(x) // size)])

    def concatenated(x, source):
        end = (heads + kv_heads) * size
        return np.concatenate([heads_of(x[:end], source), x[end:]])

    def per_head(x, source):
        blocks = np.split(x, heads)
        return np.concatenate(
            [part for b in blocks for part in (heads_of(b[: 2 * size], source), b[2 * size :])]
        )

    def grouped(x, source):
        end = (group + 1) * size
        blocks = np.split(x, kv_heads)
        return np.concatenate(
            [part for b in blocks for part in (heads_of(b[:end], source), b[end:])]
        )

    whole = {**config, "model_type": "internlm2"}
    many = (heads + 2 * kv_heads) * size
    if size == rotary_dim:
        grouped_case = ("model.layers.0.attention.wqkv.weight", whole, many, grouped)
    else:
        grouped_case = (LAYER + "q_proj.bias", {**config, **share}, heads * size, heads_of)
    return draw(
        st.sampled_from(
            [
                (LAYER + "q_proj.weight", {**config, **share}, heads * size, heads_of),
                (LAYER + "k_proj.bias", {**config, **share}, kv_heads * size, heads_of),
                (LAYER + "qkv_proj.weight", {**config, **share, "model_type": "phi3"}, many,
                 concatenated),
                (
                    "gpt_neox.layers.0.attention.query_key_value.weight",
                    {**config, "rotary_pct": rotary_dim / size + 1e-9 * bool(share),
                     "model_type": "gpt_neox"},
                    3 * heads * size,
                    per_head,
                ),
                grouped_case,
            ]
        )
    )  # fmt: skip


@examples
@given(projections(), st.sampled_from(["half", "interleaved"]), st.integers(1, 5))
def test_every_packing_moves_as_its_definition_says_and_back(case, source, columns):
    name, config, rows, by_definition = case
    columns = config["hidden_size"] if "gpt_neox" in name else columns  # it divides by the heads
    shape = (rows,) if name.endswith("bias") else (rows, columns)
    weight = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    config = {**config, "hidden_size": columns}
    after, _ = carried({name: weight}, config, source, trust_source=True)
    np.testing.assert_array_equal(after[name], by_definition(weight, source))
    back, _ = carried(after, config, OTHER[source], trust_source=True)
    np.testing.assert_array_equal(back[name], weight)


@examples
@given(
    st.integers(1, 4), st.integers(1, 5), st.integers(1, 5), st.integers(1, 4), st.integers(1, 9)
)
def test_of_a_latent_model_only_the_slices_that_rotate_move(heads, pairs, nope, value, latent):
    rope = 2 * pairs
    config = {"model_type": "deepseek_v3", "num_attention_heads": heads, "kv_lora_rank": latent,
              "hidden_size": 3, "q_lora_rank": 3,
              "qk_nope_head_dim": nope, "qk_rope_head_dim": rope, "v_head_dim": value}  # fmt: skip
    rows = {
        "q_b_proj": heads * (nope + rope),
        "kv_a_proj_with_mqa": latent + rope,
        "kv_b_proj": heads * (nope + value),
    }
    arrays = {
        f"{LAYER}{name}.weight": np.arange(3 * size, dtype=np.uint16).reshape(size, 3)
        for name, size in rows.items()
    }
    after, made = carried(arrays, config, "interleaved")
    query, key, rest = arrays
    np.testing.assert_array_equal(after[rest], arrays[rest])
    np.testing.assert_array_equal(
        after[key], turned(arrays[key], rope, "interleaved", start=latent)
    )
    for got, old in zip(np.split(after[query], heads), np.split(arrays[query], heads), strict=True):
        np.testing.assert_array_equal(got, turned(old, rope, "interleaved", start=nope))
    assert [left.tensor for left in made.left] == [rest]


@examples
@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 5), st.integers(0, 5))
def test_a_slice_anywhere_in_the_head_moves_in_place(heads, pairs, before, behind):
    spec = Rotary(head_dim=before + 2 * pairs + behind, rotary_dim=2 * pairs, start=before)
    size = heads * spec.head_dim
    runs = runs_of(Name("q", "q", 0, "weight", "query"), size, spec, choose({}))
    move = Move("q", "query", size, runs, 2 * pairs, Place(0), "half", "interleaved")
    wanted = [
        turned(head, 2 * pairs, "half", start=before) for head in np.split(np.arange(size), heads)
    ]
    np.testing.assert_array_equal(move.order, np.concatenate(wanted))
    assert move.order.dtype == np.int64


def test_four_blocks_of_codegen_hold_query_value_and_key():
    config = {"model_type": "codegen", "n_embd": 32, "n_head": 8, "rotary_dim": 2}
    tensors = {"transformer.h.0.attn.qkv_proj.weight": Tensor("F32", (96, 32), 0, 12288)}
    (move,) = plan(tensors, {**config, "rotary_dim": 4}, "interleaved", "half").moves.values()
    head = [0, 2, 1, 3]
    wanted = []
    for block in range(4):
        for part in range(6):  # two heads each of q, v and k
            still = part in (2, 3)
            wanted += [24 * block + 4 * part + channel for channel in (range(4) if still else head)]
    assert move.order.tolist() == wanted


def test_a_query_with_its_gate_moves_by_its_first_half():
    config = {"model_type": "qwen3_next", "hidden_size": 32, "num_attention_heads": 2,
              "head_dim": 8, "partial_rotary_factor": 0.5}  # fmt: skip
    (move,) = plan(shapes(q_proj__weight=(32, 32)), config, "half", "interleaved").moves.values()
    assert move.order.tolist() == [
        *(0, 2, 1, 3, *range(4, 16)),
        *(16, 18, 17, 19, *range(20, 32)),
    ]


# --- gains, adapters, bytes ---


@pytest.mark.parametrize("shape", [(16,), (64,), (4, 16)])
def test_a_gain_moves_for_one_head_for_all_and_as_a_matrix(shape):
    gain = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    after, _ = carried({LAYER + "q_norm.weight": gain}, LLAMA)
    heads = [turned(head, 16, "half") for head in gain.reshape(-1, 16)]
    np.testing.assert_array_equal(after[LAYER + "q_norm.weight"], np.reshape(heads, shape))


@pytest.mark.parametrize("middle", ["", ".default", ".speech"])
def test_of_an_adapter_the_rows_and_the_magnitude_move_and_the_inputs_stay(middle):
    random = np.random.default_rng(0)
    before, rank = f"base_model.model.{LAYER}q_proj.", 4
    arrays = {
        f"{before}lora_A{middle}.weight": random.random((rank, 64), np.float32),
        f"{before}lora_B{middle}.weight": random.random((64, rank), np.float32),
        f"{before}lora_magnitude_vector{middle}" + (".weight" if middle else ""): random.random(
            64, np.float32
        ),
        f"{before}base_layer.weight": random.random((64, 64), np.float32),
    }
    after, made = carried(arrays, LLAMA)
    a, b, magnitude, weight = arrays
    order = np.concatenate([turned(head, 16, "half") for head in np.split(np.arange(64), 4)])

    def dora(x):
        whole = x[weight] + x[b] @ x[a]
        return x[magnitude][:, None] * whole / np.linalg.norm(whole, axis=1, keepdims=True)

    np.testing.assert_array_equal(dora(after), dora(arrays)[order])
    assert [left.tensor for left in made.left] == [a]


def test_an_adapter_of_queries_alone_moves():
    tensors = shapes(q_proj__lora_A__weight=(4, 64), q_proj__lora_B__weight=(64, 4))
    assert list(plan(tensors, LLAMA, "half", "interleaved").moves) == [
        LAYER + "q_proj.lora_B.weight"
    ]


def test_a_plan_is_plain_data():
    tensors = shapes(q_proj__weight=(64, 64), q_a_proj__weight=(8, 64))
    made = plan(tensors, LLAMA, "half", "interleaved")
    told = json.loads(json.dumps(made.to_dict()))
    assert told == {
        "model": "llama",
        "source": "half",
        "target": "interleaved",
        "moves": [
            {
                "tensor": LAYER + "q_proj.weight",
                "kind": "query",
                "axis": 0,
                "size": 64,
                "heads": 4,
                "runs": [{"begin": 0, "heads": 4, "stride": 16}],
                "rotary_dim": 16,
                "bits": 0,
            }
        ],
        "left": [
            {"tensor": LAYER + "q_a_proj.weight", "reason": "a latent has no channels of heads"}
        ],
    }
    assert pickle.loads(pickle.dumps(made)) == made


# --- layers that differ ---


def layers_of(count, rows=64):
    return {
        f"model.layers.{layer}.self_attn.{name}_proj.weight": Tensor(
            "F32", (rows, 64), 0, rows * 256
        )
        for layer in range(count)
        for name in "qkvo"
    }


@pytest.mark.parametrize(
    ("family", "values", "still"),
    [
        ("smollm3", {"no_rope_layers": [1, 0, 1, 1]}, {1}),
        ("smollm3", {}, {3}),
        ("llama4_text", {"head_dim": 16, "no_rope_layer_interval": 2}, {1, 3}),
        ("cohere2", {"sliding_window": 4, "layer_types": ["sliding_attention"] * 3
                     + ["full_attention"]}, {3}),
        ("granite_swa", {"layer_rope_theta": [1e4, 0, 1e4, 0]}, {1, 3}),
    ],
)  # fmt: skip
def test_layers_without_rotation_are_left_and_listed(family, values, still):
    config = {"model_type": family, "hidden_size": 64, "num_attention_heads": 4, **values}
    source = "half" if family in ("smollm3", "granite_swa") else "interleaved"
    made = plan(layers_of(4), config, source, OTHER[source])
    names = {left.tensor: left.reason for left in made.left}
    assert set(names.values()) == {"of a layer that does not rotate"}
    assert {int(name.split(".")[2]) for name in names} == still
    assert {int(name.split(".")[2]) for name in made.moves} == {0, 1, 2, 3} - still
    assert len(made.moves) == 2 * (4 - len(still))
    assert all(move.layer == int(name.split(".")[2]) for name, move in made.moves.items())


def test_layers_of_two_head_sizes_each_move_by_their_own():
    kinds = ["sliding_attention", "full_attention"]
    config = {"model_type": "gemma4_text", "hidden_size": 64, "num_attention_heads": 4,
              "head_dim": 16, "global_head_dim": 32, "layer_types": kinds}  # fmt: skip
    tensors = {**layers_of(1), **{k.replace(".0.", ".1."): v for k, v in layers_of(1, 128).items()}}
    made = plan(tensors, config, "half", "interleaved")
    assert {name.split(".")[2]: move.rotary_dim for name, move in made.moves.items()} == {
        "0": 16,
        "1": 32,
    }
    with pytest.raises(ValueError, match="does not name the type of layer 1"):
        plan(tensors, {**config, "layer_types": kinds[:1]}, "half", "interleaved")


def test_the_output_moves_only_where_keys_are_the_values():
    kinds = ["sliding_attention", "full_attention"]
    config = {"model_type": "gemma4_text", "hidden_size": 64, "num_attention_heads": 4,
              "head_dim": 16, "global_head_dim": 16, "layer_types": kinds}  # fmt: skip
    tensors = layers_of(2)
    outputs = [name for name in tensors if "o_proj" in name]
    assert not {*plan(tensors, config, "half", "interleaved").moves} & {*outputs}
    made = plan(tensors, {**config, "attention_k_eq_v": True}, "half", "interleaved")
    assert [name for name in made.moves if name in outputs] == outputs[1:]
    assert made.moves[outputs[1]].axis == 1
    scales = {outputs[1].replace("weight", "weight_scale_inv"): Tensor("F32", (2, 2), 0, 16)}
    with pytest.raises(ValueError, match="quantized columns cannot be reordered"):
        plan({**tensors, **scales}, {**config, "attention_k_eq_v": True}, "half", "interleaved")


def test_what_no_rule_knows_and_may_have_channels_of_heads_is_listed():
    known = shapes(q_proj__weight=(64, 64), sinks=(64,), o_proj__bias=(64,))
    unknown = shapes(mixer__weight=(64, 64), blend__weight=(64, 1, 4), gain=(64,),
                     per_dim_scale=(16,))  # fmt: skip
    still = shapes(slopes=(4,), ticks=(24,), level=(), softmax_scaling__scale=(64,),
                   o_proj__weight_scale=(64,), gain_scale=(64, 4))  # fmt: skip
    made = plan({**known, **unknown, **still}, LLAMA, "half", "interleaved")
    assert [left.tensor for left in made.left] == [*unknown]
    assert f"{LAYER}mixer.weight and 3 more stays as it is" in made.warning
    assert plan({**known, **still}, LLAMA, "half", "interleaved").warning == ""


def test_the_scale_of_every_query_channel_of_dory_moves():
    """As its files name it: an attention block and an MLP block for each layer."""
    prefix, config = "backbone.layers.2.mixer.", {**LLAMA, "model_type": "dory", "head_dim": 16}
    names = {"q_proj.weight": (64, 64), "k_proj.weight": (64, 64), "sqk": (64,), "s_gate": (64,)}
    tensors = {prefix + name: Tensor("F32", shape, 0, 0) for name, shape in names.items()}
    made = plan(tensors, config, "half", "interleaved")
    assert [*made.moves] == [*tensors][:3]
    scale, query = (made.moves[prefix + name] for name in ("sqk", "q_proj.weight"))
    assert scale.order.tolist() == query.order.tolist()


@pytest.mark.parametrize(
    ("shape", "is_left"),
    {(): True, (1,): True, (4,): True, (64,): False, (16,): False, (4, 16): False}.items(),
)
def test_a_scale_of_a_cache_stays_unless_it_is_of_every_channel(shape, is_left):
    scale = {f"{LAYER}k_scale": Tensor("F32", shape, 0, 4)}
    tensors = {**shapes(q_proj__weight=(64, 64), k_proj__weight=(64, 64)), **scale}
    if is_left:
        made = plan(tensors, LLAMA, "half", "interleaved")
        assert made.left == ((f"{LAYER}k_scale", "one number for a cache"),)
        return
    with pytest.raises(ValueError, match=r"k_scale' may scale every channel of the heads, \d\d of"):
        plan(tensors, LLAMA, "half", "interleaved")
    assert plan(tensors, LLAMA, "half", "interleaved", leave=["*.k_scale"]).moves


SCALE = "q_proj.weight_scale_inv"  # one row for each block of rows


@pytest.mark.parametrize("where", ["of the model", "of its text part"])
def test_blocks_of_scales_have_the_rows_that_the_config_says(where):
    def moves(size):
        block = {"quantization_config": {"weight_block_size": [size, 64]}}
        text = {**LLAMA, **block} if where == "of its text part" else LLAMA
        config = {"model_type": "llava", "text_config": text, **(block if text is LLAMA else {})}
        tensors = shapes("F8_E4M3", q_proj__weight=(64, 64), k_proj__weight=(64, 64))
        scale = {LAYER + SCALE: Tensor("F32", (64 // size, 1), 0, 256 // size)}
        return plan({**tensors, **scale}, config, "half", "interleaved").moves

    assert [*moves(16)] == [LAYER + "q_proj.weight", LAYER + "k_proj.weight"]  # a head each
    with pytest.raises(ValueError, match="scales blocks of 8 rows, and rows would leave"):
        moves(8)
    assert [*moves(1)] == [LAYER + name for name in ("q_proj.weight", "k_proj.weight", SCALE)]


@pytest.mark.parametrize(("family", "values"), [
    ("smollm3", {"no_rope_layers": [1, 0]}),
    ("cohere2", {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}),
])  # fmt: skip
def test_a_layer_behind_the_list_of_the_config_rotates(family, values):
    config = {"model_type": family, "hidden_size": 64, "num_attention_heads": 4, **values}
    source = "half" if family == "smollm3" else "interleaved"
    made = plan(layers_of(3), config, source, OTHER[source])
    assert {move.layer for move in made.moves.values()} == {0, 2}


def test_the_norm_of_a_latent_stays():
    tensors = {LAYER + "q_b_proj.weight": Tensor("F32", (96, 24), 0, 9216),
               LAYER + "q_norm.weight": Tensor("F32", (24,), 0, 96)}  # fmt: skip
    left = plan(tensors, DEEPSEEK, "interleaved", "half").left
    assert left == ((LAYER + "q_norm.weight", "a latent has no channels of heads"),)


def test_of_a_hybrid_the_queries_beside_a_latent_move():
    config = {**DEEPSEEK, "model_type": "bailing_hybrid", "q_lora_rank": None}
    linear, latent = "model.layers.0.attention.", "model.layers.1.attention."
    rows = {linear + "q_proj": 96, linear + "k_proj": 96, latent + "q_proj": 96,
            latent + "kv_a_proj_with_mqa": 24}  # fmt: skip
    tensors = {f"{name}.weight": Tensor("F32", (count, 40), 0, 160 * count)
               for name, count in rows.items()}  # fmt: skip
    made = plan(tensors, config, "interleaved", "half")
    assert [*made.moves] == [*tensors][2:]
    reason = "linear attention does not rotate"
    assert made.left == tuple((name, reason) for name in [*tensors][:2])


# --- errors ---


@pytest.mark.parametrize(
    ("source", "target", "config", "message"),
    [
        ("half", "half", LLAMA, "both layouts are 'half'"),
        ("neox", "half", LLAMA, "source must be 'half' or 'interleaved', got 'neox'"),
        ("half", "gptj", LLAMA, "target must be 'half' or 'interleaved', got 'gptj'"),
        ("interleaved", "half", LLAMA, "of 'llama' are half, not interleaved: say --from half"),
        ("half", "interleaved", {**LLAMA, "model_type": "cohere"}, "say --from interleaved"),
        ("half", "interleaved", {"model_type": "zamba2"}, "'zamba2' does not rotate"),
        ("half", "interleaved", {"model_type": "pixtral"}, "'pixtral' is a vision tower"),
        ("half", "interleaved", {"model_type": "clvp_encoder"}, "values are rotated as well"),
        ("interleaved", "half", {"model_type": "roformer", "rotary_value": True},
         "rotary_value says values rotate as well"),
        ("half", "interleaved", {"model_type": "t5gemma"}, "its encoder rotates too"),
        ("half", "interleaved", {"model_type": "t5gemma2"}, "its encoder rotates too"),
        *[("half", "interleaved", {"model_type": name}, f"^cannot be converted: model_type {name!r}"
           " has several parts, none known as its text; only the text part of a model is converted$"
           ) for name in ("dia", "pi0", "blt")],
        ("half", "interleaved", {"_class_name": "WanTransformer3DModel"}, "^cannot be converted"),
        ("half", "interleaved", {"model_type": "lama4u"}, r"^model_type 'lama4u' is not known.*; if"
         r" the code of .* give --config \(config=\) a copy of its config.json with that model_ty"),
        ("half", "interleaved", {"model_type": "gpt2"}, "has no RoPE in transformers; if the code"),
        ("half", "interleaved", {**LLAMA, "hidden_size": 96},
         r"q_proj.weight' of shape \(64, 64\) .* has 64 output channels, and 4 heads of 24 are"),
    ],
)  # fmt: skip
def test_what_cannot_be_right_is_refused(source, target, config, message):
    with pytest.raises(ValueError, match=message):
        plan(shapes(q_proj__weight=(64, 64)), config, source, target)


def test_heads_that_do_not_make_up_a_packed_tensor_are_refused_with_both_numbers():
    message = r"has 200 output channels, and its heads need 192 = 1 x \(4 x 16 \+ 4 x 16"
    with pytest.raises(ValueError, match=message):
        plan(
            shapes(qkv_proj__weight=(200, 64)),
            {**LLAMA, "model_type": "phi3"},
            "half",
            "interleaved",
        )


def test_a_packed_tensor_with_room_for_other_key_heads_than_told_is_refused():
    config = {**LLAMA, "model_type": "phi3", "num_key_value_heads": 2}
    for rows, room in ((160, 3), (192, 4), (64, 0)):
        message = rf"room for {room} key heads beside 4 .*num_key_value_heads 2, head_dim 16"
        with pytest.raises(ValueError, match=message):
            plan(shapes(qkv_proj__weight=(rows, 64)), config, "half", "interleaved")
    assert plan(shapes(qkv_proj__weight=(128, 64)), config, "half", "interleaved").moves


def test_files_of_meta_are_interleaved_whatever_the_config_says():
    tensors = {"layers.0.attention.wq.weight": Tensor("BF16", (64, 64), 0, 8192)}
    made = plan(tensors, LLAMA, "interleaved", "half")
    assert made.moves
    assert made.code_base == ("Meta's or Mistral's own files", ("interleaved",))
    with pytest.raises(ValueError, match="Meta's or Mistral's own files are interleaved, not half"):
        plan(tensors, LLAMA, "half", "interleaved")
    assert plan(tensors, LLAMA, "half", "interleaved", trust_source=True).moves


GROUPED = {**LLAMA, "num_key_value_heads": 2, "head_dim": 16}
PHI3, NEOX = ({**GROUPED, "model_type": name} for name in ("phi3", "gpt_neox"))
FALCON = {"model_type": "falcon", "hidden_size": 64, "num_attention_heads": 4}
GROUPED_FALCON = {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}
DEEPSEEK = {"model_type": "deepseek_v3", "hidden_size": 40, "num_attention_heads": 4,
            "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
            "v_head_dim": 16}  # fmt: skip
JETMOE = {"model_type": "jetmoe", "hidden_size": 48, "num_key_value_heads": 2, "kv_channels": 16,
          "num_attention_heads": 4}  # fmt: skip
# config, name, the right shape: every form in which the converter knows queries and keys
FORMS = {
    "query": ({**GROUPED, "hidden_size": 48}, "self_attn.q_proj", (64, 48)),
    "key": (GROUPED, "self_attn.k_proj", (32, 64)),
    "fused": (PHI3, "self_attn.qkv_proj", (128, 64)),
    "fused, silent": ({**LLAMA, "head_dim": 16}, "attn.c_attn", (128, 64)),
    "fused, per head": (NEOX, "attention.query_key_value", (192, 64)),
    "fused, grouped": ({**GROUPED, "model_type": "internlm2"}, "attention.wqkv", (128, 64)),
    "fused, 4 blocks": ({"model_type": "codegen", "n_embd": 64, "n_head": 4, "rotary_dim": 8},
                        "attn.qkv_proj", (192, 64)),
    "fused, one key": (FALCON, "self_attention.query_key_value", (96, 64)),
    "fused, grouped falcon": (GROUPED_FALCON, "self_attention.query_key_value", (128, 64)),
    "gated": ({"model_type": "qwen3_next", "hidden_size": 64, "num_attention_heads": 4,
               "head_dim": 16}, "self_attn.q_proj", (128, 64)),
    "latent query": (DEEPSEEK, "self_attn.q_b_proj", (96, 24)),
    "latent key": (DEEPSEEK, "self_attn.kv_a_proj_with_mqa", (24, 40)),
    "key and value": (JETMOE, "self_attention.kv_proj", (64, 48)),
}  # fmt: skip


def planned(form, shape):
    config, module, _ = FORMS[form]
    tensors = {f"model.layers.0.{module}.weight": Tensor("F32", shape, 0, 4 * shape[0] * shape[1])}
    return plan(tensors, config, "half", "interleaved", trust_source=True)


@pytest.mark.parametrize("form", FORMS)
def test_a_transposed_weight_is_refused_in_every_form(form):
    """Its rows may make up heads as well: of the config only the right number of them does."""
    rows, columns = FORMS[form][2]
    assert len(planned(form, (rows, columns)).moves) == 1
    with pytest.raises(ValueError, match=rf"of shape \({columns}, {rows}\)") as error:
        planned(form, (columns, rows))
    assert "the config says" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("more", [-2, -1, 1, 2])
def test_heads_that_the_config_does_not_say_are_refused_in_every_form(form, more):
    (rows, columns), width = FORMS[form][2], 8 if "latent" in form else 16
    if form == "fused, silent" and more == -2:
        return  # one key head where the config is silent
    with pytest.raises(ValueError, match=r"output channels.*; the config says"):
        planned(form, (rows + more * width, columns))


@pytest.mark.parametrize("form", FORMS)
def test_weights_that_read_another_hidden_size_are_refused_in_every_form(form):
    rows, columns = FORMS[form][2]
    message = rf"has {columns + 8} input channels, and the config says \w+ \d+"
    with pytest.raises(ValueError, match=message):
        planned(form, (rows, columns + 8))


def test_a_refusal_names_the_tensor_its_shape_and_the_keys_of_the_config():
    with pytest.raises(ValueError, match=r"\(key\)") as error:
        plan(shapes(k_proj__weight=(64, 32)), GROUPED, "half", "interleaved")
    assert str(error.value) == (
        "tensor 'model.layers.0.self_attn.k_proj.weight' of shape (64, 32) (key) has 64 output "
        "channels, and 2 heads of 16 are expected; the config says hidden_size 64, "
        "num_attention_heads 4, num_key_value_heads 2, head_dim 16; it looks transposed, for a "
        "weight is (outputs, inputs)"
    )


def test_a_key_that_the_class_does_not_read_says_nothing_of_its_heads():
    config = {"model_type": "gptj", "n_embd": 64, "n_head": 4, "rotary_dim": 8,
              "num_key_value_heads": 2}  # fmt: skip
    name = "transformer.h.0.attn.k_proj.weight"
    assert plan({name: Tensor("F32", (64, 64), 0, 2**14)}, config, "interleaved", "half").moves
    with pytest.raises(ValueError, match="and 4 heads of 16 are expected"):
        plan({name: Tensor("F32", (32, 64), 0, 2**13)}, config, "interleaved", "half")


def test_of_a_list_of_head_counts_the_one_of_the_layer_counts():
    config = {**LLAMA, "head_dim": 16, "num_key_value_heads": [1, 2]}
    tensors = {f"model.layers.{i}.self_attn.k_proj.weight": Tensor("F32", (16 * rows, 64), 0, 0)
               for i, rows in ((0, 1), (1, 2))}  # fmt: skip
    assert len(plan(tensors, config, "half", "interleaved").moves) == 2
    with pytest.raises(ValueError, match=r"layers\.0.*and 1 heads of 16 are expected"):
        plan(dict(zip(tensors, [*tensors.values()][::-1], strict=True)), config, "half",
             "interleaved")  # fmt: skip


def test_a_square_weight_is_refused_where_the_weights_beside_it_are_transposed():
    config = {**LLAMA, "intermediate_size": 96}
    right = shapes(q_proj__weight=(64, 64), k_proj__weight=(64, 64))
    up, down = (f"model.layers.0.mlp.{name}_proj.weight" for name in ("up", "down"))
    wide, narrow = (Tensor("F32", shape, 0, 24576) for shape in ((96, 64), (64, 96)))
    assert plan({**right, up: wide, down: narrow}, config, "half", "interleaved").moves
    message = r"q_proj.weight' of shape \(64, 64\) looks transposed: '.*up_proj.weight' of"
    with pytest.raises(ValueError, match=message):
        plan({**right, up: narrow, down: wide}, config, "half", "interleaved")


HOSTILE = {
    "true": ({"num_key_value_heads": True}, "num_key_value_heads must be a whole number, got"),
    "a text": ({"num_key_value_heads": "2"}, "num_key_value_heads must be a whole number, got"),
    "none": ({"num_key_value_heads": 0}, "num_key_value_heads must be a whole number >= 1, got 0"),
    "less": ({"num_key_value_heads": -2}, "num_key_value_heads must be a whole number >= 1"),
    "a list of lists": ({"num_key_value_heads": [[2]]}, "num_key_value_heads must be a whole"),
    "in another object": ({"other": {"num_key_value_heads": 3}}, "and 2 heads of 16 are expected"),
    "10^9 query heads": ({"num_attention_heads": 10**9, "num_key_value_heads": None},
                         "a divisor of 1000000000 heads of 16"),
    "hidden_size is a list": ({"hidden_size": [64], "num_key_value_heads": 3},
                              "64 input channels, and the config says hidden_size \\[64\\]"),
    "quantized is a text": ({"quantization_config": "fp8"}, "quantization_config must be an obj"),
    "transposed": ({"quantization_config": {"quant_method": "eetq"}}, "stores weights transposed"),
    "blocks of 0": ({"quantization_config": {"weight_block_size": [0, 0]}}, "whole numbers >= 1"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_config_gives_one_sentence(case):
    values, message = HOSTILE[case]
    with pytest.raises(ValueError, match=message) as error:
        plan(shapes(k_proj__weight=(48, 64)), {**GROUPED, **values}, "half", "interleaved")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("parameter", ["ia3_l", "weight_g", "weight_mask"])
def test_no_advice_to_leave_a_parameter_of_a_key_that_moves(parameter):
    tensors = shapes(k_proj__weight=(32, 64), q_proj__weight=(64, 64))
    tensors[f"model.layers.0.self_attn.k_proj.{parameter}"] = Tensor("F32", (32, 1), 0, 0)
    with pytest.raises(ValueError, match=f"how '{parameter}' is applied .* merge it into"):
        plan(tensors, GROUPED, "half", "interleaved")


def test_a_layer_number_of_5000_digits_is_no_layer():
    tensors = {f"model.layers.{'9' * 5000}.self_attn.k_proj.weight": Tensor("F32", (32, 64), 0, 0)}
    with pytest.raises(ValueError, match="looks like a query or a key, but its name is not known"):
        plan(tensors, GROUPED, "half", "interleaved")
