"""`rotary.testing.check`: published bugs of other programs, each caught and named."""

import math
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from published import scaled

import rotary
from rotary import Rotary
from rotary.identify import identify
from rotary.testing import CASES, WrongRotationError, check
from rotary.testing.faults import faults

CONFIGS = Path(__file__).parent / "configs"


def config(name, layer_type=None, **options):
    return rotary.from_hf_config(CONFIGS / f"{name}.json", layer_type, **options)


def codes(fn, spec, **options):
    """The codes of what is wrong; () if the function passes."""
    try:
        check(fn, spec, **options)
    except WrongRotationError as error:
        return error.codes
    return ()


# --- the textbook formula, written here alone ---


def ladder(base, d, width=None):
    return base ** (-np.arange(0, d, 2) / (width or d))


def turned(x, angle, layout="half", amplitude=1.0, written=None):
    """x rotated by angle (..., seq, pairs), from its first channel on; the rest is kept."""
    d = 2 * angle.shape[-1]
    halves = (slice(0, d // 2), slice(d // 2, d))
    neighbours = (slice(0, d, 2), slice(1, d, 2))
    first, second = halves if layout == "half" else neighbours
    one, two = halves if (written or layout) == "half" else neighbours
    cos, sin = np.cos(angle) * amplitude, np.sin(angle) * amplitude
    u, v = x[..., first], x[..., second]
    y = x.copy()
    y[..., one], y[..., two] = u * cos - v * sin, v * cos + u * sin
    return y


def half(x):
    """What sin multiplies, for 128 channels in halves."""
    return np.concatenate([-x[..., 64:], x[..., :64]], -1)


def rope(inv_freq, layout="half", amplitude=1.0, written=None):
    def rotate(x, positions):
        return turned(x, positions[:, None] * inv_freq, layout, amplitude, written)

    return rotate


def yarn(base, d, factor, trained, truncate=True, amplitude=None):
    def dimension(turns):
        return d * math.log(trained / (turns * math.tau)) / (2 * math.log(base))

    low, high = dimension(32), dimension(1)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    kept = 1 - np.clip((np.arange(d // 2) - low) / (high - low), 0, 1)
    size = 0.1 * math.log(factor) + 1 if amplitude is None else amplitude
    return rope(ladder(base, d) * (kept + (1 - kept) / factor), amplitude=size)


def llama3(base, d, factor, trained):
    w = ladder(base, d)
    kept = np.clip((trained * w / math.tau - 1) / 3, 0, 1)
    return rope(w * (kept + (1 - kept) / factor))


def by_axis(inv_freq, axes):
    """f(x, positions) with positions (seq, axes)."""
    return lambda x, positions: turned(x, positions[:, axes] * inv_freq)


QWEN3, LLAMA31, LLAMA32 = config("qwen3-8b"), config("llama-3.1-8b"), config("llama-3.2-1b")
PHI2, NEOX, GPT_OSS = config("phi-2"), config("gpt-neox-20b"), config("gpt-oss-20b")
QWEN_YARN, QWEN3_VL = config("qwen2.5-7b-yarn"), config("qwen3-vl-8b")
QWEN25_VL, GEMMA4 = config("qwen2.5-omni-7b"), config("gemma-4-31b", "full_attention")
PHI35, COMMAND_R = config("phi-3.5-mini"), config("command-r-v01")
YARN = (1e6, 128, 4.0, 32768)  # QWEN_YARN
IN_TURN = [i % 3 if i < 60 else 0 for i in range(64)]  # QWEN3_VL: (24, 20, 20)
PHI35_LADDER, PHI35_SIZE = ladder(1e4, 96), math.sqrt(1 + math.log(32) / math.log(4096))


def dynamic(factor, trained, d=64):
    return scaled("dynamic", d, factor, trained)


def grown(length, factor, trained, d=64):
    growth = max(1.0, factor * length / trained - (factor - 1))
    return ladder(1e4 * growth ** (d / (d - 2)), d)


RIGHT = {  # the formulas above without a fault: that of the config
    "Qwen3": (QWEN3, rope(ladder(1e6, 128))),
    "Llama 3.1": (LLAMA31, llama3(5e5, 128, 8.0, 8192)),
    "Llama 3.2": (LLAMA32, llama3(5e5, 64, 32.0, 8192)),
    "Phi-2": (PHI2, rope(ladder(1e4, 32))),
    "gpt-oss": (GPT_OSS, yarn(150_000.0, 64, 32.0, 4096, truncate=False)),
    "Qwen2.5 YaRN": (QWEN_YARN, yarn(*YARN)),
    "Qwen3-VL": (QWEN3_VL, by_axis(ladder(5e6, 128), IN_TURN)),
    "Command R": (COMMAND_R, rope(ladder(8e6, 128), "interleaved")),
    "Phi-3.5 long": (
        PHI35,
        lambda x, p: rope(
            PHI35_LADDER / PHI35.params["long_factor" if p.max() >= 4096 else "short_factor"],
            amplitude=PHI35_SIZE,
        )(x, p),
    ),
    "dynamic": (dynamic(4.0, 2048), lambda x, p: rope(grown(p.max() + 1, 4.0, 2048))(x, p)),
}


@pytest.mark.parametrize("name", RIGHT)
def test_the_formula_of_the_config_passes(name):
    spec, fn = RIGHT[name]
    check(fn, spec)


def held_as(dtype):
    return lambda values: np.asarray(values).astype(dtype).astype(np.float64)


BF16 = held_as(ml_dtypes.bfloat16)


def no_heads_alone(x, positions):
    return x.copy() if x.shape[1] == 1 else rope(ladder(1e6, 128))(x, positions)


def first_row_alone(x, positions):
    y = rope(ladder(1e6, 128))(x, positions)
    if x.shape[2] == 1:
        y[1:] = x[1:]
    return y


def proportional_slice(x, positions):
    return turned(x, positions[:, None] * ladder(1e6, 512)[:64])


def double_cos(x, positions):
    angle = np.tile(positions[:, None] * ladder(1e6, 128), 2)
    return x * np.cos(np.cos(angle)) + half(x) * np.sin(np.sin(angle))


def adjacent_tables(x, positions):
    angle = np.repeat(positions[:, None] * ladder(1e6, 128), 2, -1)
    return x * np.cos(angle) + half(x) * np.sin(angle)


def real_part(x, positions):
    return x * np.cos(np.tile(positions[:, None] * ladder(1e6, 128), 2))


def ramp_inverted(base, d, factor, trained):
    w = ladder(base, d)
    right = rotary.inv_freq(QWEN_YARN)[0]
    return rope(w + w / factor - right, amplitude=0.1 * math.log(factor) + 1)


BASE_AS_FACTOR = yarn(1e6, 128, 1e6, 32768, amplitude=0.1 * math.log(1e6) + 1)

# where it was published: the spec of a model, what the program computes, the code it must have
PUBLISHED = {
    "ik_llama.cpp#2290, 39 architectures as NORM": (
        QWEN3, rope(ladder(1e6, 128), "interleaved"), "other_layout"),
    "onnxruntime#26758, interleaved not passed on": (
        COMMAND_R, rope(ladder(8e6, 128)), "other_layout"),
    "vllm-metal#44, interleaved pairs written as halves": (
        COMMAND_R, rope(ladder(8e6, 128), "interleaved", written="half"), "other_layout"),
    "vllm-ascend#12820, mrope_interleaved taken for the pair layout": (
        QWEN3_VL,
        lambda x, p: turned(x, p[:, IN_TURN] * ladder(5e6, 128), "interleaved"), "other_layout"),
    "MNN#4133, ollama#12807, sections in blocks for Qwen3-VL": (
        QWEN3_VL, by_axis(ladder(5e6, 128), [0] * 24 + [1] * 20 + [2] * 20), "other_sections"),
    "vllm-omni#1784, height and width swapped": (
        QWEN3_VL, by_axis(ladder(5e6, 128), [[0, 2, 1][a] for a in IN_TURN]), "other_axis_order"),
    "mlx-lm, M-RoPE read as one axis": (
        QWEN3_VL, by_axis(ladder(5e6, 128), [0] * 64), "axes_ignored"),
    "coreai-models#66, proportional rotated as a slice": (
        GEMMA4, proportional_slice, "proportional_as_slice"),
    "vllm#30384, partial_rotary_factor taken twice": (
        PHI2, rope(ladder(1e4, 12)), "partial_twice"),
    "vllm#37633, partial_rotary_factor lost": (NEOX, rope(ladder(1e4, 96)), "partial_lost"),
    "DeepSpeed#8345, sglang#14745, rope_theta falls back to 10000": (
        QWEN3, rope(ladder(1e4, 128)), "other_base"),
    "vllm-ascend#6612, a draft model with the table of the main model": (
        LLAMA31, llama3(1e6, 128, 8.0, 8192), "other_base"),
    "mlx-vlm#1710, CTranslate2 4.8.5, rope_scaling ignored": (
        LLAMA31, rope(ladder(5e5, 128)), "scaling_lost"),
    "Megatron-LM#6305, the factor of Llama 3.1 for Llama 3.2": (
        LLAMA32, llama3(5e5, 64, 8.0, 8192), "other_llama3"),
    "vllm#27722, sglang#14270, truncate ignored": (
        GPT_OSS, yarn(150_000.0, 64, 32.0, 4096), "other_truncate"),
    "vLLM 0.33, M-RoPE with YaRN from 4 times the trained length": (
        QWEN_YARN, yarn(1e6, 128, 4.0, 4 * 32768), "other_trained_length"),
    "sglang#38786, the base given as the factor": (QWEN_YARN, BASE_AS_FACTOR, "base_as_factor"),
    "vllm#48621, mlx-lm#1507, attention_factor dropped": (
        QWEN_YARN, yarn(*YARN, amplitude=1.0), "no_attention_factor"),
    "LMCache 0.5.6, attention_factor twice": (
        QWEN_YARN, yarn(*YARN, amplitude=(0.1 * math.log(4) + 1) ** 2), "attention_factor_twice"),
    "litgpt 0.5.13, the ramp inverted": (QWEN_YARN, ramp_inverted(*YARN), "ramp_inverted"),
    "TensorRT-LLM#16378, rotated twice": (
        GPT_OSS,
        lambda x, p: RIGHT["gpt-oss"][1](RIGHT["gpt-oss"][1](x, p), p), "rotated_twice"),
    "vllm#3488, dynamic NTK runs as plain RoPE": (
        dynamic(4.0, 2048), rope(ladder(1e4, 64)), "scaling_lost"),
    "SGLang, dynamic NTK always at its longest": (
        dynamic(4.0, 2048), rope(grown(8192, 4.0, 2048)), "always_long"),
    "keras-hub 0.32, dynamic divides every frequency": (
        dynamic(4.0, 2048), rope(ladder(1e4, 64) / 4 ** (64 / 62)), "growth_divides"),
    "vLLM, mlx-lm, LongRoPE always long": (
        PHI35,
        rope(PHI35_LADDER / PHI35.params["long_factor"], amplitude=PHI35_SIZE), "always_long"),
    "phimoe in transformers, the short list beyond the trained length": (
        PHI35,
        rope(PHI35_LADDER / PHI35.params["short_factor"], amplitude=PHI35_SIZE), "always_short"),
    "candle#3520, positions in bfloat16": (
        QWEN3, lambda x, p: rope(ladder(1e6, 128))(x, BF16(p)), "bfloat16_positions"),
    "transformers#29496, Megatron-LM#744, inv_freq in bfloat16": (
        QWEN3, rope(BF16(ladder(1e6, 128))), "bfloat16_frequencies"),
    "Megatron-LM#7465, cos of cos": (QWEN3, double_cos, "cos_of_cos"),
    "vjepa2#15, ERNIE-Image#6, repeat_interleave with half pairs": (
        QWEN3, adjacent_tables, "tables_in_other_layout"),
    "Llama 4's vision tower, a complex table cast to a real one": (
        QWEN3, real_part, "sin_missing"),
    "Liger-Kernel#342, one head is not rotated": (QWEN3, no_heads_alone, "depends_on_shape"),
    "mlx#3494, only the first row at one token": (QWEN3, first_row_alone, "depends_on_shape"),
    "Automodel#2377, positions by token index": (
        QWEN3, lambda x, p: rope(ladder(1e6, 128))(x, np.arange(len(p))), "positions_ignored"),
    "flash-attn, nothing is rotated past the table": (
        QWEN3, lambda x, p: rope(ladder(1e6, 128))(x, np.where(p < 2048, p, 0)), "not_rotated_far"),
    "Megatron, positions clamped at the end of the table": (
        QWEN3, lambda x, p: rope(ladder(1e6, 128))(x, np.minimum(p, 2047)), "positions_clamped"),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_bug_is_caught_and_named(name):
    spec, fn, code = PUBLISHED[name]
    assert codes(fn, spec)[0] == code


UNSEEN = [  # identify finds nothing to say about these: they are good RoPEs of another model
    "DeepSpeed#8345, sglang#14745, rope_theta falls back to 10000",
    "mlx-vlm#1710, CTranslate2 4.8.5, rope_scaling ignored",
    "Megatron-LM#6305, the factor of Llama 3.1 for Llama 3.2",
    "vllm#30384, partial_rotary_factor taken twice",
]


@pytest.mark.parametrize("name", UNSEEN)
def test_only_the_spec_shows_these(name):
    spec, fn, _ = PUBLISHED[name]
    assert identify(fn, spec.head_dim, max_position=4095).findings == ()


MODELS = {**{name: spec for name, (spec, _) in RIGHT.items()}, "Gemma 4": GEMMA4}


@pytest.mark.parametrize("name", MODELS)
def test_every_known_fault_is_named_for_this_model(name):
    """By its own code, or that of one before it which gives the same numbers."""
    spec, before = MODELS[name], {}
    for code, _, wrong in faults(spec):
        before.setdefault(code, []).append(wrong)

        def fn(x, positions, wrong=wrong):
            return rotary.apply(wrong, x, positions=positions, seq_dim=-2)

        found = codes(fn, spec)
        if found and found[0] != code:
            alike = [alike for alike in before[found[0]] if is_same(alike, wrong)]
            assert alike, (code, found)
        if not found:
            assert is_same(wrong, spec), code


def is_same(one, two):
    """Whether two specs rotate alike at near positions, of short rows and of long ones."""
    x = np.random.default_rng(0).standard_normal((1, 1, 40, one.head_dim)).astype(np.float32)
    positions = np.arange(40) if one.num_axes == 1 else rotary.positions.grid(40, 1, 1)[:, [0] * 3]
    results = [
        rotary.apply(spec, x, positions=positions, seq_dim=-2, seq_len=length)
        for length in (40, 200_000)
        for spec in (one, two)
    ]
    return all(np.abs(a - b).max() < 1e-2 for a, b in (results[:2], results[2:]))


# --- real programs ---


def test_llama_of_transformers_before_and_after_a_cast_to_bfloat16():
    torch = pytest.importorskip("torch")
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    embedding = llama.LlamaRotaryEmbedding(llama.LlamaConfig(head_dim=64, hidden_size=256))

    def fn(x, positions):
        cos, sin = embedding(x.float(), positions)
        return llama.apply_rotary_pos_emb(x, x, cos, sin)[0]

    spec = Rotary(head_dim=64)
    check(fn, spec)
    embedding.to(torch.bfloat16)
    assert codes(fn, spec) == ("bfloat16_frequencies",)


def test_the_function_of_transformers_that_is_given_tables():
    pytest.importorskip("torch")
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    check(llama.apply_rotary_pos_emb, LLAMA31)
    assert codes(llama.apply_rotary_pos_emb, COMMAND_R) == ("other_layout",)
    cohere = pytest.importorskip("transformers.models.cohere.modeling_cohere")
    check(cohere.apply_rotary_pos_emb, COMMAND_R)
    nanochat = pytest.importorskip("transformers.models.nanochat.modeling_nanochat")
    check(nanochat.apply_rotary_pos_emb, Rotary(head_dim=64, sign=-1))
    assert codes(nanochat.apply_rotary_pos_emb, Rotary(head_dim=64)) == ("clockwise",)


def test_phimoe_of_transformers_keeps_the_short_list():
    phimoe = pytest.importorskip("transformers.models.phimoe.modeling_phimoe")
    spec = config("phi-3.5-moe")
    given = phimoe.PhimoeConfig.from_pretrained(CONFIGS / "phi-3.5-moe.json")
    embedding = phimoe.PhimoeRotaryEmbedding(given)

    def fn(x, positions):
        return phimoe.apply_rotary_pos_emb(x, x, *embedding(x, positions))[0]

    check(fn, spec, max_position=4095)
    assert codes(fn, spec) == ("always_short",)


# --- what is asked ---


def right(x, positions):
    return rope(ladder(1e6, 128))(x, positions)


def remembering():
    seen = [0]

    def fn(x, positions):
        seen[0] = max(seen[0], int(positions.max()))
        return rope(ladder(1e6 if seen[0] < 3000 else 2e6, 128))(x, positions)

    return fn


def by_row(change=lambda positions: positions):
    """f(x, positions) that takes one row of positions for each row of x, and no other."""

    def fn(x, positions):
        batch, seq = positions.shape
        return turned(x, change(positions).reshape(batch, 1, seq, 1) * ladder(1e6, 128))

    return fn


def with_positions(change):
    """f(x, positions) whose angles (..., seq, pairs) are changed before they meet the heads."""
    return lambda x, positions: turned(x, change(positions[..., None] * ladder(1e6, 128)))


def with_tables(change):
    """f(q, k, cos, sin) whose tables (..., seq, 128) are changed before they meet the heads."""

    def rotate(x, cos, sin):
        return x * change(cos) + half(x) * change(sin)

    return lambda q, k, cos, sin: (rotate(q, cos, sin), rotate(k, cos, sin))


def on_all_heads(t):
    return t[..., None, :, :]


ROWS_RIGHT = [with_positions(on_all_heads), with_tables(on_all_heads)]


def for_rows(change):
    """f(x, positions) that is right for one row of positions, and not for two."""
    return lambda x, p: right(x, p) if p.ndim == 1 else change(x, p)


ROWS_WRONG = [
    with_positions(lambda t: t[0] if t.ndim == 3 else t),
    with_tables(lambda t: on_all_heads(t[:1] if t.ndim == 3 else t)),
]


def in_place(x, positions):
    x[...] = right(x, positions)
    return x


def into_one_buffer():
    buffers = {}

    def fn(x, positions):
        buffer = buffers.setdefault(x.shape, np.empty_like(x))
        buffer[...] = right(x, positions)
        return buffer

    return fn


def once_for_each_head_of_q(q, k, cos, sin):
    """In place: a head of k that several heads of q share is rotated several times."""
    for _ in range(q.shape[1] // k.shape[1]):
        k = ROWS_RIGHT[1](q, k, cos, sin)[1]
    return ROWS_RIGHT[1](q, k, cos, sin)[0], k


def where(condition, change=lambda x, p: x.copy()):
    return lambda x, p: change(x, p) if condition(x, p) else right(x, p)


WRONG_IN = {  # a case: a function that is right in all others, made anew for each test
    "near": lambda: where(lambda x, p: 6 in p and len(p) == 16),
    "gaps": lambda: where(lambda x, p: (np.diff(p) != 1).any()),
    "row": lambda: where(lambda x, p: len(p) > 900),
    "one head": lambda: where(lambda x, p: x.shape[1] == 1),
    "one token": lambda: where(lambda x, p: x.shape[2] == 1),
    "batch": lambda: where(lambda x, p: x.shape[0] == 3),
    "rows": lambda: by_row(lambda p: p[:1].repeat(len(p), axis=0)),
    "key heads": lambda: once_for_each_head_of_q,
    "far": lambda: where(lambda x, p: p.max() > 2000),
    "again": remembering,
    "input": lambda: in_place,
    "output": into_one_buffer,
}


@pytest.mark.parametrize("case", CASES)
def test_a_function_that_is_wrong_in_one_case_alone(case):
    left = {"near": ["near", "again"], "far": ["far", "row"], "again": ["far", "again"]}
    found = codes(WRONG_IN[case](), QWEN3, skip=[])
    assert found != ()
    check(WRONG_IN[case](), QWEN3, skip=left.get(case, [case]))


def test_a_batch_whose_rows_have_positions_of_their_own_passes():
    check(by_row(), QWEN3)
    for form in ROWS_RIGHT:
        check(form, QWEN3)


def test_rows_that_are_not_rotated_by_their_own_positions_are_named():
    """Functions that are right for one row of positions, or of tables."""
    for form in ROWS_WRONG:
        found = identify(form, 128)
        assert codes(form, QWEN3) == found.codes == ("rows_share_positions",)
        assert found.is_rotation
        check(form, QWEN3, skip=["rows"])


ROWS_LOST = {
    "nothing": lambda x, p: x * 0,
    "NaN": lambda x, p: x * np.nan,
    "rows swapped": lambda x, p: by_row()(x, p[::-1]),
    "the mean of both": lambda x, p: right(x, p.mean(axis=0)),
    "the last row for all": lambda x, p: right(x, p[-1]),
}


@pytest.mark.parametrize("name", ROWS_LOST)
def test_an_answer_that_is_neither_right_nor_that_of_the_first_row_is_named(name):
    assert codes(for_rows(ROWS_LOST[name]), QWEN3, max_position=64) == ("rows_differ",)


def test_a_function_for_one_row_that_refuses_two_or_takes_them_for_axes_passes():
    def one_row(x, positions):
        if positions.ndim != 1:
            raise TypeError("positions of one axis")
        return right(x, positions)

    def one_row_of_two_axes(x, positions):
        if len(positions) != 1:
            raise TypeError("positions (1, seq)")
        return right(x, positions[0])

    def two_axes(x, positions):
        """Positions (seq,), or one row for each of two axes, as M-RoPE takes them."""
        if positions.ndim == 1:
            return right(x, positions)
        return turned(x, positions[np.arange(64) % 2].T * ladder(1e6, 128))

    def one_offset(x, positions):
        return right(x, positions[0] + np.arange(x.shape[-2]))

    check(one_offset, QWEN3, skip=["gaps"], max_position=64)
    in_heads = with_positions(lambda t: t), with_tables(lambda t: t)
    for fn in (one_row, one_row_of_two_axes, two_axes, *in_heads):
        check(fn, QWEN3, max_position=64)
    assert identify(two_axes, 128).findings == ()


def test_what_is_skipped_is_not_named_either():
    """In place, and of another base: only the base is wrong."""

    def fn(x, positions):
        x[...] = rope(ladder(1234.0, 128))(x, positions)
        return x

    assert codes(fn, QWEN3) == ("overwrites_input", "other_base")
    assert codes(fn, QWEN3, skip=["input"]) == ("other_base",)


def test_two_faults_at_once_are_both_told():
    spec = Rotary(head_dim=64, base=5e5)
    assert set(codes(rope(ladder(3e4, 64), "interleaved"), spec)) == {
        *("other_base", "other_layout", "other_out_layout"),
    }


def test_k_is_asked_as_well():
    wrong = rope(ladder(1e6, 128), "interleaved")
    check((right, right), QWEN3)
    assert codes((right, wrong), QWEN3) == ("q_k_differ",)

    def apply(q, k, cos, sin):
        return q * cos + half(q) * sin, k

    assert codes(apply, QWEN3) != ()


Q_AND_K_MIXED = {  # what q and k become, and the names of those that are wrong
    "k beside a half of q": (
        lambda q, k, c, s: (q * c + half(q) * s, k * c + half(q) * s), ["k depends on q"]),
    "k is q": (lambda q, k, c, s: (q * c + half(q) * s,) * 2, ["k depends on q, and not on k"]),
    "swapped": (
        lambda q, k, c, s: (k * c + half(k) * s, q * c + half(q) * s),
        ["q depends on k, and not on q", "k depends on q, and not on k"]),
}  # fmt: skip


@pytest.mark.parametrize("name", Q_AND_K_MIXED)
def test_a_result_for_k_that_is_made_of_q_is_named(name):
    mixed, said = Q_AND_K_MIXED[name]

    def apply(q, k, cos, sin):
        return mixed(q, k, on_all_heads(cos), on_all_heads(sin))

    with pytest.raises(WrongRotationError) as error:
        check(apply, QWEN3)
    texts = [text for code, text in error.value.findings if code == "mixes_q_k"]
    assert len(texts) == len(said)
    assert all(words in text for words, text in zip(said, texts, strict=True))
    found = identify(apply, 128)
    assert "mixes_q_k" in found.codes
    assert not found.is_rotation


def test_a_function_that_takes_as_many_heads_of_k_as_of_q_alone_passes():
    def stacked(q, k, cos, sin):
        q, k = np.stack([q, k]) * on_all_heads(cos) + half(np.stack([q, k])) * on_all_heads(sin)
        return q, k

    check(stacked, QWEN3)


@pytest.mark.parametrize("order", ["tile", "repeat", "half"])
def test_tables_in_any_order_of_their_columns(order):
    def apply(q, k, cos, sin):
        if cos.shape[-1] != (64 if order == "half" else 128):
            raise ValueError("another width")
        c, s = (t[..., None, :, ::2] if order == "repeat" else t[..., None, :, :64]
                for t in (cos, sin))  # fmt: skip
        u, v, w, z = q[..., :64], q[..., 64:], k[..., :64], k[..., 64:]
        return (np.concatenate([u * c - v * s, v * c + u * s], -1),
                np.concatenate([w * c - z * s, z * c + w * s], -1))  # fmt: skip

    check(apply, QWEN3)
    check(apply, QWEN_YARN)  # its attention factor is not that of this function
    assert codes(apply, Rotary(head_dim=128, sign=-1)) == ("clockwise",)
    narrow = Rotary(head_dim=128, rotary_dim=64)
    if order == "half":
        assert codes(apply, narrow) != ()  # and NumPy's warning of equal frequencies stays inside
    else:
        with pytest.raises(ValueError, match="another width"):
            check(apply, narrow)


def test_a_spec_with_axes_and_tables():
    """Which axis a pair reads is up to the tables."""

    def apply(q, k, cos, sin):
        cos, sin = cos[..., None, :, :], sin[..., None, :, :]
        return q * cos + half(q) * sin, k * cos + half(k) * sin

    check(apply, QWEN3_VL)


def test_the_tokens_may_be_at_axis_minus_3():
    def fn(x, positions):  # (batch, seq, heads, head_dim)
        return right(x.swapaxes(1, 2), positions).swapaxes(1, 2)

    check(fn, QWEN3, seq_dim=-3)
    with pytest.raises(ValueError, match="no way to call it works"):
        check(fn, QWEN3)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_x_of_every_dtype(dtype):
    pytest.importorskip("torch")

    def fn(x, positions):
        return rotary.apply(LLAMA31, x, positions=positions, seq_dim=-2)

    check(fn, LLAMA31, dtype=dtype, library="torch")
    assert codes(fn, LLAMA32.from_dict({**LLAMA31.to_dict(), "base": 1e4}), dtype=dtype,
                 library="torch")[0] == "other_base"  # fmt: skip


def test_how_far_and_how_exact_is_for_the_caller_to_say():
    in_float32 = lambda x, p: turned(x, (np.float32(p)[:, None] * np.float32(ladder(1e6, 128))))  # noqa: E731
    check(in_float32, QWEN3)
    assert codes(in_float32, QWEN3, tolerance=1e-6) == ("float32_angles",)
    assert codes(in_float32, QWEN3, tolerance=1e-9) == ("differs",)  # cos and sin are rounded too
    assert codes(in_float32, QWEN3, max_position=2**20) == ("float32_angles",)
    check(in_float32, QWEN3, max_position=2**20, tolerance=0.2)


def test_only_what_concerns_a_wrong_case_is_named():
    """As in transformers: float32 angles, and the length of the batch, which no row here shows."""

    def fn(x, positions):
        growth = 2 * max(positions.max() + 1, 2**17) / 2**17 - 1
        angle = np.float32(positions)[..., None] * np.float32(ladder(1e4 * growth ** (64 / 62), 64))
        return turned(x, angle[:, None])

    spec = dynamic(2.0, 2**17)
    assert "depends_on_batch" in identify(fn, 64).codes
    with pytest.raises(WrongRotationError, match="allowed by tolerance=0") as error:
        check(fn, spec)
    assert error.value.codes == ("float32_angles",)
    check(fn, spec, skip=["far"])
    text = error.value.findings[0].text
    check(fn, spec, tolerance=float(text.split("tolerance=")[1].split(",")[0]))
    shared = lambda x, p: fn(x, p[:1].repeat(len(p), axis=0))  # noqa: E731
    assert codes(shared, spec) == ("rows_share_positions", "float32_angles")


def test_a_row_length_that_is_fixed():
    spec = dynamic(4.0, 2048)
    fixed = rope(grown(8192, 4.0, 2048))
    check(fixed, spec, seq_len=8192)
    assert codes(fixed, spec) == ("always_long",)


def test_a_far_position_that_is_refused():
    def table(x, positions):
        return right(x, np.arange(2048)[positions])

    check(table, QWEN3, max_position=2047)
    with pytest.raises(
        WrongRotationError, match=r"position 2,048: .*index 2048 is out of"
    ) as error:
        check(table, QWEN3)
    assert error.value.codes == ("far_refused",)


def test_the_error_says_where_the_first_difference_is():
    with pytest.raises(WrongRotationError) as error:
        check(where(lambda x, p: p.max() == 4095), QWEN3)
    assert "\n  differs: for a reason not known\n  " in str(error.value)
    assert "1 of 17 calls differ (far); the first: row 0, head " in str(error.value)
    assert ", position 409" in str(error.value)


BAD = [
    ((right, {"head_dim": 128}), {}, TypeError, "spec must be a Rotary, got dict"),
    ((3, QWEN3), {}, ValueError, "fn must be a callable"),
    ((right, QWEN3), {"skip": ["gap"]}, ValueError, "near, gaps"),
    ((right, QWEN3), {"skip": "gaps"}, ValueError, "must be a list"),
    ((right, QWEN3), {"skip": [["gaps"]]}, ValueError, "near, gaps"),
    ((right, QWEN3), {"tolerance": 0}, ValueError, "above 0 and below 1, got 0"),
    ((right, QWEN3), {"tolerance": "a"}, ValueError, "tolerance must be a number .* got 'a'"),
    ((right, QWEN3), {"seq_len": "8"}, ValueError, "seq_len must be a whole number"),
    ((right, QWEN3), {"max_position": 8}, ValueError, "whole number >= 31, got 8"),
    ((right, QWEN3), {"dtype": "int8"}, ValueError, "dtype must be one of"),
    ((lambda x, p: x[0], QWEN3), {}, ValueError, "no way to call it works"),
    ((right, LLAMA32), {}, ValueError, "no way to call it works"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "options", "kind", "text"), BAD)
def test_bad_input_is_refused_in_one_sentence(arguments, options, kind, text):
    with pytest.raises(kind, match=text) as error:
        check(*arguments, **options)
    assert "\n" not in str(error.value)
