"""The plug-in of SGLang, on small stand-ins of its classes and of its registry of hooks.

tests/peers/in_sglang.py runs the same in SGLang itself.
"""

import functools
import logging

import pytest
import stand_ins
import torch

HEAD, ROWS, TOKENS = 8, 64, 6


class Rope(torch.nn.Module):
    """What SGLang's classes share; each forward says that it ran."""

    def __init__(self, rotary_dim=HEAD, is_neox_style=True, dtype=torch.float32, **others):
        super().__init__()
        self.head_size, self.rotary_dim, self.is_neox_style = HEAD, rotary_dim, is_neox_style
        angles = torch.outer(torch.arange(ROWS), 100.0 ** -(torch.arange(rotary_dim // 2) / 4))
        self.cos_sin_cache = torch.cat([angles.cos(), angles.sin()], -1).to(dtype)
        vars(self).update(others)


class RotaryEmbedding(Rope):
    def forward_native(self, positions, query, key, offsets=None, fused_set_kv_buffer_arg=None):
        return "SGLang's own"

    def forward_cpu(self, positions, query, key, offsets=None, fused_set_kv_buffer_arg=None):
        return "SGLang's own"

    def forward_cuda(self, positions, query, key, offsets=None, fused_set_kv_buffer_arg=None):
        return "SGLang's own"


class MRotaryEmbedding(RotaryEmbedding):
    def forward_native(self, positions, query, key, fused_set_kv_buffer_arg=None):
        return "SGLang's own"

    def forward_triton(self, positions, query, key):
        return "SGLang's own"


class DeepseekScalingRotaryEmbedding(RotaryEmbedding):
    def forward_native(self, positions, query, key, offsets=None):
        return "SGLang's own"


class Phi3LongRoPEScaledRotaryEmbedding(torch.nn.Module):  # has the half layout alone
    def __init__(self, short, long):
        super().__init__()
        self.head_size = self.rotary_dim = HEAD
        self.original_max_position_embeddings = ROWS
        self.long_short_cos_sin_cache = torch.cat([short, long])

    def forward(self, positions, query, key, offsets=None):
        return "SGLang's own"


CLASSES = (RotaryEmbedding, MRotaryEmbedding, DeepseekScalingRotaryEmbedding,
           Phi3LongRoPEScaledRotaryEmbedding)  # fmt: skip


class HookType:
    AROUND = "around"


class HookRegistry:
    """SGLang's: a hook of type AROUND is given the original method, then its arguments."""

    @staticmethod
    def register(target, hook, hook_type):
        assert hook_type == HookType.AROUND
        owner, name = target.split(".")[-2:]
        owner = next(each for each in CLASSES if each.__name__ == owner)
        original = vars(owner)[name]
        patch.setattr(owner, name, functools.wraps(original)(
            lambda *args, **named: hook(original, *args, **named)))  # fmt: skip


@pytest.fixture
def ours(monkeypatch):
    global patch
    patch = monkeypatch
    rope = "sglang.srt.layers.rotary_embedding"
    folders = ("sglang", "sglang.srt", "sglang.srt.plugins", "sglang.srt.layers", rope)
    modules = {
        **{name: {} for name in folders},
        "sglang.srt.plugins.hook_registry": {"HookRegistry": HookRegistry, "HookType": HookType},
        f"{rope}.base": {"RotaryEmbedding": RotaryEmbedding},
        f"{rope}.mrope": {"MRotaryEmbedding": MRotaryEmbedding},
        f"{rope}.rope_variant": {each.__name__: each for each in CLASSES[2:]},
    }  # fmt: skip
    ours = stand_ins.install(monkeypatch, modules, "rotary.integrations.sglang")
    monkeypatch.setenv("SGLANG_PLUGINS", "rotary")
    return ours


@pytest.fixture
def on(ours):
    ours.register()
    return ours


def qkv():
    """q of 4 heads and k of 2, as parts of one row of a projection."""
    return torch.randn(TOKENS, 8 * HEAD).split([4 * HEAD, 2 * HEAD, 2 * HEAD], -1)[:2]


def expected(x, cos_sin, is_neox, rotary_dim=HEAD):
    """By complex numbers in float64, from the rows (tokens, rotary_dim) of a table."""
    cos, sin = cos_sin.double().chunk(2, -1)
    x = x.double().view(len(x), -1, HEAD)
    head, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    axis, shape = (-2, (2, -1)) if is_neox else (-1, (-1, 2))
    real, imag = head.unflatten(-1, shape).unbind(axis)
    turned = torch.complex(real.contiguous(), imag.contiguous()) * torch.complex(cos, sin)[:, None]
    parts = torch.stack([turned.real, turned.imag], axis).flatten(-2)
    return torch.cat([parts, rest], -1).flatten(1)


@pytest.mark.usefixtures("on")
@pytest.mark.parametrize("call", [
    lambda q, k: RotaryEmbedding().forward_cuda(torch.arange(0), q, k),
    lambda q, k: DeepseekScalingRotaryEmbedding(is_neox_style=False).forward_native(
        torch.arange(0), q.unflatten(1, (-1, HEAD)), k.unflatten(1, (-1, HEAD))),
    lambda q, k: Phi3LongRoPEScaledRotaryEmbedding(
        torch.ones(ROWS, HEAD), torch.ones(ROWS, HEAD)).forward(torch.arange(0), q, k),
])  # fmt: skip
def test_a_batch_without_tokens_passes_through(call):
    q, k = (x[:0] for x in qkv())
    assert [x.numel() for x in call(q, k)] == [0, 0]


POSITIONS = torch.tensor([5, 0, 63, 8, 8, 31])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("rotary_dim", [HEAD, 4])
def test_the_base_class_rotates_by_its_table(on, is_neox, rotary_dim, dtype):
    rope = RotaryEmbedding(rotary_dim, is_neox, dtype)
    close = {"atol": 1e-6, "rtol": 0} if dtype == torch.float32 else {"atol": 2e-2, "rtol": 8e-3}
    for method in ("forward_native", "forward_cpu", "forward_cuda"):
        given = [x.to(dtype) for x in qkv()]
        wanted = [expected(x, rope.cos_sin_cache[POSITIONS], is_neox, rotary_dim) for x in given]
        turned = getattr(rope, method)(POSITIONS, *given)
        for x, y, w in zip(given, turned, wanted, strict=True):
            assert (y is x) == (method == "forward_cuda")  # in place, as SGLang's own
            assert (y.dtype, y.shape) == (dtype, x.shape)
            torch.testing.assert_close(y.double(), w, **close)
    shifted = rope.forward_native(POSITIONS - 3, *given, offsets=torch.tensor(3))
    assert torch.equal(shifted[0], rope.forward_native(POSITIONS, *given)[0])


def test_the_log_says_once_what_is_rotated(on, log):
    with log.at_level(logging.INFO, "sglang.rotary"):
        for _ in range(2):
            RotaryEmbedding().forward_native(POSITIONS, *qkv())
    assert log.text.count("q and k of RotaryEmbedding are rotated by rotary") == 1


def test_mrope_takes_the_axis_of_each_pair(on):
    axis_map = torch.tensor([0, 2, 1, 1])
    rope = MRotaryEmbedding(axis_map=axis_map, mrope_interleaved_glm=False)
    positions = torch.stack([POSITIONS, POSITIONS.flip(0), POSITIONS // 2])
    rows = torch.stack([rope.cos_sin_cache[positions[axis], [[i], [i + 4]]]
                        for i, axis in enumerate(axis_map)])  # fmt: skip
    rows = rows.permute(2, 1, 0).flatten(1)
    q, k = qkv()
    for method in (rope.forward_native, rope.forward_triton):
        wanted = expected(q, rows, True), expected(k, rows, True)
        for turned, want in zip(method(positions, q, k), wanted, strict=True):
            torch.testing.assert_close(turned.double(), want, atol=1e-6, rtol=0)
    q, k = qkv()
    one_axis = rope.forward_native(POSITIONS, q, k)
    want = expected(q, rope.cos_sin_cache[POSITIONS], True)
    torch.testing.assert_close(one_axis[0].double(), want, atol=1e-6, rtol=0)


def test_longrope_takes_the_second_table_beyond_the_trained_length(on):
    short, long = Rope().cos_sin_cache, Rope().cos_sin_cache.roll(1, 0).repeat(2, 1)
    rope = Phi3LongRoPEScaledRotaryEmbedding(short, long)
    q, k = qkv()
    for positions, table in ((POSITIONS, short), (POSITIONS + 60, long)):
        turned, _ = rope(positions, q, k)
        want = expected(q, table[positions], True)
        torch.testing.assert_close(turned.double(), want, atol=1e-6, rtol=0)


def test_deepseek_rotates_heads_that_are_apart(on):
    rope = DeepseekScalingRotaryEmbedding(is_neox_style=False)
    q, k = (x.unflatten(-1, (-1, HEAD)) for x in qkv())
    turned, _ = rope.forward_native(POSITIONS, q, k)
    want = expected(q, rope.cos_sin_cache[POSITIONS], False).view(q.shape)
    torch.testing.assert_close(turned.double(), want, atol=1e-6, rtol=0)


LEFT = {
    "it writes the cache": ({}, {"fused_set_kv_buffer_arg": 1}, "also writes the KV cache"),
    "bit for bit": ({"_force_native": True}, {}, "agree bit for bit"),
    "rows taken before": ({"sin_cos_cache": 1}, {}, "rows that were taken before"),
    "a new argument": ({}, {"scale": 2.0}, "arguments that are not known, scale"),
    "another table": ({"cos_sin_cache": torch.zeros(9, 3)}, {}, r"shape (9, 3) for rotary_dim 8"),
    "positions": ({}, {"positions": torch.zeros(3, TOKENS).long()}, "positions of shape (3, 6)"),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_not_known_is_left_to_sglang_with_one_line(on, log, name):
    attributes, options, line = LEFT[name]
    rope = RotaryEmbedding(**attributes)
    hook = on.hook_of(on.HOOKS["base.RotaryEmbedding.forward_native"])
    arguments = {"positions": POSITIONS, **options}
    with log.at_level(logging.INFO, "sglang.rotary"):
        for _ in range(2):
            where = arguments.pop("positions", POSITIONS)
            got = hook(lambda *given, **named: (given, named), rope, where, *qkv(), **arguments)
            assert got[0][0] is rope
            assert got[1] == arguments
            arguments["positions"] = where
    assert log.text.count("RotaryEmbedding is left to SGLang") == 1
    assert line in log.text


def test_other_orders_of_mrope_and_deepseek_are_left(on):
    positions = torch.stack([POSITIONS] * 3)
    glm = MRotaryEmbedding(axis_map=torch.tensor([0, 1, 2, 0]), mrope_interleaved_glm=True)
    assert glm.forward_native(positions, *qkv()) == "SGLang's own"
    assert glm.forward_triton(positions, *qkv()) != "SGLang's own"
    ernie = MRotaryEmbedding(axis_map=None, mrope_interleaved_glm=False)
    assert ernie.forward_triton(positions, *qkv()) == "SGLang's own"
    half = DeepseekScalingRotaryEmbedding()
    assert half.forward_native(POSITIONS, *qkv()) == "SGLang's own"


@pytest.mark.parametrize("plugins", [None, "", "other,rotary2"])
def test_nothing_happens_unless_the_plug_in_is_named(ours, monkeypatch, plugins):
    monkeypatch.delenv("SGLANG_PLUGINS")
    if plugins is not None:
        monkeypatch.setenv("SGLANG_PLUGINS", plugins)
    ours.register()
    assert RotaryEmbedding().forward_native(POSITIONS, *qkv()) == "SGLang's own"


def test_a_method_with_other_parameters_is_left_alone(ours, monkeypatch, log):
    monkeypatch.setattr(RotaryEmbedding, "forward_cuda", lambda self, positions, query: "new")
    monkeypatch.delattr(MRotaryEmbedding, "forward_triton")
    with log.at_level(logging.INFO, "sglang.rotary"):
        ours.register()
    assert RotaryEmbedding().forward_cuda(1, 2) == "new"
    assert "forward_cuda alone: its parameters are ('self', 'positions', 'query')" in log.text
    assert "mrope.MRotaryEmbedding.forward_triton alone: its parameters are None" in log.text
    assert "q and k in RotaryEmbedding.forward_native, RotaryEmbedding.forward_cpu" in log.text
