"""RoPE on 4 devices of JAX: prints what came of each law as JSON, for `test_jax_sharding.py`.

    python tests/jax_shards.py [LAW ...]    # all where none is named

A law gives plain numbers and texts and judges nothing; one that raises gives its traceback.
"""

import json
import re
import sys
import traceback
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax_shards_model import collectives, furthest, shared_model
from libraries import quick_xla
from published import scaled

import rotary
from rotary import positions

BATCH, SEQ, HEAD_DIM = 2, 64, 32
LONGROPE = {
    "factor": 4.0, "original_max_position_embeddings": 64,
    "short_factor": [1.0] * 16, "long_factor": [2.0] * 16,
}  # fmt: skip
SPECS = {
    "half": rotary.Rotary(head_dim=HEAD_DIM),
    "interleaved": rotary.Rotary(head_dim=HEAD_DIM, layout="interleaved"),
    "mixed": rotary.Rotary(head_dim=HEAD_DIM, layout="interleaved", out_layout="half"),
    "slice": rotary.Rotary(head_dim=HEAD_DIM, rotary_dim=16, start=8, layout="interleaved"),
    "axes": rotary.Rotary(head_dim=HEAD_DIM, axes=positions.sections(8, 4, 4)),
    "yarn": scaled("yarn", HEAD_DIM, 8.0, 4096),
    "dynamic": scaled("dynamic", HEAD_DIM, 2.0, 16),
    "longrope": rotary.Rotary(head_dim=HEAD_DIM, schedule="longrope", params=LONGROPE),
}  # fmt: skip
SHARDINGS = {
    "batch": P("x"),
    "heads": P(None, "x"),
    "sequence": P(None, None, "x"),
    "batch and heads": P("x", "y"),
    "batch and sequence": P("x", None, "y"),
    "heads and sequence": P(None, "x", "y"),
    "sequence twice": P(None, None, ("x", "y")),
}
LAWS = {}


@cache
def mesh_of(kind):
    """Two by two devices, made on first use: importing this file starts no device."""
    return jax.make_mesh((2, 2), ("x", "y"), axis_types=(kind,) * 2)


def law(function):
    LAWS[function.__name__] = function
    return function


def law_of_no_bits(function):
    """A law that XLA compiles without most of its optimizations, in less time."""

    def quickly():
        with quick_xla():
            return function()

    LAWS[function.__name__] = quickly
    return function


def arrays(dtype=np.float32, heads=(8, 4), seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((BATCH, n, SEQ, HEAD_DIM)).astype(dtype) for n in heads]


@cache  # the same function for the same call, so that it is compiled once
def applied(name, **options):
    return lambda q, k: rotary.apply(SPECS[name], q, k, **options)


def at(name, **options):
    return lambda q, k, p: rotary.apply(SPECS[name], q, k, positions=p, **options)


@cache
def trained(function):
    """The results of a call and, pulled back by q and k, its gradients."""

    def both(q, k, *rest):
        results, back = jax.vjp(lambda *x: function(*x, *rest), q, k)
        return (*results, *back((q, k)))

    return both


def put(values, mesh, shardings):
    return [
        jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(values, shardings, strict=True)
    ]


def sizes(text, operation):
    """How many numbers each result of an operation holds, on one device."""
    shapes = re.findall(rf"= \w+\[([\d,]*)\]\S* {operation}\(", text)
    return [int(np.prod([int(n) for n in shape.split(",") if n])) for shape in shapes]


def different(got, want):
    return sum(int((np.asarray(a) != np.asarray(b)).sum()) for a, b in zip(got, want, strict=True))


@cache
def on_one_device(call, shapes):
    """A call that is compiled for arrays of these (shape, dtype) on one device."""
    return jax.jit(call).lower(*[jax.ShapeDtypeStruct(*each) for each in shapes]).compile()


def compared(function, values, shardings, alone=None, kind=AxisType.Auto, wrap=trained):
    """A sharded call and its gradient, against `alone` on one device."""
    placed = put(values, mesh_of(kind), shardings)
    compiled = jax.jit(wrap(function)).lower(*placed).compile()
    shapes = tuple((x.shape, x.dtype) for x in values)
    single = on_one_device(wrap(function if alone is None else alone), shapes)
    got, want, text = compiled(*placed), single(*values), compiled.as_text()
    return {
        "different": different(got, want),
        "is_kept": all(
            y.sharding.is_equivalent_to(x.sharding, x.ndim)
            for x, y in zip(placed[:2] * 2, got, strict=False)
        ),
        "collectives": collectives(text),
        "tables": sizes(text, "divide"),
        "shifts": text.count("shift-right-logical("),
        "shifts_alone": single.as_text().count("shift-right-logical("),
        "largest_constant": max(sizes(text, "constant"), default=0),
    }


@law
def automatic():
    """Sharded arguments of jit: every way to share the axes, then every kind of rotation."""
    facts = {}
    for name, s in SHARDINGS.items():
        facts[name] = compared(applied("half"), arrays(), (s, s))
    s = SHARDINGS["heads and sequence"]
    facts["without gradient"] = compared(applied("half"), arrays(), (s, s), wrap=lambda f: f)
    for name, dtype in (("half", jnp.bfloat16), ("interleaved", np.float32),
                        ("interleaved", jnp.bfloat16), ("mixed", np.float32),
                        ("slice", np.float32), ("yarn", np.float32)):  # fmt: skip
        key = f"{name} {np.dtype(dtype).name}"
        facts[key] = compared(applied(name), arrays(dtype), (s, s))
    swapped, s = [x.swapaxes(1, 2).copy() for x in arrays()], P(None, "y", "x")
    facts["sequence before heads"] = compared(applied("half", seq_dim=-3), swapped, (s, s))
    return facts


@law
def one_device():
    """The reference itself, against complex numbers in float64."""
    facts = {}
    frequencies = 10_000.0 ** (-np.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))
    turn = np.exp(1j * np.arange(SEQ)[:, None] * frequencies)
    for name, first, second in (
        ("half", slice(0, HEAD_DIM // 2), slice(HEAD_DIM // 2, None)),
        ("interleaved", slice(0, None, 2), slice(1, None, 2)),
    ):
        for x, got in zip(arrays(), jax.jit(applied(name))(*arrays()), strict=True):
            want = np.empty(x.shape)
            pairs = (x[..., first] + 1j * x[..., second]) * turn
            want[..., first], want[..., second] = pairs.real, pairs.imag
            facts[f"{name} {x.shape[1]}"] = furthest(got, want)
    return facts


@law
def given_positions():
    """Positions sharded like the tokens; those of a causal balance, of rows, of three axes."""
    s, order = SHARDINGS["batch and sequence"], shard_order("head_tail")
    rows = np.stack([order, order + 1000])
    grid = np.stack([order, order // 8, order % 8], -1)
    return {
        "of all rows": compared(at("half"), [*arrays(), order], (s, s, P("y"))),
        "of each row": compared(at("half"), [*arrays(), rows], (s, s, P("x", "y"))),
        "of three axes": compared(at("axes"), [*arrays(), grid], (s, s, P("y"))),
        "fractions": compared(at("half"), [*arrays(), (order / 4).astype("f4")], (s, s, P("y"))),
    }


def turned(q, k, cos, sin):
    return rotary.rotate((q, k), cos, sin, layout="half")


def picked(q, k, cos, sin, rows):
    return rotary.rotate((q, k), cos, sin, positions=rows, layout="half")


def made_tables():
    return [np.asarray(table) for table in rotary.cos_sin(SPECS["half"], np.arange(SEQ))]


@law
def given_tables():
    """Tables made before, sharded or on every device, or picked from by row numbers."""
    s, cut, every, order = P("x", None, "y"), P("y"), P(), shard_order("head_tail")
    values = [*arrays(), *made_tables()]
    return {
        "sharded": compared(turned, values, (s, s, cut, cut)),
        "on every device": compared(turned, values, (s, s, every, every)),
        "by rows": compared(picked, [*values, order], (s, s, every, every, cut)),
    }


@law
def lengths():
    """Schedules that depend on the length, with and without seq_len."""
    s = SHARDINGS["batch and sequence"]
    return {
        "dynamic": compared(applied("dynamic"), arrays(), (s, s)),
        "dynamic of rows": compared(applied("dynamic", seq_len=(64, 200)), arrays(), (s, s)),
        "longrope, 200": compared(applied("longrope", seq_len=200), arrays(), (s, s)),
    }


def shard_order(order):
    """Which token of the whole sequence stands at each place when two devices hold it."""
    held = [positions.shard(SEQ, rank, 2, order) for rank in range(2)]
    return np.concatenate(held).astype(np.int32)


def mapped(local, *in_specs):
    return jax.shard_map(
        local, mesh=mesh_of(AxisType.Auto), in_specs=in_specs, out_specs=in_specs[:2]
    )


def counted(q, k):
    """Positions of a contiguous share, worked out on each device."""
    local = q.shape[2]
    own = jnp.arange(local) + jax.lax.axis_index("y") * local
    return rotary.apply(SPECS["half"], q, k, positions=own)


@law
def shard_map():
    """One program for each device, whose positions it is told."""
    facts, s = {}, SHARDINGS["batch and sequence"]
    for order in ("contiguous", "head_tail"):
        tokens = shard_order(order)
        back = np.argsort(tokens)

        def whole(q, k, p, tokens=tokens, back=back):
            turned = rotary.apply(SPECS["half"], q[:, :, back], k[:, :, back])
            return tuple(x[:, :, tokens] for x in turned)

        values = [*(x[:, :, tokens] for x in arrays()), tokens]
        facts[order] = compared(
            mapped(at("half"), s, s, P("y")), values, (s, s, P("y")), alone=whole
        )
    facts["axis_index"] = compared(mapped(counted, s, s), arrays(), (s, s), alone=applied("half"))
    heads = SHARDINGS["batch and heads"]
    facts["no sequence"] = compared(
        mapped(applied("half"), heads, heads), arrays(), (heads, heads), alone=applied("half")
    )
    facts["dynamic, 64"] = compared(
        mapped(at("dynamic", seq_len=SEQ), s, s, P("y")), [*arrays(), np.arange(SEQ)],
        (s, s, P("y")), alone=at("dynamic", seq_len=SEQ),
    )  # fmt: skip
    return facts


@law
def shard_map_without_positions():
    """What the documents warn of: every device counts from 0."""
    s = SHARDINGS["sequence"]
    got = jax.jit(mapped(applied("half"), s, s))(*arrays())
    restarted = np.tile(np.arange(SEQ // 2), 2)
    return {
        "different_from_whole": different(got, jax.jit(applied("half"))(*arrays())),
        "different_from_restarted": different(got, jax.jit(at("half"))(*arrays(), restarted)),
    }


@law
def head_dim():
    """The channels of a head on two devices, by automatic sharding."""
    s = P(None, None, "y", "x")
    return {name: compared(applied(name), arrays(), (s, s)) for name in ("half", "interleaved")}


@law
def explicit():
    """Shardings as types: known while tracing, and never changed by the compiler."""
    s, heads, order = P("x", None, "y"), P("x", "y"), shard_order("head_tail")
    cases = {
        "heads": (applied("half"), arrays(), (heads, heads)),
        "sequence": (applied("half"), arrays(), (s, s)),
        "interleaved": (applied("interleaved"), arrays(), (s, s)),
        "bfloat16": (applied("interleaved"), arrays(jnp.bfloat16), (s, s)),
        "mixed": (applied("mixed"), arrays(), (s, s)),
        "slice": (applied("slice"), arrays(), (s, s)),
        "positions": (at("half"), [*arrays(), order], (s, s, P("y"))),
        "rows": (picked, [*arrays(), *made_tables(), order], (s, s, P(), P(), P("y"))),
        "whole pairs": (applied("interleaved"), arrays(), (P(None, None, None, "x"),) * 2),
    }
    with jax.set_mesh(mesh_of(AxisType.Explicit)):
        return {name: compared(*case, kind=AxisType.Explicit) for name, case in cases.items()}


@law
def explicit_head_dim():
    """The message where a pair would be parted."""
    said = {}
    with jax.set_mesh(mesh_of(AxisType.Explicit)):
        (q,) = put(arrays()[:1], mesh_of(AxisType.Explicit), [P(None, None, None, "y")])
        for name in ("half", "mixed", "slice"):
            for way, call in (("eager", applied(name)), ("jit", jax.jit(applied(name)))):
                try:
                    call(q, q)
                except ValueError as error:
                    said[f"{name} {way}"] = str(error)
    return said


@law
def donated():
    """The result in the memory of the argument."""
    facts = {}
    for name, dtype in (("half", np.float32), ("interleaved", jnp.bfloat16)):
        s = SHARDINGS["heads and sequence"]
        q, k = put(arrays(dtype), mesh_of(AxisType.Auto), (s, s))
        want = jax.jit(applied(name))(q, k)
        call = jax.jit(applied(name), donate_argnums=(0, 1))
        compiled = call.lower(q, k).compile()
        got = call(q, k)
        facts[f"{name} {np.dtype(dtype).name}"] = {
            "different": different(got, want),
            "is_deleted": q.is_deleted() and k.is_deleted(),
            "reused_bytes": compiled.memory_analysis().alias_size_in_bytes,
            "output_bytes": sum(y.addressable_shards[0].data.nbytes for y in got),
        }
    return facts


@law_of_no_bits
def eager():
    """Calls that are not compiled, under one mesh after another: no table of one is left over."""
    q = arrays()[0]
    want = jax.jit(applied("half"))(q, q)
    half_of_them = Mesh(np.array(jax.devices()[2:]), ("z",))
    places = {
        "explicit mesh": (mesh_of(AxisType.Explicit), P("x", None, "y"), True),
        "automatic mesh": (mesh_of(AxisType.Auto), P("x", None, "y"), True),
        "two devices": (half_of_them, P(None, "z"), True),
        "no mesh": (half_of_them, P(None, None, "z"), False),
        "explicit again": (mesh_of(AxisType.Explicit), P(None, None, "x"), True),
    }
    facts = {}
    for name, (mesh, s, is_set) in places.items():
        if is_set:
            with jax.set_mesh(mesh):
                got = applied("half")(*put([q, q], mesh, (s, s)))
        else:
            got = applied("half")(*put([q, q], mesh, (s, s)))
        facts[name] = {
            "furthest": furthest(got, want),
            "is_kept": got[0].sharding.is_equivalent_to(NamedSharding(mesh, s), 4),
        }
    return facts


@law_of_no_bits
def placed():
    """A program for each device by pmap; fractions under shard_map; an array on one device."""
    q, k, p = *arrays(), np.arange(BATCH * SEQ, dtype=np.int32).reshape(BATCH, SEQ) * 7
    each = jax.pmap(lambda *x: at("half")(*(one[None] for one in x)))(q, k, p)
    cut = {"mesh": mesh_of(AxisType.Auto), "in_specs": P("x"), "out_specs": P("x")}
    mapped = jax.shard_map(lambda p: rotary.cos_sin(SPECS["half"], p), **cut)
    last = jax.devices()[3]
    return {
        "pmap": furthest([y[:, 0] for y in each], at("half")(q, k, p)),
        "fractions": furthest(jax.jit(mapped)(p / 8.0), rotary.cos_sin(SPECS["half"], p / 8.0)),
        "one device": [str(d) for d in applied("half")(jax.device_put(q, last), q)[0].devices()],
        "device": str(last),
    }


@law
def long_sequence():
    """A compiled call at 131 072 tokens, by shapes alone."""
    seq, facts = 131_072, {}
    for name, s in (
        ("sequence", P(None, None, "x")),
        ("sequence twice", P(None, None, ("x", "y"))),
    ):
        x = jax.ShapeDtypeStruct(
            (1, 2, seq, 64), np.float32, sharding=NamedSharding(mesh_of(AxisType.Auto), s)
        )
        spec = rotary.Rotary(head_dim=64)
        compiled = jax.jit(lambda x, spec=spec: rotary.apply(spec, x)).lower(x).compile()
        text = compiled.as_text()
        facts[name] = {
            "collectives": collectives(text),
            "tables": sizes(text, "divide"),
            "largest_constant": max(sizes(text, "constant"), default=0),
            "working_bytes": compiled.memory_analysis().temp_size_in_bytes,
        }
    return facts


@law_of_no_bits
def normalized():
    """`rotary.fused` shared by heads and sequence: the mean of a head, and of all heads."""
    s, facts = SHARDINGS["heads and sequence"], {}
    for name, sizes_ in (("a head", (HEAD_DIM,) * 2), ("all heads", (8 * HEAD_DIM, 4 * HEAD_DIM))):
        norm = rotary.Norm(*[np.linspace(1, 2, n, dtype=np.float32) for n in sizes_], eps=1e-6)

        def call(q, k, norm=norm):
            return rotary.fused(q, k, None, SPECS["half"], norm=norm)[:2]

        placed = put(arrays(), mesh_of(AxisType.Auto), (s, s))
        compiled = jax.jit(call).lower(*placed).compile()
        facts[name] = {
            "furthest": furthest(compiled(*placed), call(*map(jnp.asarray, arrays()))),
            "collectives": collectives(compiled.as_text()),
        }
    return facts


@law_of_no_bits
def model():
    """A small Llama: tensor parallel over x, context parallel over y."""
    return shared_model(mesh_of(AxisType.Auto), shard_order("head_tail"))


def outcome(function):
    try:
        return function()
    except Exception:
        return {"raised": traceback.format_exc()}


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    json.dump({name: outcome(LAWS[name]) for name in sys.argv[1:] or LAWS}, sys.stdout)
