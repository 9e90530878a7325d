"""Malformed operands for torch.ops.rotary.*, each in memory of its own between guarded pages.

`python tests/guarded_operators.py FIRST LAST` calls the operators with the operand sets of these
numbers. Each call must raise a readable error, or give what a loop over every number gives, and
change nothing but the elements of its outputs. A page before and a page after each operand cannot
be read, so a step over the end ends the process; the number of the set is in its last line then.
Writes {"taken": ..., "refused": ..., "errors": {...}} as JSON.
"""

import contextlib
import faulthandler
import itertools
import json
import random
import sys
from collections import Counter

import guarded_memory
import numpy as np
import torch

import rotary.kernels.torch.route  # noqa: F401  registers the operators

SIZE = 4 * guarded_memory.PAGE  # of the memory of one operand
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}
READABLE = (ValueError, TypeError, RuntimeError)


class Guarded(guarded_memory.Guarded):
    def tensor(self, shape, order, gap, dtype, at_end, shift=0):
        """A tensor here, its axes in memory in this order, against the first or the last byte."""
        strides, step = [0] * len(shape), 1
        for axis in reversed(order):
            strides[axis] = step
            step *= max(1, shape[axis]) + gap * (axis != order[-1])
        last = sum(max(0, size - 1) * step for size, step in zip(shape, strides, strict=True))
        needed = (last + 1 if 0 not in shape else 0) * dtype.itemsize
        start = SIZE - needed if at_end else 0
        start += (-1 if at_end else 1) * shift * dtype.itemsize
        if not 0 <= start <= SIZE - needed:
            raise OverflowError
        offset = start - start % dtype.itemsize
        whole = torch.from_numpy(self.bytes[offset % dtype.itemsize :])
        whole = whole[: len(whole) // dtype.itemsize * dtype.itemsize].view(dtype)
        return whole.as_strided(shape, strides, offset // dtype.itemsize)


def rotated(xs, cos, sin, rows, start, pairs, layout, out_layout, dims, conjugate):
    """The rotation written as a loop over every pair, in float64."""
    results = []
    cos, sin = cos.double().numpy(), sin.double().numpy()
    for x in xs:
        values = x.double().numpy()
        result = values.copy()
        for index in np.ndindex(*x.shape[:-1]):
            along = cos.shape[:-1] if rows is None else rows.shape
            at = [0] * len(along)
            for axis, dim in enumerate(dims):
                if dim >= 0:
                    at[dim] = index[axis] if along[dim] > 1 else 0
            row = tuple(at) if rows is None else (int(rows[tuple(at)]),)
            assert rows is None or 0 <= row[0] < cos.shape[0]
            for pair in range(pairs):
                one, other = places(start, pairs, pair, layout)
                u, v = values[index][one], values[index][other]
                c, s = cos[row][pair], sin[row][pair] * (-1 if conjugate else 1)
                one, other = places(start, pairs, pair, out_layout)
                result[index][one], result[index][other] = u * c - v * s, v * c + u * s
        results.append(result)
    return results


def places(start, pairs, pair, layout):
    if layout == "half":
        return start + pair, start + pair + pairs
    return start + 2 * pair, start + 2 * pair + 1


GUARDED = [Guarded(SIZE) for _ in range(7)]  # x, x, cos, sin, rows, out, out


def operand_set(number):
    """Operands of one call, nearly right: most sets have one to three things wrong with them."""
    chance = random.Random(number)
    torch.default_generator.manual_seed(number)  # torch.manual_seed keeps the stack for each device
    pick = chance.choice
    free = iter(GUARDED)

    def placed(shape, dtype, values=None):
        memory = next(free)
        memory.fill()
        order = list(range(len(shape)))
        if chance.random() < 0.3:
            chance.shuffle(order)
        gap = pick([0, 0, 1, 3])
        tensor = memory.tensor(shape, order, gap, dtype, pick([True, False]))
        tensor.copy_(torch.randn(shape) if values is None else values)
        return tensor

    dtype = pick(FLOATS)
    axes = chance.randint(1, 4)
    shape = [pick([1, 2, 3, 5, pick([0, 4])]) for _ in range(axes)]
    pairs = pick([1, 2, 3, 4, 8, 9])
    start = pick([0, 0, 1, 5])
    width = start + 2 * pairs + pick([0, 0, 3])
    named = sorted(chance.sample(range(axes), chance.randint(1, min(2, axes))))
    dims = [named.index(axis) if axis in named else -1 for axis in range(axes)]
    along = [shape[axis] if chance.random() < 0.8 else 1 for axis in named]
    second = list(shape)
    if chance.random() < 0.5 and len(named) < axes:
        second[pick([axis for axis in range(axes) if axis not in named])] = pick([1, 2, 6])
    xs = [placed([*s, width], dtype) for s in ([shape, second][: chance.randint(1, 2)])]
    rows = None
    table = torch.float32 if chance.random() < 0.9 else torch.float64
    if chance.random() < 0.4:
        count = pick([1, 4, 7])
        cos, sin = placed([count, pairs], table), placed([count, pairs], table)
        numbers = torch.randint(0, count, along)
        rows = placed(along, pick([torch.int64, torch.int32]), numbers)
    else:
        cos, sin = placed([*along, pairs], table), placed([*along, pairs], table)
    out = [placed(list(x.shape), dtype) for x in xs] if chance.random() < 0.5 else None
    if out is not None and chance.random() < 0.3:
        out = list(xs)
    layout, out_layout = chance.choices(["half", "interleaved"], k=2)
    operands = {
        "xs": xs, "cos": cos, "sin": sin, "rows": rows, "start": start, "pairs": pairs,
        "layout": layout, "out_layout": out_layout, "dims": dims,
        "conjugate": pick([True, False]), "out": out,
    }  # fmt: skip
    for _ in range(pick([0, 1, 1, 2, 3])):
        pick(FAULTS)(operands, chance)
    if chance.random() < 0.05:
        released(operands, chance)  # last: torch itself would read what is gone
    return operands


def tensors_of(operands):
    """(key, index or None, tensor) of every tensor."""
    for key in ("xs", "out"):
        yield from ((key, index, x) for index, x in enumerate(operands[key] or ()))
    for key in ("cos", "sin", "rows"):
        if operands[key] is not None:
            yield key, None, operands[key]


def changed(operands, chance, change, keys=("xs", "out", "cos", "sin", "rows")):
    """One tensor, or all of its kind, put through `change`; as it was where that cannot be."""
    found = [each for each in tensors_of(operands) if each[0] in keys]
    if not found:
        return
    key, index, x = chance.choice(found)
    try:
        new = change(x)
    except (RuntimeError, IndexError, TypeError, ValueError):
        return
    if index is None:
        operands[key] = new
    else:
        operands[key] = [new if at == index else y for at, y in enumerate(operands[key])]


def another_shape(operands, chance):
    def change(x):
        axis = chance.randrange(x.ndim)
        return chance.choice([
            lambda: x.narrow(axis, 0, chance.randint(0, x.shape[axis])),
            lambda: x.select(axis, 0),
            lambda: x.unsqueeze(axis),
            lambda: x.transpose(axis, -1),
            lambda: x.flatten(),
            lambda: x.sum(),
        ])()  # fmt: skip

    changed(operands, chance, change)


def another_stride(operands, chance):
    def change(x):
        axis = chance.randrange(x.ndim)
        strides = list(x.stride())
        strides[axis] = chance.choice([0, 0, 1, 2])
        return x.as_strided(x.shape, strides)

    changed(operands, chance, change)


def expanded(operands, chance):
    def change(x):
        axis = chance.randrange(x.ndim)
        return x.narrow(axis, 0, 1).expand(x.shape)

    changed(operands, chance, change)


def another_dtype(operands, chance):
    kinds = [*FLOATS, torch.int64, torch.int32, torch.bool, torch.complex64, torch.uint8,
             torch.float8_e4m3fn, torch.uint64]  # fmt: skip
    changed(operands, chance, lambda x: x.to(chance.choice(kinds)))


def another_kind(operands, chance):
    def change(x):
        return chance.choice([
            lambda: x.to("meta"),
            lambda: x.to_sparse(),
            lambda: x.to_mkldnn(),
            lambda: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8),
            lambda: torch.nested.nested_tensor(list(x)),
            lambda: torch._neg_view(x) if x.is_floating_point() else x,
            lambda: torch._efficientzerotensor(x.shape, dtype=x.dtype),
            lambda: x.clone().requires_grad_(),
            lambda: torch.nn.Parameter(x),
            lambda: x[:0],
        ])()  # fmt: skip

    changed(operands, chance, change)


def released(operands, chance):
    def change(x):
        if x.is_nested or x.layout is not torch.strided or x.device.type != "cpu":
            raise TypeError("has no storage of its own")
        x = x.clone()
        x.untyped_storage().resize_(chance.choice([0, max(0, x.untyped_storage().nbytes() - 1)]))
        return x

    changed(operands, chance, change)


def is_released(x):
    if x.layout is not torch.strided or x.is_nested or x.device.type != "cpu" or not x.numel():
        return False
    last = sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True))
    return (x.storage_offset() + last + 1) * x.itemsize > x.untyped_storage().nbytes()


def bad_row(operands, chance):
    rows = operands["rows"]
    if rows is not None and rows.numel() and rows.dtype in (torch.int64, torch.int32):
        value = chance.choice([-1, 1, 4, 7, 2**31 - 1, -(2**31)])
        with contextlib.suppress(RuntimeError):  # zeros without memory, for one, cannot be written
            rows[tuple(chance.randrange(size) for size in rows.shape)] = value


def overlapping(operands, chance):
    """An output in the memory of another operand, some elements on."""
    if not operands["out"]:
        return
    y = operands["out"][0]
    where = chance.choice(GUARDED)
    try:
        new = where.tensor(
            list(y.shape), list(range(y.ndim)), 0, y.dtype, chance.choice([True, False]),
            chance.choice([0, 0, 1, 2, 8]),
        )  # fmt: skip
    except (OverflowError, RuntimeError, ValueError):
        return
    operands["out"] = [new, *operands["out"][1:]]


def another_number(operands, chance):
    key = chance.choice(["start", "pairs"])
    operands[key] = chance.choice([-1, 0, 1, 2, 5, 2**31, 2**62, 2**63 - 1, -(2**63)])


def another_layout(operands, chance):
    operands[chance.choice(["layout", "out_layout"])] = chance.choice(["", "Half", "full", "h\0"])


def other_dims(operands, chance):
    dims = list(operands["dims"])
    if chance.random() < 0.5 and dims:
        dims[chance.randrange(len(dims))] = chance.choice([-1, 0, 1, 2, -2, 2**62, -(2**63)])
    else:
        dims = [chance.choice([-1, 0, 1]) for _ in range(chance.randint(0, 6))]
    operands["dims"] = dims


def another_count(operands, chance):
    key = chance.choice(["xs", "out"])
    if operands[key] is not None:
        operands[key] = chance.choice([[], operands[key] * 2, operands[key][:1], operands["xs"]])


FAULTS = [another_shape, another_shape, another_stride, expanded, another_dtype, another_kind,
          bad_row, bad_row, overlapping, overlapping, another_number, another_layout,
          other_dims, another_count]  # fmt: skip


def written_bytes(out):
    """Of every guarded memory, which bytes are elements of an output."""
    masks = [np.zeros(SIZE, bool) for _ in GUARDED]
    for y in out or ():
        if y.layout is not torch.strided or y.is_nested or y.device.type != "cpu":
            continue
        for memory, mask in zip(GUARDED, masks, strict=True):
            low = y.data_ptr() - memory.bytes.ctypes.data
            if not 0 <= low < SIZE:
                continue
            for index in itertools.product(*map(range, y.shape)):
                at = low + y.itemsize * sum(i * s for i, s in zip(index, y.stride(), strict=True))
                mask[at : at + y.itemsize] = True
    return masks


def check(number, counts, errors):
    """One call of an operator; AssertionError where it did what it must not."""
    try:
        operands = operand_set(number)
    except OverflowError:  # too large for the guarded memory
        counts["too large"] += 1
        return
    out = operands.pop("out")
    before = [memory.bytes.copy() for memory in GUARDED]
    arguments = list(operands.values())
    expected = None
    try:
        with torch.no_grad():
            xs, cos, sin, rows, *rest = arguments
            if any(map(is_released, (*xs, cos, sin, *(() if rows is None else (rows,))))):
                raise ValueError("no memory")
            if any(x.dtype not in FLOATS for x in (*xs, cos, sin)):
                raise TypeError("no numbers to rotate; torch itself cannot copy some of these")
            copies = [x.detach().clone() for x in (*xs, cos, sin)]
            row_copy = None if rows is None else rows.clone()
            expected = rotated(copies[:-2], *copies[-2:], row_copy, *rest)
    except Exception:  # what the loop cannot make sense of, the operator has to refuse
        expected = None
    try:
        if out is None:
            found = torch.ops.rotary.rotate(*arguments)
        else:
            torch.ops.rotary.rotate_out(*arguments, out)
            found = out
    except READABLE as error:
        text = str(error)
        assert len(text) > 10, f"{number}: an error without a sentence"
        assert "INTERNAL ASSERT" not in text, f"{number}: {text}"
        assert "Internal error" not in text, f"{number}: {text}"
        counts["refused"] += 1
        errors[type(error).__name__] += 1
        for memory, bytes_before in zip(GUARDED, before, strict=True):
            assert (memory.bytes == bytes_before).all(), f"{number}: refused after it wrote"
        return
    masks = written_bytes(out)
    for memory, bytes_before, mask in zip(GUARDED, before, masks, strict=True):
        same = memory.bytes == bytes_before
        assert (same | mask).all(), f"{number}: wrote beside its outputs"
    if all(y.device.type == "meta" for y in found):
        counts["meta"] += 1
        return
    assert expected is not None, f"{number}: took what no loop can rotate"
    assert len(found) == len(expected)
    for x, y, wanted in zip(arguments[0], found, expected, strict=True):
        assert (y.shape, y.dtype) == (x.shape, x.dtype), f"{number}: another form"
        tolerance = TOLERANCE[x.dtype]
        np.testing.assert_allclose(
            y.detach().double().numpy(), wanted, tolerance, tolerance, err_msg=str(number)
        )
    counts["taken"] += 1


def main(first, last):
    faulthandler.enable()
    torch.set_num_threads(1)
    counts, errors = Counter(), Counter()
    for number in range(first, last):
        sys.stderr.write(f"{number}\n")
        check(number, counts, errors)
    sys.stdout.write(json.dumps({**counts, "errors": dict(errors.most_common())}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
