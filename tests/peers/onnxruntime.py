"""onnxruntime: its contrib operator RotaryEmbedding on unit vectors, ten plain RoPEs.

The operator is given its tables, here in float64 rounded to float32: what it decides is the layout
(`interleaved` 0 is half), the slice (`rotary_embedding_dim` leads the head) and the sign.
"""

import sys
from importlib.metadata import version

import measure
import plain

measure.leave_this_folder()

import numpy as np  # noqa: E402
import onnx  # noqa: E402
import onnxruntime  # noqa: E402

ROWS = 2**11 + 1


def rotation_of(head_dim, rotary_dim, base, factor, is_interleaved):
    inv_freq = base ** (-np.arange(0, rotary_dim, 2) / rotary_dim) / factor
    angles = np.arange(ROWS)[:, None] * inv_freq
    partial = {} if rotary_dim == head_dim else {"rotary_embedding_dim": rotary_dim}
    run = session(head_dim, {"interleaved": int(is_interleaved), **partial})
    x = np.eye(head_dim, dtype=np.float32).reshape(1, head_dim, 1, head_dim)
    tables = {"cos": np.cos(angles).astype(np.float32), "sin": np.sin(angles).astype(np.float32)}

    def rotate(position):
        (y,) = run(None, {"x": x, "at": np.array([[position]], np.int64), **tables})
        return y[0, :, 0]

    return rotate


def session(heads, attributes):
    """One node: x (1, heads, 1, head_dim), `at` (1, 1), cos and sin (rows, pairs)."""
    node = onnx.helper.make_node(
        "RotaryEmbedding", ["x", "at", "cos", "sin"], ["y"], domain="com.microsoft",
        num_heads=heads, **attributes,
    )  # fmt: skip
    kinds = {"x": onnx.TensorProto.FLOAT, "at": onnx.TensorProto.INT64,
             "cos": onnx.TensorProto.FLOAT, "sin": onnx.TensorProto.FLOAT}  # fmt: skip
    inputs = [onnx.helper.make_tensor_value_info(name, kind, None) for name, kind in kinds.items()]
    output = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)
    graph = onnx.helper.make_graph([node], "rope", inputs, [output])
    opsets = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid("com.microsoft", 1)]
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return onnxruntime.InferenceSession(model.SerializeToString()).run


if __name__ == "__main__":
    rows = plain.rows(sys.argv[1], rotation_of, ("half", "interleaved"), farthest=ROWS - 1)
    measure.write(sys.argv[2], "onnxruntime", version("onnxruntime"), rows)
