"""What each process of `test_dtensor.py` does: every check by name, its outcome in a JSON report.

python tests/dtensor_ranks.py FOLDER LAUNCH ...
"""

import itertools
import json
import sys
import traceback
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing
from grids import pairwise
from published import scaled
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import rotary
import rotary.nn
from rotary import kernels
from rotary.kernels import host
from rotary.kernels.torch import route as torch_kernel

SPEC = rotary.Rotary(head_dim=8, base=500.0)
SPECS = {
    "half": SPEC,
    "a slice, mixed": rotary.Rotary(
        head_dim=8, rotary_dim=4, start=2, layout="interleaved", out_layout="half", sign=-1
    ),
    "dynamic": scaled("dynamic", 8, 2.0, 4),
    "yarn": scaled("yarn", 8, 4.0, 64),
}
BATCH, HEADS, SEQ = 3, (4, 2), 7  # no axis but the heads of q is a multiple of the ranks


def cut(whole, mesh, placements):
    """A whole tensor, the same on every rank, as a DTensor; torch cuts it, nothing is sent."""
    return distribute_tensor(whole, mesh, placements, src_data_rank=None)


def q_and_k(dtype=torch.float32, seq_dim=-2, grad=False):
    torch.manual_seed(0)
    made = [torch.randn(BATCH, heads, SEQ, 8).to(dtype) for heads in HEADS]
    if seq_dim == -3:
        made = [x.transpose(1, 2) for x in made]
    return [x.requires_grad_(grad) for x in made]


def same(got, whole, case=""):
    """That this rank holds, bit for bit, its part of a whole tensor, and knows the shape of it.

    Or of each of several tensors.
    """
    if not isinstance(whole, torch.Tensor):
        for one, other in zip(got, whole, strict=True):
            same(one, other, case)
        return
    want = cut(whole.detach(), got.device_mesh, got.placements).to_local()
    assert got.shape == whole.shape, f"{case}: shape {got.shape}, not {whole.shape}"
    local = got.to_local()
    assert local.shape == want.shape, f"{case}: holds {local.shape}, not {want.shape}"
    assert torch.equal(local, want), f"{case}: {local} is not {want}"


def refused(call, kind, *words):
    """That a call is refused in one line with these words."""
    try:
        call()
    except kind as error:
        message = str(error)
    else:
        raise AssertionError(f"not refused: {words}")
    missing = [word for word in words if word not in message]
    assert not missing, f"{missing} not in: {message}"
    assert "\n" not in message


def meshes(world):
    yield init_device_mesh("cpu", (world,))
    if world == 4:
        yield init_device_mesh("cpu", (2, 2))


def all_placements(mesh, axes=(0, 1, 2)):
    kinds = [Replicate(), *map(Shard, axes)]
    return list(itertools.product(kinds, repeat=mesh.ndim))


def cases(world):
    """Every way to lie on 2 ranks, or on 2 x 2; 4 in a row are `in_a_row`."""
    *_, mesh = meshes(world)
    for placements in all_placements(mesh):
        yield mesh, list(placements), f"{mesh.shape} {placements}"


def in_a_row(world):
    """On one axis of 4 ranks: two of them hold nothing of an axis of 2."""
    mesh = next(meshes(world))
    for placements in all_placements(mesh) if world == 4 else ():
        yield mesh, list(placements), f"{mesh.shape} {placements}"


def along(placement, dims):
    """How a table lies that goes along with x; `dims` has its axis for each axis of x."""
    dim = None if placement.is_replicate() else dims[placement.dim]
    return Replicate() if dim is None else Shard(dim)


def the_comparison_of_a_shard_can_fail(world):
    """One token moved, one bit changed: `same` must see both."""
    mesh, x = next(meshes(world)), torch.randn(2 * world, 4)
    same(cut(x, mesh, [Shard(0)]), x)
    for wrong in (x.roll(1, 0), torch.nextafter(x, x + 1)):
        try:
            same(cut(wrong, mesh, [Shard(0)]), x)
        except AssertionError:
            continue
        raise RuntimeError("a wrong shard was taken")


def every_shard_has_the_bits_of_the_whole(world):
    rows = torch.stack([torch.arange(SEQ) + 5 * row for row in range(BATCH)])
    positions = {
        "(seq)": torch.arange(SEQ),
        "(batch, seq)": rows,
        "(1, seq)": rows[1:2],
        "(1, 1, seq)": rows[None, 1:2],
    }
    dtypes = torch.float32, torch.bfloat16
    for (mesh, placements, case), shape, name, dtype in pairwise(
        (*cases(world), *in_a_row(world)), positions, SPECS, dtypes
    ):
        spec, whole = SPECS[name], q_and_k(dtype)
        cos, sin = rotary.cos_sin(spec, positions[shape], seq_len=99)
        want = rotary.rotate(whole, cos, sin, spec)
        got = rotary.rotate([cut(x, mesh, placements) for x in whole], cos, sin, spec)
        for one, other in zip(got, want, strict=True):
            assert one.placements == tuple(placements)
            same(one, other, f"{name} {dtype} {shape} {case}")


def gradients_have_the_bits_of_the_whole(world):
    cos, sin = rotary.cos_sin(SPEC, torch.arange(SEQ))
    whole = q_and_k(grad=True)
    weights = [torch.randn_like(x) for x in whole]
    want = torch.autograd.grad(rotary.rotate(whole, cos, sin, SPEC), whole, weights)
    by_angle = torch.autograd.grad(rotary.apply(SPEC, *whole), whole, weights)
    for mesh, placements, case in cases(world):
        shards = [cut(x.detach(), mesh, placements).requires_grad_() for x in whole]
        given = [cut(w, mesh, placements) for w in weights]
        got = torch.autograd.grad(rotary.rotate(shards, cos, sin, SPEC), shards, given)
        exact = torch.autograd.grad(rotary.apply(SPEC, *shards), shards, given)
        same(got, want, case)
        same(exact, by_angle, case)


def second_gradients_are_those_of_the_whole(world):
    cos, sin = rotary.cos_sin(SPEC, torch.arange(SEQ))
    whole = q_and_k(grad=True)[0]
    weight = torch.randn_like(whole).requires_grad_()

    def twice(x, w):
        (first,) = torch.autograd.grad(rotary.rotate(x, cos, sin, SPEC), x, w, create_graph=True)
        return torch.autograd.grad(first, w, torch.ones_like(first))[0]

    want = twice(whole, weight)
    for mesh, placements, case in cases(world):
        x, w = (cut(each.detach(), mesh, placements).requires_grad_() for each in (whole, weight))
        same(twice(x, w), want, case)


def nothing_is_sent_forward_or_backward(world):
    cos, sin = rotary.cos_sin(SPEC, torch.arange(SEQ))
    whole, positions = q_and_k(), torch.arange(SEQ)
    for mesh, placements, case in cases(world):
        if [str(own) for own in placements] != sorted(str(own) for own in placements):
            continue  # as with the axes of the mesh swapped
        shards = [cut(x, mesh, placements).requires_grad_() for x in whole]
        where = [Shard(0) if own == Shard(2) else Replicate() for own in placements]
        own = cut(positions, mesh, where)
        with CommDebugMode() as comm:
            for results in (
                rotary.rotate(shards, cos, sin, SPEC),
                rotary.apply(SPEC, *shards),
                rotary.apply(SPEC, *shards, precision="float32"),
                rotary.apply(SPEC, *shards, positions=own),
                rotary.rotate(shards, *rotary.cos_sin(SPEC, own), SPEC),
            ):
                torch.autograd.grad(results, shards, [x.detach() for x in results])
        assert comm.get_total_counts() == 0, f"{case}: {comm.get_comm_counts()}"


def the_count_of_what_is_sent_sees_a_collective(world):
    mesh = next(meshes(world))
    with CommDebugMode() as comm:
        cut(q_and_k()[0], mesh, [Shard(2)]).redistribute(placements=[Replicate()])
    assert comm.get_total_counts() == 1


def apply_counts_positions_over_all_ranks(world):
    specs = [
        (name, seq_len)  # one length for all, and one for each row
        for name, spec in SPECS.items()
        for seq_len in ((None, 20, [5, 9, 17]) if spec.depends_on_length else (None,))
    ]
    for (mesh, placements, case), (name, seq_len), precision, seq_dim in pairwise(
        cases(world), specs, ("exact", "float32"), (-2, -3)
    ):
        whole = q_and_k(seq_dim=seq_dim)
        options = {"precision": precision, "seq_dim": seq_dim, "seq_len": seq_len}
        want = rotary.apply(SPECS[name], *whole, **options)
        got = rotary.apply(SPECS[name], *[cut(x, mesh, placements) for x in whole], **options)
        same(got, want, f"{name} {options} {case}")


def apply_takes_positions_whole_or_cut(world):
    rows = torch.stack([torch.arange(SEQ) * 3 + 5 * row for row in range(BATCH)])
    scaled = SPECS["dynamic"]
    axial = rotary.Rotary(head_dim=8, axes=(0, 1, 0, 1))
    given = {
        "(seq)": (SPEC, rows[1], None, (None, None, 0)),
        "(batch, seq)": (SPEC, rows, None, (0, None, 1)),
        "a length": (scaled, rows, 40, (0, None, 1)),
        "a length for each row": (scaled, rows, [4, 9, 30], (0, None, 1)),
        "axes": (axial, torch.stack((rows, rows * 2), -1), None, (0, None, 1)),
        "fractions": (SPEC, rows.double() / 3, None, (0, None, 1)),
    }
    whole = q_and_k()
    want = {
        name: rotary.apply(spec, *whole, positions=positions, seq_len=seq_len)
        for name, (spec, positions, seq_len, _) in given.items()
    }
    for (mesh, placements, case), name, form in pairwise(
        cases(world), given, ("plain", "whole", "cut")
    ):
        spec, positions, seq_len, dims = given[name]
        lie = [along(own, dims) if form == "cut" else Replicate() for own in placements]
        where = positions if form == "plain" else cut(positions, mesh, lie)
        shards = [cut(x, mesh, placements) for x in whole]
        got = rotary.apply(spec, *shards, positions=where, seq_len=seq_len)
        same(got, want[name], f"{name} {form} {case}")


def tables_lie_as_their_positions(world):
    positions = torch.arange(BATCH * SEQ).view(BATCH, SEQ)
    for precision in ("exact", "float32"):
        want = rotary.cos_sin(SPEC, positions, precision)
        for mesh in meshes(world):
            for placements in all_placements(mesh, (0, 1)):
                given = cut(positions, mesh, placements)
                for one, other in zip(rotary.cos_sin(SPEC, given, precision), want, strict=True):
                    assert one.placements == placements
                    same(one, other, f"{precision} {placements}")


def row_numbers_pick_from_whole_tables(world):
    cos, sin = rotary.cos_sin(SPEC, torch.arange(40))
    rows = torch.stack([torch.arange(SEQ) * 3 + 5 * row for row in range(BATCH)])
    whole = q_and_k()
    want = rotary.rotate(whole, cos, sin, SPEC, positions=rows)
    for mesh, placements, case in cases(world):
        shards = [cut(x, mesh, placements) for x in whole]
        alike = {Shard(0): Shard(0), Shard(2): Shard(1)}
        own = cut(rows, mesh, [alike.get(placement, Replicate()) for placement in placements])
        both = [cut(table, mesh, [Replicate()] * mesh.ndim) for table in (cos, sin)]
        for tables, positions in (((cos, sin), rows), ((cos, sin), rows.numpy()), (both, own)):
            got = rotary.rotate(shards, *tables, SPEC, positions=positions)
            same(got, want, case)


def q_and_k_may_lie_differently(world):
    cos, sin = rotary.cos_sin(SPEC, torch.arange(SEQ))
    whole = q_and_k(grad=True)
    weights = [torch.randn_like(x) for x in whole]
    want = rotary.rotate(whole, cos, sin, SPEC)
    grads = torch.autograd.grad(want, whole, weights)
    for mesh in meshes(world):
        kinds = [Replicate(), *map(Shard, (0, 1, 2))]
        for each in pairwise(*[kinds] * 2 * mesh.ndim):
            pair = each[: mesh.ndim], each[mesh.ndim :]
            shards = [cut(x.detach(), mesh, p).requires_grad_() for x, p in zip(whole, pair)]  # noqa: B905
            for got in (rotary.rotate(shards, cos, sin, SPEC), rotary.apply(SPEC, *shards)):
                given = [cut(w, mesh, p) for w, p in zip(weights, pair, strict=True)]
                back = torch.autograd.grad(got, shards, given)
                same((*got, *back), (*want, *grads), str(pair))


def the_loops_write_into_the_shards(world):
    cos, sin = rotary.cos_sin(SPEC, torch.arange(SEQ))
    for mesh, placements, case in cases(world):
        whole = q_and_k()
        want = rotary.rotate(whole, cos, sin, SPEC)
        shards = [cut(x.clone(), mesh, placements) for x in whole]
        addresses = [x.to_local().data_ptr() for x in shards]
        versions = [x._version for x in shards]
        got = rotary.rotate(shards, cos, sin, SPEC, out=shards)
        assert all(a is b for a, b in zip(got, shards, strict=True))
        assert [x.to_local().data_ptr() for x in got] == addresses
        assert all(x._version > v for x, v in zip(got, versions, strict=True))
        outs = [torch.full_like(x, torch.nan) for x in shards]
        again = [cut(x.clone(), mesh, placements) for x in whole]
        assert rotary.apply(SPEC, *again, out=outs)[1] is outs[1]
        same(got, want, case)
        same(outs, want, case)
    mesh, bits = next(meshes(world)), torch.randn(2, 2, 8, 8)
    a, b = bits.clone()
    xs = DTensor.from_local(a, mesh, [Shard(0)]), DTensor.from_local(b, mesh, [Replicate()])
    crossed = DTensor.from_local(b, mesh, [Shard(0)]), DTensor.from_local(a, mesh, [Replicate()])
    tables = rotary.cos_sin(SPEC, torch.arange(8))
    refused(lambda: rotary.rotate(xs, *tables, SPEC, out=crossed), ValueError, "out overlaps")
    assert torch.equal(a, bits[0])
    assert torch.equal(b, bits[1])


def heads_and_tokens_are_counted_in_the_whole(world):
    """A rank with as many heads as tokens knows which is which where the whole has more tokens."""
    mesh = next(meshes(world))
    xs = [torch.randn(BATCH, 4, 4 * world, 8) for _ in range(2)]
    tables = rotary.cos_sin(SPEC, torch.arange(4 * world))
    shards = [cut(x, mesh, [Shard(2)]) for x in xs]
    want = rotary.rotate(xs, *tables, SPEC)
    same(rotary.rotate(shards, *tables, SPEC), want)
    square, few = cut(torch.randn(BATCH, 4, 4, 8), mesh, [Shard(1)]), torch.arange(4)
    words = "seq_dim=-2", "seq_dim=-3"
    refused(lambda: rotary.rotate(square, *rotary.cos_sin(SPEC, few), SPEC), ValueError, *words)
    refused(lambda: rotary.apply(SPEC, square, positions=few), ValueError, *words)


def tables_that_want_a_gradient_get_that_of_the_whole(world):
    rows = torch.stack([torch.arange(SEQ) + 5 * row for row in range(BATCH)])
    given = {"(seq)": (rows[1], (None, None, 0)), "(batch, seq)": (rows, (0, None, 1))}
    whole, want = q_and_k(), {}
    weights = [torch.randn_like(x) for x in whole]
    for name, (positions, _) in given.items():
        leaves = [table.clone().requires_grad_() for table in rotary.cos_sin(SPEC, positions)]
        want[name] = torch.autograd.grad(rotary.rotate(whole, *leaves, SPEC), leaves, weights)
    for (mesh, placements, case), name, form in pairwise(cases(world), given, ("whole", "cut")):
        positions, dims = given[name]
        lie = [along(own, dims) if form == "cut" else Replicate() for own in placements]
        tables = rotary.cos_sin(SPEC, positions)
        own = [cut(table, mesh, lie).requires_grad_() for table in tables]
        shards = [cut(x, mesh, placements) for x in whole]
        upstream = [cut(w, mesh, placements) for w in weights]
        back = torch.autograd.grad(rotary.rotate(shards, *own, SPEC), own, upstream)
        for one, other in zip(back, want[name], strict=True):
            message = f"{name} {form} {case}"
            torch.testing.assert_close(one.full_tensor(), other, msg=message)


def a_rank_makes_angles_for_its_own_tokens_alone(world):
    mesh, made = next(meshes(world)), []
    spec, kept = rotary.Rotary(head_dim=8, base=777.0), host()

    def tables(positions, *rest):
        made.append(positions.size)
        return kept.tables(positions, *rest)

    kernels.kernels_by_type[np.ndarray] = replace(kept, tables=tables)
    try:
        x = cut(torch.randn(1, 2, 8 * world, 8), mesh, [Shard(2)])
        for _ in range(32):  # layers
            rotary.apply(spec, x, x)
        assert made == [8], made
        for count in range(9, 30):  # more than are kept
            rotary.apply(spec, cut(torch.randn(1, 2, count * world, 8), mesh, [Shard(2)]))
        rotary.apply(spec, x, x)
        assert made == [8, *range(9, 30), 8], made
        positions = cut(torch.arange(8 * world), mesh, [Shard(0)])
        rotary.apply(spec, x, x, positions=positions)
        assert made == [8, *range(9, 30), 8, 8], made
    finally:
        kernels.kernels_by_type[np.ndarray] = kept


def a_kernel_without_tables_is_given_the_positions_of_the_shard(world):
    """As on a GPU, played here: the positions of each shard, and what has the shape of it."""
    module, played = torch_kernel, []
    kept = module.makes_angles, module.rotate_exact

    def rotate_exact(xs, turns, factor, axes, positions, options, out):
        assert turns.tolist() == rotary.turns(SPEC).tolist()
        where = torch.arange(xs[0].shape[-2]) if positions is None else positions
        played.append(where)
        way = {"conjugate": options.conjugate}
        turned = rotary.rotate(tuple(xs), *rotary.cos_sin(SPEC, where), SPEC, **way)
        return turned if out is None else tuple(map(torch.Tensor.copy_, out, turned))

    module.makes_angles = lambda xs, positions, out, num_axes: not isinstance(xs[0], DTensor)
    module.rotate_exact = rotate_exact
    rows = torch.stack([torch.arange(SEQ) * 3 + 5 * row for row in range(BATCH)])
    whole = q_and_k()
    try:
        for mesh, placements, case in cases(world):
            shards = [cut(x, mesh, placements) for x in whole]
            lie = [along(own, (0, None, 1)) for own in placements]
            for positions, own in ((None, None), (rows, rows), (rows, cut(rows, mesh, lie))):
                where = torch.arange(SEQ) if positions is None else positions
                want = rotary.rotate(whole, *rotary.cos_sin(SPEC, where), SPEC)
                for one, other in zip(
                    rotary.apply(SPEC, *shards, positions=own), want, strict=True
                ):
                    same(one, other, case)
        assert played
    finally:
        module.makes_angles, module.rotate_exact = kept


def the_order_of_memory_is_kept(world):
    base = torch.randn(BATCH, SEQ, 4, 8)  # (batch, seq, heads, channels)
    whole = base.transpose(1, 2)
    for mesh, placements, case in cases(world):
        x = cut(base, mesh, placements).transpose(1, 2)
        got, held = rotary.apply(SPEC, x), x.to_local()
        same(got, rotary.apply(SPEC, whole), case)
        if held.numel() and min(held.shape) > 1:
            assert got.to_local().stride() == held.stride(), case
            assert got.stride() == whole.stride(), case


def a_tensor_on_its_way_is_waited_for(world):
    mesh, whole = next(meshes(world)), q_and_k()[0]
    x = cut(whole, mesh, [Shard(2)]).redistribute(placements=[Replicate()], async_op=True)
    torch.testing.assert_close(rotary.apply(SPEC, x).to_local(), rotary.apply(SPEC, whole))


def a_rank_outside_of_the_mesh_has_nothing_to_do(world):
    mesh = DeviceMesh("cpu", [0, 1])
    whole = q_and_k()
    shards = [cut(x, mesh, [Shard(2)]) for x in whole]
    got = rotary.apply(SPEC, *shards)
    if dist.get_rank() < 2:
        same(got, rotary.apply(SPEC, *whole))
    else:
        assert [x.to_local().numel() for x in got] == [0, 0]
        assert rotary.apply(SPEC, *shards, out=shards)[0] is shards[0]


def cached_keys_move_in_their_shards(world):
    whole = q_and_k()[1]
    want = rotary.rerotate(whole, SPEC, range(40, 40 + SEQ), range(8, 8 + SEQ))
    for mesh, placements, case in cases(world):
        moved = rotary.rerotate(
            cut(whole, mesh, placements), SPEC, range(40, 40 + SEQ), range(8, 8 + SEQ)
        )
        same(moved, want, case)
    where = cut(torch.arange(SEQ), mesh, [Replicate()] * mesh.ndim)
    refused(lambda: rotary.rerotate(whole, SPEC, where, where), TypeError, "must be plain")


def what_would_need_another_rank_is_refused(world):
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh = next(meshes(world))
    cos, sin = rotary.cos_sin(SPEC, torch.arange(8))
    whole = torch.randn(2, 4, 8, 8)

    def both(x, *words):
        refused(lambda: rotary.rotate(x, cos, sin, SPEC), ValueError, *words)
        refused(lambda: rotary.apply(SPEC, x), ValueError, *words)

    mend = "call x.redistribute(placements=[Replicate()])"
    both(cut(whole, mesh, [Shard(3)]), "x is sharded along its last axis", "Shard(dim=3)", mend)
    both(DTensor.from_local(whole, mesh, [Partial()]), "is a partial sum", "Partial", mend)
    strided = DTensor.from_local(whole, mesh, [_StridedShard(2, split_factor=2)])
    both(strided, "not supported", "_StridedShard", mend)
    lacking = cut(whole, mesh, [Shard(2)]).to_local()[:, :, 1:]
    wrong = DTensor.from_local(lacking, mesh, [Shard(2)], shape=whole.shape, stride=whole.stride())
    both(wrong, "this rank holds", "shape= and stride=")


def operands_that_do_not_go_together_are_refused(world):
    mesh = next(meshes(world))
    cos, sin = tables = rotary.cos_sin(SPEC, torch.arange(8))
    whole = torch.randn(2, 4, 8, 8)
    shard, copy = cut(whole, mesh, [Shard(2)]), cut(whole, mesh, [Replicate()])
    cuts = [cut(table, mesh, [Shard(0)]) for table in tables]
    with_batch = [cut(t.expand(2, -1, -1), mesh, [Shard(0)]) for t in tables]
    words = "rank would miss rows", "cos.redistribute(placements=[Replicate()])"
    refused(lambda: rotary.rotate(copy, *cuts, SPEC), ValueError, *words)
    refused(lambda: rotary.rotate(cut(whole, mesh, [Shard(1)]), *cuts, SPEC), ValueError, *words)
    refused(
        lambda: rotary.rotate(shard, *with_batch, SPEC), ValueError, "miss rows", "[Shard(dim=1)]"
    )
    pairs = [cut(table, mesh, [Shard(1)]) for table in tables]
    refused(lambda: rotary.rotate(copy, *pairs, SPEC), ValueError, *words)
    partial = [DTensor.from_local(table, mesh, [Partial()]) for table in tables]
    refused(lambda: rotary.rotate(shard, *partial, SPEC), ValueError, "cos is a partial sum")
    rows = cut(torch.arange(8), mesh, [Shard(0)])
    refused(
        lambda: rotary.rotate(copy, *tables, SPEC, positions=rows),
        ValueError,
        "positions",
        "miss rows",
    )
    refused(
        lambda: rotary.rotate(shard, *cuts, SPEC, positions=rows), ValueError, "cos", "miss rows"
    )
    refused(lambda: rotary.apply(SPEC, copy, positions=rows), ValueError, "miss rows")

    flat = init_device_mesh("cpu", (1, world))
    other = cut(whole, flat, [Replicate(), Shard(2)])
    refused(lambda: rotary.rotate((shard, other), *tables, SPEC), ValueError, "one mesh")
    elsewhere = [cut(table, flat, [Replicate()] * 2) for table in tables]
    refused(lambda: rotary.rotate(shard, *elsewhere, SPEC), ValueError, "cos must be on one mesh")

    for mixed in ((shard, whole), (shard, shard.to_local())):
        refused(lambda: rotary.rotate(mixed, *tables, SPEC), TypeError, "DTensor.from_local")  # noqa: B023
        refused(lambda: rotary.apply(SPEC, *mixed), TypeError, "DTensor.from_local")  # noqa: B023
    refused(lambda: rotary.rotate((whole, shard), *tables, SPEC), TypeError, "plain", "to_local()")
    refused(lambda: rotary.rotate(whole, *cuts, SPEC), TypeError, "to_local()")
    refused(lambda: rotary.rotate(whole, cos, sin, SPEC, positions=rows), TypeError, "to_local()")
    refused(lambda: rotary.rotate(shard, *tables, SPEC, out=whole), TypeError, "DTensor.from_local")
    refused(
        lambda: rotary.rotate(shard, *tables, SPEC, out=copy),
        ValueError,
        "out must have the placements of x",
    )

    own = [table[: 8 // world] for table in tables]
    words = "does not fit", "of which this rank holds", "whole"
    refused(lambda: rotary.rotate(shard, *own, SPEC), ValueError, *words)
    few = torch.arange(8 // world)
    refused(lambda: rotary.apply(SPEC, shard, positions=few), ValueError, *words)
    leaf = cos.clone().requires_grad_()
    refused(
        lambda: rotary.rotate(shard, leaf, sin, SPEC), ValueError, "DTensor.from_local", "gradient"
    )
    leaf = cut(whole, mesh, [Shard(2)]).requires_grad_()
    refused(lambda: rotary.rotate(leaf, *tables, SPEC, out=leaf), RuntimeError, "autograd")


def the_length_of_a_row_is_asked_for_where_no_rank_knows_it(world):
    mesh, spec = next(meshes(world)), SPECS["dynamic"]
    positions = cut(torch.arange(8), mesh, [Shard(0)])
    refused(lambda: rotary.cos_sin(spec, positions), ValueError, "pass seq_len")
    whole = torch.randn(2, 4, 8, 8)
    x = cut(whole, mesh, [Shard(2)])
    refused(lambda: rotary.apply(spec, x, positions=positions), ValueError, "pass seq_len")
    same(rotary.apply(spec, x, positions=positions, seq_len=8), rotary.apply(spec, whole))
    rows = cut(torch.arange(8)[None] * torch.arange(4)[:, None], mesh, [Shard(0)])
    same(rotary.cos_sin(spec, rows)[0], rotary.cos_sin(spec, rows.full_tensor())[0])
    axial = rotary.Rotary(head_dim=8, axes=(0, 1, 0, 1))
    axes = cut(torch.zeros(8, 2, dtype=torch.int64), mesh, [Shard(1)])
    refused(lambda: rotary.cos_sin(axial, axes), ValueError, "positions is sharded", "redistribute")
    negative = cut(torch.arange(8) - 9, mesh, [Shard(0)])
    refused(lambda: rotary.cos_sin(SPEC, negative), ValueError, "allow_negative")


def results_of_all_ranks_together(world):
    """Gathered, for a comparison with another library outside."""
    mesh = next(meshes(world))
    torch.manual_seed(1)
    whole = [torch.randn(2, heads, 16, 8) for heads in HEADS]
    got = rotary.apply(SPEC, *[cut(x, mesh, [Shard(2)]) for x in whole], precision="float32")
    together = [x.full_tensor() for x in got]
    if dist.get_rank() == 0:
        torch.save((whole, together), Path(sys.argv[1], "2 ranks", "together.pt"))


def compiled_checks(world):
    """A function that compares compiled calls with those of whole tensors, and their names."""
    mesh = next(meshes(world))
    torch.manual_seed(0)
    whole = [torch.randn(BATCH, heads, SEQ, 8, requires_grad=True) for heads in HEADS]
    weights = [torch.randn_like(x) for x in whole]
    positions = torch.arange(SEQ) * 5
    cos, sin = rotary.cos_sin(SPEC, positions)

    def calls(place):
        own = place(positions, (None, None, 0))
        plain = cos, sin
        given = tuple(place(table, (None, None, 0)) for table in plain)
        return {
            "plain tables": lambda q, k: rotary.rotate((q, k), *plain, SPEC),
            "tables that go along": lambda q, k: rotary.rotate((q, k), *given, SPEC),
            "rows": lambda q, k: rotary.rotate((q, k), *plain, SPEC, positions=positions % SEQ),
            "apply": lambda q, k: rotary.apply(SPEC, q, k),
            "positions": lambda q, k: rotary.apply(SPEC, q, k, positions=own),
            "float32": lambda q, k: rotary.apply(SPEC, q, k, precision="float32"),
        }

    def check(placed, backend="aot_eager"):
        """Calls by placement and name in one graph, each with its own q and k."""
        shards = [
            [cut(x.detach(), mesh, [placement]).requires_grad_() for x in whole]
            for placement, _ in placed
        ]
        given = [cut(w, mesh, [placement]) for placement, _ in placed for w in weights]
        made = [
            calls(lambda x, dims, own=placement: cut(x, mesh, [along(own, dims)]))[name]
            for placement, name in placed
        ]

        def every(*xs):
            return [y for call, x in zip(made, xs, strict=True) for y in call(*x)]

        torch._dynamo.reset()
        got = torch.compile(every, fullgraph=True, backend=backend)(*shards)
        leaves = [x for pair in shards for x in pair]
        back = torch.autograd.grad(got, leaves, given)
        for at, (placement, name) in enumerate(placed):
            want = calls(lambda x, _: x)[name](*whole)
            grads = torch.autograd.grad(want, whole, weights)
            own = slice(2 * at, 2 * at + 2)
            for one, other in zip((*got[own], *back[own]), (*want, *grads), strict=True):
                part = cut(other.detach(), mesh, [placement]).to_local()
                assert one.placements == (placement,)
                assert one.shape == other.shape
                message = f"{name} {placement} {backend}"
                torch.testing.assert_close(one.to_local(), part, rtol=0, atol=1e-6, msg=message)

    return check, list(calls(lambda x, _: x))


def compiled_calls_are_one_graph_forward_and_backward(world):
    check, names = compiled_checks(world)
    check([(Shard(2), name) for name in names])


def a_compiled_call_is_right_in_every_placement_and_by_inductor(world):
    """Nothing is sent, so each rank does a part: the last one that of placements, as its shards
    start later and are of another size than the batch.
    """
    check, _ = compiled_checks(world)
    if dist.get_rank():
        check([(placement, "apply") for placement in (Shard(0), Shard(1), Replicate())])
    else:
        check([(Shard(2), "apply")], "inductor")


def a_compiled_call_writes_into_the_shards(world):
    mesh, whole = next(meshes(world)), q_and_k()
    cos, sin = rotary.cos_sin(SPEC, torch.arange(SEQ))
    shards = [cut(x.clone(), mesh, [Shard(2)]) for x in whole]
    call = torch.compile(
        lambda q, k: rotary.rotate((q, k), cos, sin, SPEC, out=(q, k)),
        fullgraph=True,
        backend="aot_eager",
    )
    call(*shards)
    same(shards, rotary.rotate(whole, cos, sin, SPEC))


class Projections(torch.nn.Module):
    """q and k of an attention layer, rotated by whatever it is given."""

    def __init__(self, rope):
        super().__init__()
        torch.manual_seed(3)
        self.q, self.k, self.rope = torch.nn.Linear(16, 32), torch.nn.Linear(16, 16), rope

    def forward(self, x, **given):
        q, k = (each(x).unflatten(-1, (-1, 8)).transpose(1, 2) for each in (self.q, self.k))
        self.seen = q.detach(), k.detach(), given
        return self.rope(q, k, **given)


def mixed(rope, mesh):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=True)
    return fully_shard(Projections(rope), mesh=mesh, mp_policy=policy)


def mixed_precision_leaves_angles_exact(world):
    mesh = next(meshes(world))
    model = mixed(rotary.nn.RotaryEmbedding(SPEC), mesh)
    x, far = torch.randn(2, SEQ, 16), torch.arange(SEQ) + 1_000_003  # no such bfloat16
    for given in ({}, {"positions": far}, {"positions": far.expand(2, -1)}):
        results = model(x, **given)
        q, k, seen = model.seen
        assert (q.dtype, results[0].dtype) == (torch.bfloat16, torch.bfloat16)
        positions = given.get("positions", torch.arange(SEQ))
        if given:
            assert seen["positions"].dtype == torch.int64
            assert torch.equal(seen["positions"], positions)
        tables = rotary.cos_sin(SPEC, positions.numpy())
        want = rotary.rotate((q, k), *map(torch.from_numpy, tables), SPEC)
        assert all(map(torch.equal, results, want))
        (results[0].float().sum() + results[1].float().sum()).backward()
        assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
        model.zero_grad()


def what_mixed_precision_rounded_is_refused(world):
    mesh, x = next(meshes(world)), torch.randn(2, SEQ, 16)
    model = mixed(rotary.nn.RotaryEmbedding(SPEC), mesh)
    seconds = torch.arange(SEQ).double() / 3
    words = "positions must be whole numbers", "got torch.bfloat16"
    refused(lambda: model(x, positions=seconds), TypeError, *words)
    model = mixed(lambda q, k, cos, sin: rotary.rotate((q, k), cos, sin, SPEC), mesh)
    cos, sin = rotary.cos_sin(SPEC, torch.arange(SEQ))
    words = "tables must be float32", "bfloat16", "already rounded"
    refused(lambda: model(x, cos=cos, sin=sin), TypeError, *words)


def a_tensor_parallel_plan_cuts_heads(world):
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh, x = next(meshes(world)), torch.randn(2, SEQ, 16)
    rope = rotary.nn.RotaryEmbedding(SPEC)
    want = Projections(rope)(x)
    sources = [Replicate(), Shard(1)]  # Shard(1): what SequenceParallel hands on
    if torch.__version__.startswith("2.8."):  # its Linear fails on what it gathered along axis 1
        del sources[1]
    for source in sources:
        plan = dict.fromkeys("qk", ColwiseParallel(input_layouts=source, use_local_output=False))
        model = parallelize_module(Projections(rope), mesh, plan)
        with CommDebugMode() as before:
            results = model(cut(x, mesh, [source]))
        q, k, _ = model.seen
        assert q.placements == k.placements == (Shard(1),)  # of (batch, heads, seq, channels)
        assert before.get_total_counts() == (0 if source == Replicate() else 2)
        for one, other in zip(results, want, strict=True):
            part = cut(other.detach(), mesh, [Shard(1)]).to_local()
            torch.testing.assert_close(one.to_local(), part)


EAGER = (
    the_comparison_of_a_shard_can_fail,
    every_shard_has_the_bits_of_the_whole,
    gradients_have_the_bits_of_the_whole,
    second_gradients_are_those_of_the_whole,
    nothing_is_sent_forward_or_backward,
    the_count_of_what_is_sent_sees_a_collective,
    apply_counts_positions_over_all_ranks,
    apply_takes_positions_whole_or_cut,
    tables_lie_as_their_positions,
    row_numbers_pick_from_whole_tables,
    q_and_k_may_lie_differently,
    the_loops_write_into_the_shards,
    heads_and_tokens_are_counted_in_the_whole,
    tables_that_want_a_gradient_get_that_of_the_whole,
    a_rank_makes_angles_for_its_own_tokens_alone,
    a_kernel_without_tables_is_given_the_positions_of_the_shard,
    the_order_of_memory_is_kept,
    a_tensor_on_its_way_is_waited_for,
    a_rank_outside_of_the_mesh_has_nothing_to_do,
    cached_keys_move_in_their_shards,
    what_would_need_another_rank_is_refused,
    operands_that_do_not_go_together_are_refused,
    the_length_of_a_row_is_asked_for_where_no_rank_knows_it,
)
MODELS = (
    mixed_precision_leaves_angles_exact,
    what_mixed_precision_rounded_is_refused,
    a_tensor_parallel_plan_cuts_heads,
)
COMPILED = (
    compiled_calls_are_one_graph_forward_and_backward,
    a_compiled_call_is_right_in_every_placement_and_by_inductor,
    a_compiled_call_writes_into_the_shards,
)
SAVED = (results_of_all_ranks_together,)
LAUNCHES = {
    "2 ranks": (2, (*EAGER, *MODELS, *SAVED)),
    "4 ranks": (4, EAGER),
    "compiled": (2, COMPILED),
}


def work(rank, launch, folder):
    world, checks = LAUNCHES[launch]
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    timeout = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=timeout)
    report = {}
    for check in checks:
        try:
            check(world)
        except Exception:
            report[check.__name__] = traceback.format_exc()
        else:
            report[check.__name__] = ""
    Path(folder, f"rank{rank}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    # forked: torch and its compiler are imported, and the loops loaded, once for all ranks
    torch.set_num_threads(1)
    for kind in (torch.float32, torch.bfloat16):
        rotary.apply(SPEC, *q_and_k(kind))
    torch.compile(torch.neg, backend="aot_eager")(torch.ones(2))
    for name in sys.argv[2:]:
        reports = Path(sys.argv[1], name)
        reports.mkdir()
        ranks, _ = LAUNCHES[name]
        torch.multiprocessing.start_processes(work, (name, reports), ranks, start_method="fork")
