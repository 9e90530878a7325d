"""One token in every way that servers call: `python -m benchmarks.decode`.

Two tables, each case in turn: after a matrix product of a model's width, as a model meets the call;
and a loop of calls in a row, where everything is in a cache. Then each limit with its measurement.
Writes benchmarks/results/DATE-decode.md and .json. `--table` prints the table of docs/numbers.md
from the newest of these. The operators of vLLM and onnxruntime are timed where they can be
imported: `make peers` makes an environment with vLLM's, whose Python runs this file with
PYTHONPATH=src.
"""

import datetime
import importlib
import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from rotary import Rotary, apply, cos_sin, prepare, rotate
from rotary import bench as timing

from . import command, peers
from .reference import LIMITS, error, rotated

SPEC = Rotary(head_dim=128, base=500_000.0)
ROWS = 4096  # of the tables
DTYPES = ("float32", "bfloat16", "float16")
PEER_FACTOR = 4  # peers round tables and products as well
EAGER, VLLM, ONNX = "transformers eager", "vLLM's operator", "onnxruntime's operator"
# most times of transformers' eager function: in a loop with batch 1, after a product
TIME_LIMITS = {
    "rotate": (0.25, 0.5),
    "rotate out=": (0.25, 0.5),
    "rotate in place": (0.25, 0.5),
    "rotate positions=": (0.3, 0.6),
    "rotate positions=, in place": (0.3, 0.6),
    "apply positions=": (0.45, 0.8),
    "prepared rotate positions=, in place": (0.15, 0.4),
    "prepared apply positions=, in place": (0.15, 0.4),
}
JAX_ALONE = "jax, q + 1 and k + 1 compiled"  # what a call of JAX takes at least
VLLM_LIMIT = 1.2  # most times of vLLM's operator: a prepared call in a loop

Group = dict[str, float]  # case -> median microseconds


class Sizes(NamedTuple):
    """The sizes of a run: heads of q and k, batches, calls in a loop, rounds, a model's width."""

    heads: tuple[tuple[int, int], ...]
    batches: tuple[int, ...]
    calls: int
    rounds: int
    width: int


FULL = Sizes(((32, 8), (28, 4)), (1, 16), 1000, 51, 4096)
QUICK = Sizes(((4, 2),), (1, 2), 3, 3, 64)


class Call(NamedTuple):
    """One token of each row of a batch, and the memory that the cases read and write."""

    q: Any  # (batch, heads, 1, 128)
    k: Any
    positions: Any  # (batch, 1)


def main() -> None:
    """Compare with float64, measure, print, write."""
    parser = command.parser(__doc__)
    command.add_table(parser, "the table of docs/numbers.md")
    parser.set_defaults(sizes=FULL)
    given = command.parsed(parser, {"sizes": QUICK}, command.RESULTS)
    if given.table is not None:
        print(short_table(json.loads(command.newest(given.table, "decode").read_text())))
        return
    torch.manual_seed(0)
    command.gate(errors(), "complex numbers in float64")
    loops, after, often = {}, {}, (given.sizes.calls, min(given.sizes.rounds, 9))
    for name, call in calls(given.sizes):
        loops[name] = in_a_loop(cases(call), *often)
        after[name] = after_a_product(cases(call), given.sizes, call.q)
    report = {
        "date": datetime.date.today().isoformat(),
        "versions": timing.versions(),
        "threads": torch.get_num_threads(),
        "after a product": after,
        "loop": loops,
        "libraries": in_a_loop(library_cases(), *often),
    }
    report["bars"] = [list(each) for each in verdicts(report)]
    command.publish(given.out, f"{report['date']}-decode", as_markdown(report), report)


def calls(sizes: Sizes) -> Iterator[tuple[str, Call]]:
    """Every call that is measured: its name and its arrays."""
    for dtype in DTYPES:
        for heads in sizes.heads:
            for batch in sizes.batches:
                name = f"{dtype}, q {heads[0]}, k {heads[1]}, batch {batch}"
                yield name, call_of(batch, heads, dtype)


def call_of(batch: int, heads: tuple[int, int], dtype: str) -> Call:
    """Random q and k, each row of the batch at a position of its own."""
    shapes = [(batch, count, 1, SPEC.head_dim) for count in heads]
    q, k = (torch.randn(shape).to(getattr(torch, dtype)) for shape in shapes)
    return Call(q, k, torch.randint(ROWS, (batch, 1)))


def cases(call: Call) -> dict[str, timing.Case]:
    """Ours, then the peers that can be imported; each returns or has written q and k."""
    q, k, positions = call
    cos, sin = cos_sin(SPEC, positions)
    all_cos, all_sin = cos_sin(SPEC, torch.arange(ROWS))
    outs, own, rows, mine, ready = (tuple(x.clone() for x in (q, k)) for _ in range(5))
    how: dict[str, Any] = {"seq_dim": -2, "positions": positions}
    by_row = prepare(rotate, mine, all_cos, all_sin, SPEC, out=mine, **how)
    by_angle = prepare(apply, SPEC, *ready, out=ready, **how)
    ours: dict[str, timing.Case] = {
        "rotate": lambda: rotate((q, k), cos, sin, SPEC, seq_dim=-2),
        "rotate out=": lambda: rotate((q, k), cos, sin, SPEC, seq_dim=-2, out=outs),
        "rotate in place": lambda: rotate(own, cos, sin, SPEC, seq_dim=-2, out=own),
        "rotate positions=": lambda: rotate(
            (q, k), all_cos, all_sin, SPEC, seq_dim=-2, positions=positions
        ),
        "rotate positions=, in place": lambda: rotate(
            rows, all_cos, all_sin, SPEC, seq_dim=-2, positions=positions, out=rows
        ),
        "apply positions=": lambda: apply(SPEC, q, k, positions=positions, seq_dim=-2),
        "prepared rotate positions=, in place": lambda: by_row(
            mine, all_cos, all_sin, positions=positions, out=mine
        ),
        "prepared apply positions=, in place": lambda: by_angle(
            *ready, positions=positions, out=ready
        ),
    }
    return {**ours, **peer_cases(call)}


def peer_cases(call: Call) -> dict[str, timing.Case]:
    """The peers that can be imported, each with the tables that its users give it."""
    q, k, positions = call
    tables = [torch.cat((half, half), -1).to(q.dtype) for half in cos_sin(SPEC, positions)]
    found: dict[str, timing.Case] = {EAGER: lambda: peers.apply_rotary_pos_emb(q, k, *tables)}
    operator = vllm_operator()
    if operator is not None:
        table = torch.cat(cos_sin(SPEC, torch.arange(ROWS)), -1).to(q.dtype)
        ids = positions.flatten()
        # (tokens, heads x head_dim), in place
        flat = [x.transpose(1, 2).reshape(len(x), -1).clone() for x in (q, k)]
        views = [y.view(len(x), -1, *x.shape[2:]) for x, y in zip((q, k), flat, strict=True)]

        def by_vllm() -> Any:
            operator(ids, *flat, SPEC.head_dim, table, True)
            return views

        found[VLLM] = by_vllm
    if (session := onnx_session(call)) is not None:
        found[ONNX] = session
    return found


def vllm_operator() -> Callable[..., None] | None:
    """vLLM's `rotary_embedding` for the CPU, or None."""
    try:
        platform = importlib.import_module("vllm.platforms").current_platform
    except ImportError:
        return None
    platform.import_kernels()  # of its builds, the one for this processor's instructions
    operator: Callable[..., None] = torch.ops._C.rotary_embedding
    return operator


def onnx_session(call: Call) -> timing.Case | None:
    """onnxruntime's `RotaryEmbedding` on memory that is bound once, or None."""
    try:
        import onnxruntime
        from onnx import TensorProto, helper
    except ImportError:
        return None
    kinds = {torch.float32: TensorProto.FLOAT, torch.float16: TensorProto.FLOAT16}
    if call.q.dtype not in kinds:  # it has no bfloat16 on a CPU
        return None
    outs = [torch.empty_like(x) for x in call[:2]]
    tables = [half.to(call.q.dtype) for half in cos_sin(SPEC, torch.arange(ROWS))]
    names = ("q", "k", "cos", "sin", "ids")
    given = dict(zip(names, (*call[:2], *tables, call.positions), strict=True))
    kind = {name: TensorProto.INT64 if name == "ids" else kinds[call.q.dtype] for name in given}
    inputs = [helper.make_tensor_value_info(name, kind[name], x.shape) for name, x in given.items()]
    outputs = [
        helper.make_tensor_value_info(f"{name}_out", kind[name], given[name].shape) for name in "qk"
    ]
    nodes = [
        helper.make_node("RotaryEmbedding", [name, "cos", "sin", "ids"], [f"{name}_out"])
        for name in "qk"
    ]
    graph = helper.make_graph(nodes, "decode", inputs, outputs)
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10
    ).SerializeToString()
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    for name, x in given.items():
        binding.bind_input(name, "cpu", 0, _numpy_type(x), x.shape, x.data_ptr())
    for name, y in zip("qk", outs, strict=True):
        binding.bind_output(f"{name}_out", "cpu", 0, _numpy_type(y), y.shape, y.data_ptr())

    def by_onnx(alive: Any = given) -> Any:  # the session holds addresses alone
        session.run_with_iobinding(binding)
        return outs

    return by_onnx


def _numpy_type(x: Any) -> Any:
    return torch.empty(0, dtype=x.dtype).numpy().dtype


def library_cases() -> dict[str, timing.Case]:
    """One token of float32 in each array library, new outputs, tables ready."""
    call = call_of(1, (32, 8), "float32")
    arrays = {"torch": (call.q, call.k), "numpy": (call.q.numpy(), call.k.numpy())}
    try:
        jax = importlib.import_module("jax")
    except ImportError:
        pass
    else:
        arrays["jax"] = tuple(map(jax.numpy.asarray, arrays["numpy"]))
    positions = {"torch": call.positions, "numpy": call.positions.numpy()}
    found = {}
    for name, (q, k) in arrays.items():
        ids = positions.get(name)
        tables = cos_sin(SPEC, jax.numpy.asarray(positions["numpy"]) if ids is None else ids)
        found[name] = lambda x=(q, k), tables=tables: rotate(x, *tables, SPEC, seq_dim=-2)
    if "jax" in arrays:
        add = jax.jit(lambda q, k: (q + 1, k + 1))
        found[JAX_ALONE] = lambda: add(*arrays["jax"])
    return found


def errors() -> Iterator[tuple[str, float, float]]:
    """(what, largest error over the largest result, limit) of every case's first call."""
    for dtype, limit in LIMITS.items():
        call = call_of(3, (4, 2), dtype)
        at = call.positions.numpy()[:, None]
        wanted = [rotated(x.double().numpy(), "half", SPEC.base, at) for x in call[:2]]
        for name, case in cases(call).items():
            allowed = limit if name in TIME_LIMITS else PEER_FACTOR * limit
            yield f"{name} {dtype}", error(case(), wanted), allowed


def in_a_loop(cases: dict[str, timing.Case], calls: int, rounds: int) -> Group:
    """Microseconds of a call among many in a row."""

    def many(case: timing.Case) -> timing.Case:
        return lambda: [case() and None for _ in range(calls)]

    loops = {name: many(case) for name, case in cases.items()}
    with torch.no_grad():
        measured = timing.measure(loops, rounds=rounds)
    return {name: each.median * 1e6 / calls for name, each in measured.items()}


def after_a_product(cases: dict[str, timing.Case], sizes: Sizes, q: torch.Tensor) -> Group:
    """Microseconds of a call behind a product with a square weight of the model's width."""
    x, weight = (torch.randn(rows, sizes.width).to(q.dtype) for rows in (len(q), sizes.width))
    with torch.no_grad():
        measured = timing.measure(
            cases, rounds=sizes.rounds, between=lambda: torch.nn.functional.linear(x, weight)
        )
    return {name: each.median * 1e6 for name, each in measured.items()}


def verdicts(report: dict[str, Any]) -> Iterator[tuple[str, float, float, bool]]:
    """(what, measured, most, met): of each case the worst of all shapes and types."""
    loops = {name: group for name, group in report["loop"].items() if name.endswith("batch 1")}
    for place, groups in (("in a loop", loops), ("after a product", report["after a product"])):
        for case, limits in TIME_LIMITS.items():
            ratios = [group[case] / group[EAGER] for group in groups.values() if case in group]
            limit = limits[place != "in a loop"]
            if ratios:
                yield f"{case} / {EAGER}, {place}", max(ratios), limit, max(ratios) <= limit
    ratios = [
        group[case] / group[VLLM]
        for group in loops.values()
        for case in TIME_LIMITS
        if VLLM in group and case.startswith("prepared")
    ]
    if ratios:
        worst = max(ratios)
        yield f"prepared / {VLLM}, in a loop", worst, VLLM_LIMIT, worst <= VLLM_LIMIT
    for name, spent in report["libraries"].items():
        if name not in ("torch", JAX_ALONE):
            ratio = spent / report["libraries"]["torch"]
            yield f"{name} arrays / torch tensors, one token", ratio, 2.0, ratio <= 2


def as_markdown(report: dict[str, Any]) -> str:
    """The report as a page: machine, limits, every median."""
    machine = command.machine(report)
    rows = [
        (name, f"{measured:.2f}", f"<= {limit}", "met" if met else "**missed**")
        for name, measured, limit, met in report["bars"]
    ]
    tables = []
    for place in ("after a product", "loop"):
        groups = report[place]
        names = dict.fromkeys(case for group in groups.values() for case in group)
        lines = [
            [case, *(f"{group[case]:.1f}" if case in group else "-" for group in groups.values())]
            for case in names
        ]
        tables.append(command.table((f"{place}, us", *groups), lines))
    libraries = [(name, f"{spent:.1f}") for name, spent in report["libraries"].items()]
    return f"""\
# One token, measured {report["date"]}

{machine}. `python -m benchmarks.decode` prints this page.
head_dim 128, one token for each row of the batch; medians of one run, in microseconds.

{command.table(("worst of all shapes and types", "measured", "limit", ""), rows)}

{(chr(10) * 2).join(tables)}

{command.table(("loop of calls, float32, batch 1", "us"), libraries)}
"""


SHOWN = {  # case -> what docs/numbers.md calls it
    "rotate": "`rotate`, new outputs",
    "rotate positions=, in place": "`rotate(positions=)`, in place",
    "apply positions=": "`apply(positions=)`, new outputs",
    "prepared rotate positions=, in place": "`prepare`d `rotate(positions=)`, in place",
    "prepared apply positions=, in place": "`prepare`d `apply(positions=)`, in place",
    "vLLM's operator": "vLLM's operator, in place, from rounded tables",
}


def short_table(report: dict[str, Any]) -> str:
    """The table of docs/numbers.md: one token of Llama 3 8B in bfloat16 over transformers' time."""
    names = [f"bfloat16, q 32, k 8, batch {batch}" for batch in (1, 16)]
    groups = [report[place][name] for place in ("after a product", "loop") for name in names]
    heads = [f"{place}, batch {batch}"
             for place in ("after a matrix product", "in a loop") for batch in (1, 16)]  # fmt: skip
    lines = [
        [said, *(f"{group[case] / group['transformers eager']:.2f}" for group in groups)]
        for case, said in SHOWN.items()
        if all(case in group for group in groups)
    ]
    lines += [["transformers eager", *(f"1 ({g['transformers eager']:.0f} us)" for g in groups)]]
    return f"""\
Times over that of transformers, measured {report["date"]} on {report["versions"]["cpu"]}:

{command.table(("", *heads), lines)}"""


if __name__ == "__main__":
    main()
