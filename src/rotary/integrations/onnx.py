"""`export`: write a torch module that rotates as an ONNX model, with ONNX's `RotaryEmbedding`.

ONNX has the operator from opset 23 on. It rotates the first channels of a head, in one layout, by
one row of cos and sin per token. What it cannot express (a slice that starts later, interleaved in
and half out, tables per head, float64) is written in plain operators, and so is everything below
opset 23.

The model computes its tables from positions, by 64-bit turns as this library does. So there is no
longest position, nothing is clamped, and the file holds no table. A negative position is an error
in torch; in the ONNX model it rotates backwards. The computation needs float64 and an int64 product
that wraps: onnxruntime and the evaluator of onnx have them, but ONNX does not promise them. For an
engine without them, let the module call `rotate(x, cos, sin, spec, positions=ids)` with its own
tables: these become `cos_cache` and `sin_cache`, and the ids `position_ids`. onnxruntime refuses an
id outside the table; the evaluator of onnx counts a negative one from the end.

float16 and bfloat16 are rotated in float32 and rounded once, with a Cast before and after.
"""

import importlib.util
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import kernels
from ..kernels.geometry import Geometry, Options, geometry_of_arrays
from ..kernels.torch import route as kernel
from ..kernels.torch.checks import check_operands, check_rows

OPERATOR_OPSET = 23  # the first with RotaryEmbedding
FIRST_OPSET = 18  # the lowest that torch's exporter writes
_NEEDED = ("onnx", "onnxscript")
OPTIONS = (  # of `torch.onnx.export`, those that it heeds for a program that is traced already
    *("input_names", "output_names", "optimize", "verify", "report", "profile", "artifacts_dir"),
    *("dump_exported_program", "custom_translation_table"),
)


def export(
    module: nn.Module,
    args: tuple[object, ...],
    path: str | Path,
    *,
    kwargs: dict[str, object] | None = None,
    opset_version: int = OPERATOR_OPSET,
    dynamic_shapes: Any = None,
    **options: Any,
) -> None:
    """Write `module`, as it runs on `args` and `kwargs`, to the file `path`.

    Every `rotary.rotate`, `rotary.apply` and `rotary.nn.RotaryEmbedding` in it becomes one operator
    `RotaryEmbedding` per array, or plain operators if that operator cannot express it.

    dynamic_shapes  as in `torch.export.export`: {0: torch.export.Dim("batch")} for each input
    options         more arguments of `torch.onnx.export`: input_names, output_names, optimize,
                    verify, report, profile, artifacts_dir, dump_exported_program,
                    custom_translation_table

    `onnx.checker` checks the model with shape inference; a model that fails is not written.
    Raises ValueError for an opset that cannot be written, and for `out=` in the module, because
    ONNX cannot write in place; TypeError for other options, which would do nothing here, such as
    dynamic_axes; FileNotFoundError or IsADirectoryError for a path where no file can be written;
    ImportError without onnx and onnxscript.
    Source: the operator RotaryEmbedding of https://onnx.ai/onnx/operators, since version 23.

    >>> export(nn.Identity(), (torch.ones(2),), "model.onnx", opset_version=16)
    Traceback (most recent call last):
    ValueError: opset_version must be >= 18, the lowest that torch writes, got 16
    """
    _check_options(options)
    path = Path(path)
    if not path.absolute().parent.is_dir():
        raise FileNotFoundError(f"{path.absolute().parent} does not exist: make it first")
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder: name a file in it, as {path / 'model.onnx'}")
    if not isinstance(opset_version, int):
        raise TypeError(f"opset_version must be a whole number, got {opset_version!r}")
    if opset_version < FIRST_OPSET:
        raise ValueError(
            f"opset_version must be >= {FIRST_OPSET}, the lowest that torch writes, "
            f"got {opset_version}"
        )
    for name in _NEEDED:
        if importlib.util.find_spec(name) is None:
            raise ImportError(f"export needs {name}: pip install onnx onnxscript")
    with _recording(has_operator=opset_version >= OPERATOR_OPSET):
        traced = torch.export.export(
            module, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False
        )
    program: Any = torch.onnx.export(
        traced, dynamo=True, opset_version=opset_version, verbose=False, **options
    )
    written = program.model.opset_imports[""]
    if written != opset_version:
        raise ValueError(
            f"torch {torch.__version__} cannot write opset {opset_version} for this module, it "
            f"came to {written}: ask for another opset_version, such as {OPERATOR_OPSET}"
        )
    _save_checked(program, path)


def _check_options(options: Mapping[str, object]) -> None:
    """Refuse what `torch.onnx.export` ignores for a program that is traced, or writes unchecked."""
    for name in options:
        if name not in OPTIONS:
            instead = ", but dynamic_shapes" if name == "dynamic_axes" else ""
            raise TypeError(
                f"export takes no {name}{instead}; of torch.onnx.export it takes "
                f"{', '.join(OPTIONS)}"
            )


def _save_checked(program: Any, path: Path) -> None:
    """Write and check in a temporary folder, then move the files: over 2 GB there are several."""
    import onnx

    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        draft = Path(folder) / path.name
        program.save(draft)
        onnx.checker.check_model(str(draft), full_check=True)
        for part in sorted(Path(folder).iterdir(), key=lambda part: part == draft):
            part.replace(path.parent / part.name)


@contextmanager
def _recording(has_operator: bool) -> Iterator[None]:
    """Use a kernel that ONNX can express, on this thread, while a module is traced."""
    threads = [threading.get_ident()]
    rotate = partial(_rotate, threads, has_operator)
    try:
        with kernels.using_kernel(replace(kernel.KERNEL, rotate=rotate), kernel):
            yield
    finally:
        threads.clear()  # another thread may have just looked up this kernel


def _rotate(
    threads: Sequence[int], has_operator: bool, xs: Sequence[Tensor], cos: Tensor, sin: Tensor,
    positions: object, options: Options, out: Sequence[Tensor] | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Rotate as `kernels.torch.rotate` does, but by ONNX's operator instead of the formula."""
    if threading.get_ident() not in threads:  # another thread runs a model during this export
        return kernel.rotate(xs, cos, sin, positions, options, out)
    check_operands(xs, cos, sin, out)
    if out is not None:
        raise ValueError(
            "out= cannot be exported, because ONNX cannot write in place: leave it out"
        )
    rows = None if positions is None else check_rows(positions, xs[0])
    geometry = geometry_of_arrays(xs, cos, rows, options)
    rows_of_cos, rows_of_sin, form = _without_heads(cos, sin, geometry)
    operands = [_operand(x, form.dims) for x in xs]
    if not (has_operator and _is_operator(xs[0], cos, form)) or None in operands:
        return kernel.rotate(xs, cos, sin, positions, options, None)
    tables = rows_of_cos, -rows_of_sin if form.conjugate else rows_of_sin
    turned = [_operator(*each, *tables, rows, form) for each in operands if each is not None]
    return tuple([y.reshape(x.shape) for x, y in zip(xs, turned, strict=True)])


def _without_heads(cos: Tensor, sin: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor, Geometry]:
    """Drop the axis of 1 that tables of transformers have in the place of the heads."""
    for axis, dims in ((1, (0, None, 1)), (2, (0, 1, None))):
        if geometry.dims == (0, 1, 2) and type(cos.shape[axis]) is int and cos.shape[axis] == 1:
            return cos.squeeze(axis), sin.squeeze(axis), geometry._replace(dims=dims)
    return cos, sin, geometry


def _is_operator(x: Tensor, cos: Tensor, geometry: Geometry) -> bool:
    """Return whether RotaryEmbedding can express the channels and dtypes of this rotation."""
    return (
        geometry.start == 0
        and geometry.layout == geometry.out_layout
        and x.shape[-1] % 2 == 0
        and x.dtype != torch.float64
        and cos.dtype == torch.float32
    )


def _operand(x: Tensor, dims: tuple[int | None, ...]) -> tuple[Tensor, int, int] | None:
    """Return x as RotaryEmbedding takes it, its num_heads and head_dim; None if that cannot be."""
    if dims in ((0,), (0, None), (None, 0)):  # no batch axis
        x, dims = x[None], (None, *dims)
    if dims in ((None, None, 0), (0, None, 1)):  # (batch, heads, seq, head_dim)
        return x, 0, x.shape[-1]
    heads = x.shape[2] if x.ndim == 4 else 1
    if dims in ((None, 0), (0, 1), (None, 0, None), (0, 1, None)) and isinstance(heads, int):
        return x.flatten(2), heads, x.shape[-1]  # (batch, seq, heads * head_dim)
    return None


def _operator(
    x: Tensor,
    num_heads: int,
    head_dim: int,
    cos: Tensor,
    sin: Tensor,
    rows: Tensor | None,
    geometry: Geometry,
) -> Tensor:
    tokens = x.shape[0], x.shape[-2]
    if rows is None and (cos.ndim != 3 or tuple(cos.shape[:-1]) != tokens):
        cos, sin = cos.expand(*tokens, -1), sin.expand(*tokens, -1)
    rotary_dim = 2 * geometry.pairs
    turned = torch.onnx.ops.rotary_embedding(
        x.float(),
        cos,
        sin,
        None if rows is None else rows.expand(tokens),
        interleaved=geometry.layout == "interleaved",
        num_heads=num_heads,
        rotary_embedding_dim=0 if rotary_dim == head_dim else rotary_dim,
    )
    return turned.to(x.dtype)
