"""Other programs as they are, where they are installed: mlx-lm, litgpt and llama.cpp's library.

None of them is installed for `make test`. pip install mlx mlx-cpu mlx-lm litgpt xllamacpp, beside
torch, runs all of this on a CPU.
"""

import ctypes
from pathlib import Path

import numpy as np
import pytest

from rotary import Rotary
from rotary.identify import identify

DYNAMIC = {"factor": 4.0, "original_max_position_embeddings": 2048}


def mlx_dynamic():
    """What mlx-lm makes of dynamic NTK by 4 from 2048 tokens: rope(x, offset)."""
    mlx = pytest.importorskip("mlx.core")
    rope_utils = pytest.importorskip("mlx_lm.models.rope_utils")
    rope = rope_utils.initialize_rope(64, 1e4, False, {"rope_type": "dynamic", "factor": 4.0}, 2048)
    return lambda x, offset: np.array(rope(mlx.array(np.ascontiguousarray(x)), offset=int(offset)))


def test_mlx_lm_in_one_call():
    rope = mlx_dynamic()
    found = identify(lambda x, positions: rope(x, positions[0]), 64, library="numpy")
    assert found.spec == Rotary(head_dim=64, schedule="dynamic", params=DYNAMIC)
    assert found.codes == ("positions_consecutive", "depends_on_length")


def test_mlx_lm_in_decoding():
    rope = mlx_dynamic()

    def decode(x, positions):
        each = [rope(x[:, :, i : i + 1], p) for i, p in enumerate(positions)]
        return np.concatenate(each, axis=2)

    found = identify(decode, 64, library="numpy")
    assert found.spec == Rotary(head_dim=64, schedule="dynamic", params=DYNAMIC)
    assert found.codes == ("depends_on_position",)


LITGPT = {
    "2048": (128, 10_000, {"factor": 4.0, "original_max_seq_len": 2048}, "YaRN by 4 from 2,048"),
    "gpt-oss": (
        64, 150_000, {"factor": 32.0, "original_max_seq_len": 4096, "truncate": False},
        "YaRN by 32 from 4,096",
    ),
    "mscale": (
        64, 10_000, {"factor": 40.0, "original_max_seq_len": 4096, "mscale_all_dim": 1.0},
        "YaRN by 40 from 4,096",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LITGPT)
def test_the_inverted_ramp_of_litgpt(name):
    model = pytest.importorskip("litgpt.model")
    head_dim, base, extra, text = LITGPT[name]
    extra = {"beta_fast": 32.0, "beta_slow": 1.0, **extra}

    def rotate(x, positions):
        length = int(positions.max()) + 1
        tables = model.build_rope_cache(length, head_dim, base=base, extra_config=extra)
        return model.apply_rope(x, *(table[positions][None] for table in tables))

    found = identify(rotate, head_dim, max_position=2**15)
    assert found.findings[-1].code == "ramp_inverted"
    assert text in found.findings[-1].text


class Memory(ctypes.Structure):
    """ggml_init_params."""

    _fields_ = (("size", ctypes.c_size_t), ("at", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


def ggml_rope(mode, base, scale=1.0, ramp=0.0):
    """ggml_rope_ext of the library inside xllamacpp, as f(x, positions)."""
    package = pytest.importorskip("xllamacpp")
    ggml = ctypes.CDLL(str(next(Path(package.__file__).parent.glob("xllamacpp*.so"))))
    for name in ("init", "new_tensor_4d", "new_tensor_1d", "get_data", "rope_ext", "new_graph"):
        getattr(ggml, f"ggml_{name}").restype = ctypes.c_void_p
    pointer, real = ctypes.c_void_p, ctypes.c_float

    def one_row(x, positions):
        tokens, heads, width = x.shape
        context = pointer(ggml.ggml_init(Memory(3 * x.nbytes + 2**26, None, False)))
        whole = [ctypes.c_int64(n) for n in (width, heads, tokens, 1)]
        given = pointer(ggml.ggml_new_tensor_4d(context, 0, *whole))
        where = pointer(ggml.ggml_new_tensor_1d(context, 26, ctypes.c_int64(tokens)))
        for tensor, array in ((given, x), (where, positions)):
            to = ggml.ggml_get_data(tensor)
            ctypes.memmove(to, array.ctypes.data, array.nbytes)
        numbers = [real(n) for n in (base, scale, ramp, 1.0, 32.0, 1.0)]
        turned = pointer(
            ggml.ggml_rope_ext(context, given, where, None, width, mode, 2048, *numbers)
        )
        graph = pointer(ggml.ggml_new_graph(context))
        ggml.ggml_build_forward_expand(graph, turned)
        ggml.ggml_graph_compute_with_ctx(context, graph, 1)
        result = np.empty_like(x)
        ctypes.memmove(result.ctypes.data, ggml.ggml_get_data(turned), x.nbytes)
        ggml.ggml_free(context)
        return result

    def rotate(x, positions):
        rows = np.ascontiguousarray(x.swapaxes(1, 2), np.float32)
        where = np.ascontiguousarray(positions, np.int32)
        return np.stack([one_row(row, where) for row in rows]).swapaxes(1, 2)

    return rotate


GGML = {
    "neox": ((2, 1e4), Rotary(head_dim=64)),
    "norm": ((0, 5e5), Rotary(head_dim=64, base=5e5, layout="interleaved")),
    "linear": (
        (2, 1e6, 0.25),
        Rotary(head_dim=64, base=1e6, schedule="linear", params={"factor": 4.0}),
    ),
    "yarn": ((2, 1e4, 0.25, 1.0), Rotary(head_dim=64, schedule="yarn", params=DYNAMIC)),
}


@pytest.mark.parametrize("name", GGML)
def test_the_running_product_of_llama_cpp(name):
    options, spec = GGML[name]
    found = identify(ggml_rope(*options), 64, library="numpy")
    assert found.spec == spec
    assert "float32_running_product" in found.codes
