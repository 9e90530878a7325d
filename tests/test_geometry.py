"""`kernels/geometry.py`: which shapes fit together, and what is said about those that do not."""

import re

import pytest

from rotary.kernels.geometry import Geometry, Options, check_axes, check_fit, geometry_of, seq_axis

WITH_SPEC = Options(rotary_dim=64, head_dim=64)  # as `rotate` makes them of Rotary(head_dim=64)
OPEN = Options(seq_dim=None)  # seq_dim was not given

# name -> shapes of x, of cos, of row numbers; options; axes of cos or rows along those of x
FITTING = {
    "tokens": ([(2, 8, 5, 64)], (5, 32), None, WITH_SPEC, (None, None, 0)),
    "tokens, 2-D x": ([(5, 64)], (5, 32), None, WITH_SPEC, (0,)),
    "tokens, 3-D x": ([(8, 5, 64)], (5, 32), None, WITH_SPEC, (None, 0)),
    "tokens, 5-D x": ([(3, 2, 8, 5, 64)], (5, 32), None, WITH_SPEC, (None, None, None, 0)),
    "rows of the batch": ([(2, 8, 5, 64)], (2, 5, 32), None, WITH_SPEC, (0, None, 1)),
    "one row for the batch": ([(2, 8, 5, 64)], (1, 5, 32), None, WITH_SPEC, (0, None, 1)),
    "all axes": ([(2, 8, 5, 64)], (2, 1, 5, 32), None, WITH_SPEC, (0, 1, 2)),
    "all axes, 3-D x": ([(8, 5, 64)], (1, 5, 32), None, WITH_SPEC, (0, 1)),
    "tokens first": ([(2, 5, 8, 64)], (5, 32), None, Options(seq_dim=-3), (None, 0, None)),
    "tokens first, rows of the batch": (
        [(2, 5, 8, 64)], (2, 5, 32), None, Options(seq_dim=1), (0, 1, None),
    ),
    "tokens first, heads": (
        [(2, 5, 8, 64), (2, 5, 1, 64)], (5, 32), None, Options(seq_dim=-3), (None, 0, None),
    ),
    "row numbers": ([(2, 8, 5, 64)], (99, 32), (5,), WITH_SPEC, (None, None, 0)),
    "row numbers of the batch": ([(2, 8, 5, 64)], (99, 32), (2, 5), WITH_SPEC, (0, None, 1)),
    "heads": ([(2, 8, 5, 64), (2, 1, 5, 64)], (5, 32), None, OPEN, (None, None, 0)),
    "as many heads as tokens, not in k": (
        [(2, 5, 5, 64), (2, 1, 5, 64)], (5, 32), None, OPEN, (None, None, 0),
    ),
    "one head and one token": ([(2, 1, 1, 64)], (1, 32), None, OPEN, (None, None, 0)),
    "as many rows as tokens, 2-D x": ([(64, 64)], (64, 32), None, OPEN, (0,)),
    "all axes, as many heads as tokens": (
        [(2, 5, 5, 64)], (2, 1, 5, 32), None, OPEN, (0, 1, 2),
    ),
    "one pair": ([(5, 2)], (5, 1), None, Options(), (0,)),
    "a part of the head": (
        [(5, 64)], (5, 8), None, Options(rotary_dim=16, start=48, head_dim=64), (0,),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FITTING)
def test_each_axis_of_a_table_belongs_to_one_of_x(name):
    shapes, table, rows, options, dims = FITTING[name]
    found = geometry_of(tuple(shapes), table, rows, options)
    assert found == Geometry(options.start, table[-1], "half", "half", dims)
    check_fit(found, shapes, table, rows)


HEADS_LAST = "; for (..., seq, heads, head_dim) pass seq_dim=-3"
LONGER = "; pass positions to pick rows of a longer table"
PER_ROW = "; for one position per row of the batch pass positions[:, None]"
# name -> shapes of x, of cos, of row numbers; the two sizes, and what would help
MISFITS = {
    "one row for several tokens": ((2, 8, 5, 64), (1, 32), None, "1 against 5" + LONGER),
    "another batch": ((2, 8, 5, 64), (3, 5, 32), None, "3 against 2"),
    "row numbers of another batch": ((2, 8, 5, 64), (99, 32), (3, 5), "3 against 2"),
    "a longer table": ((8, 5, 64), (99, 32), None, "99 against 5" + LONGER),
    "heads last": ((2, 5, 8, 64), (5, 32), None, "5 against 8" + HEADS_LAST),
    "heads last, 3-D x": ((5, 8, 64), (5, 32), None, "5 against 8" + HEADS_LAST),
    "2-D x": ((5, 64), (4, 32), None, "4 against 5" + LONGER),
    "one position per row": ((2, 8, 1, 64), (99, 32), (2,), "2 against 1" + PER_ROW),
    "one position per head, 3-D x": ((2, 1, 64), (99, 32), (2,), "2 against 1" + HEADS_LAST),
    "positions of several axes": (
        (2, 8, 5, 64), (99, 32), (5, 3),
        "5 against 2; positions with 3 axes need a spec that has axes=",
    ),
}  # fmt: skip


def refused(message, *arguments):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        geometry_of(*arguments)


@pytest.mark.parametrize("name", MISFITS)
def test_sizes_that_differ_are_named_with_what_would_help(name):
    shape, table, rows, found = MISFITS[name]
    what = f"cos of shape {table}" if rows is None else f"positions of shape {rows}"
    message = f"{what} does not fit x of shape {shape} with seq_dim=-2: {found}"
    refused(message, (shape,), table, rows, WITH_SPEC)


def test_what_would_help_depends_on_the_axis_that_was_said():
    message = (
        "cos of shape (5, 32) does not fit x of shape (2, 8, 5, 64) with seq_dim=-3: 5 against 8"
    )
    refused(message + LONGER, ((2, 8, 5, 64),), (5, 32), None, Options(seq_dim=-3))


# name -> shapes of q and of k; what would help
APART = {
    "another batch": ((2, 8, 5, 64), (3, 8, 5, 64), ""),
    "another head_dim": ((2, 8, 5, 64), (2, 8, 5, 32), ""),
    "other tokens": ((2, 8, 5, 64), (2, 8, 6, 64), HEADS_LAST),
    "other tokens, 3-D x": ((8, 5, 64), (8, 6, 64), HEADS_LAST),
    "fewer axes": ((2, 8, 5, 64), (8, 5, 64), ""),
    "other heads and tokens": ((2, 8, 5, 64), (2, 4, 6, 64), ""),
    "other tokens, 2-D x": ((5, 64), (6, 64), ""),
    "other tokens, tokens first": ((2, 5, 8, 64), (2, 6, 8, 64), ""),
}


@pytest.mark.parametrize("name", APART)
def test_q_and_k_differ_in_heads_alone(name):
    q, k, help_ = APART[name]
    options = Options(seq_dim=-3) if name.endswith("first") else WITH_SPEC
    message = (
        "arrays rotated together, such as q and k, may differ in the number of heads only, got "
        f"shapes {q} and {k}{help_}"
    )
    refused(message, (q, k), (5, 32), None, options)


@pytest.mark.parametrize(
    ("shapes", "count"), [([(2, 5, 5, 64)], 5), ([(2, 5, 5, 64)] * 2, 5), ([(2, 2, 64)], 2)]
)
def test_as_many_heads_as_tokens(shapes, count):
    message = (
        f"x of shape {shapes[0]} has {count} heads or tokens on axis -3 and as many on axis -2: "
        "pass seq_dim=-2 for (..., heads, seq, head_dim), seq_dim=-3 for (..., seq, heads, "
        "head_dim)"
    )
    refused(message, tuple(shapes), (count, 32), None, OPEN)


UNCLEAR = (
    "so it is unclear which belong together: give (seq), (batch, seq) for a 4-D x, or all axes of x"
)
OF_THE_SPEC = (
    "rotary_dim is {}, but cos has {} columns, which make {}; tables are half width: one column "
    "per pair"
)
# shape of x, of cos, of row numbers; options; the whole message
REFUSED = [
    (
        (3, 2, 8, 5, 64), (2, 5, 32), None, WITH_SPEC,
        "tables or positions have 2 leading axes and x has 4, " + UNCLEAR,
    ),
    (
        (2, 8, 5, 64), (1, 2, 8, 5, 32), None, WITH_SPEC,
        "tables or positions have 4 leading axes and x has 3, " + UNCLEAR,
    ),
    (
        (2, 8, 5, 64), (2, 5, 32), (5,), WITH_SPEC,
        "with positions, cos and sin must be (rows, pairs), got (2, 5, 32)",
    ),
    ((2, 8, 5, 32),
     (5, 32), None, WITH_SPEC, "the last axis of x must be head_dim=64 of the spec, got 32"),
    ((5, 64),
     (32,), None, WITH_SPEC, "cos must be (seq, pairs) or have more axes, got shape (32,)"),
    (
        (5, 64), (5, 64), None, Options(),
        "cos has 64 columns, so channels 0 to 128 would be rotated, of 64; it looks full width: "
        "pass each pair once",
    ),
    ((5, 64),
     (5, 33), None, Options(), "cos has 33 columns, so channels 0 to 66 would be rotated, of 64"),
    ((5, 64), (5, 32), None, Options(rotary_dim=32), OF_THE_SPEC.format("32", 32, 64)),
    ((5, 64), (5, 16), None, WITH_SPEC, OF_THE_SPEC.format("64 in the spec", 16, 32)),
    ((5, 64),
     (5, 0), None, Options(), "cos has 0 columns, so channels 0 to 0 would be rotated, of 64"),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "table", "rows", "options", "message"), REFUSED)
def test_what_does_not_fit_is_refused(shape, table, rows, options, message):
    refused(message, (shape,), table, rows, options)


@pytest.mark.parametrize("seq_dim", [-1, 3, 4, -5])
def test_an_axis_of_tokens_is_before_the_last(seq_dim):
    with pytest.raises(ValueError, match=f"^seq_dim={seq_dim} is not an axis before the last of x"):
        seq_axis((2, 8, 5, 64), seq_dim)
    assert [seq_axis((2, 8, 5, 64), each) for each in (None, 2, -4, 0)] == [2, 2, 0, 0]


@pytest.mark.parametrize(
    ("shapes", "table", "rows", "fields"),
    [
        ([(2, 5, 64)], (5, 32), None, {}),
        ([(8, 5, 64), (5, 64)], (5, 32), None, {}),
        ([(8, 5, 64)], (5, 31), None, {}),
        ([(8, 5, 64)], (5, 0), None, {"pairs": 0}),
        ([(8, 5, 64)], (5, 32), None, {"start": 1}),
        ([(8, 5, 64)], (5, 32), None, {"start": -1}),
        ([(8, 5, 64)], (4, 32), None, {}),
        ([(8, 5, 64)], (99, 32), (4,), {}),
    ],
)
def test_an_operator_checks_what_it_is_given(shapes, table, rows, fields):
    """`check_fit` stands before memory is read, as a compiled program may be given other arrays."""
    geometry = Geometry(0, 32, "half", "half", (None, 0))
    check_fit(geometry, [(8, 5, 64), (1, 5, 64)], (5, 32), None)
    check_fit(geometry, [(8, 5, 64)], (99, 32), (5,))
    if (shapes, fields) == ([(2, 5, 64)], {}):
        geometry = geometry._replace(dims=(0,))
    with pytest.raises(ValueError, match="do not fit"):
        check_fit(geometry._replace(**fields), shapes, table, rows)


@pytest.mark.parametrize(
    ("axes", "shape", "message"),
    [
        (1, (), "positions must be (..., seq), got shape ()"),
        (2, (2,), "positions must be (..., seq, 2) for 2 axes, got shape (2,)"),
        (2, (5, 3), "positions must be (..., seq, 2) for 2 axes, got shape (5, 3)"),
        (3, (3, 2, 5), "positions must be (..., seq, 3) for 3 axes, got shape (3, 2, 5); move the "
         "axes last"),
        (3, (3,), "positions must be (..., seq, 3) for 3 axes, got shape (3,)"),
    ],
)  # fmt: skip
def test_positions_of_other_axes_are_refused(axes, shape, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        check_axes(axes, shape)
    for fine in ((1, (5,)), (1, (2, 5)), (2, (5, 2)), (3, (4, 5, 3))):
        check_axes(*fine)
