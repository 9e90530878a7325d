"""What RoPE costs on many devices: `python -m benchmarks.scaling` prints docs/scaling.md's tables.

Bytes and rows are formulas of one model, one length and one way to share the work. Seconds are
bytes times what `--measure` found on one machine; it also times shapes that no constant was taken
from. It writes both to benchmarks/results/scaling/DATE.json, or exits with status 1 if a time is
further than FACTOR from what the formulas say. Times are the fastest of many rounds: what else runs
on a shared machine is no part of the model. `--quick` measures small shapes, and no time fails it.
"""

import datetime
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rotary import Rotary, from_hf_config
from rotary.analysis import error_near, longest_safe_position

from . import command
from .command import table

RESULTS = command.RESULTS / "scaling"
CONFIG = Path(__file__).parent.parent / "src" / "rotary" / "configs" / "llama-3.1-8b.json"
FACTOR = 2.0
ITEMS = {"float32": 4, "bfloat16": 2}
ITEM = ITEMS["bfloat16"]
SHARDINGS = ("batch", "heads", "sequence")
LENGTHS = {"8k": 2**13, "128k": 2**17, "1M": 2**20, "10M": 10 * 2**20}
WORLDS = (8, 64, 1024)


class Model(NamedTuple):
    """What RoPE sees of a model: heads of q and k, and how many channels of each are turned."""

    name: str
    layers: int
    q_heads: int
    k_heads: int
    rotary_dim: int


LLAMA = Model("Llama 3.1 8B", 32, 32, 8, 128)
DEEPSEEK = Model("DeepSeek-V3", 61, 128, 1, 64)


# --- formulas ---


def tokens(seq: int, world: int, sharding: str) -> int:
    """Tokens of one sequence on one device.

    >>> [tokens(2**20, 64, sharding) for sharding in SHARDINGS]
    [1048576, 1048576, 16384]
    """
    return seq // world if sharding == "sequence" else seq


def heads(model: Model, world: int, sharding: str) -> tuple[int, int] | None:
    """Heads of q and of k on one device; a head of k may be on several. None: more than q has.

    >>> heads(LLAMA, 8, "heads"), heads(LLAMA, 32, "heads"), heads(LLAMA, 64, "heads")
    ((4, 1), (1, 1), None)
    """
    if sharding != "heads":
        return model.q_heads, model.k_heads
    if model.q_heads % world:
        return None
    return model.q_heads // world, max(model.k_heads // world, 1)


def moved(count: int, q_heads: int, k_heads: int, rotary_dim: int, item: int = ITEM) -> int:
    """Bytes that one rotation reads and writes: q and k once each way, tables not counted.

    >>> moved(4096, 32, 8, 128) == 2 * (4096 * 40 * 128 * 2)
    True
    """
    return 2 * item * count * (q_heads + k_heads) * rotary_dim


def rotated(model: Model, seq: int, world: int, sharding: str) -> int | None:
    """Bytes that RoPE moves on one device, in one layer, forward; backward moves as many.

    >>> rotated(LLAMA, 2**13, 1, "batch") // 2**20
    160
    """
    own = heads(model, world, sharding)
    return own and moved(tokens(seq, world, sharding), *own, model.rotary_dim)


def table_bytes(model: Model, rows: int) -> int:
    """Bytes of cos and sin, float32 and half width, of so many positions.

    >>> table_bytes(LLAMA, 131_072) // 2**20
    64
    """
    return 2 * 4 * rows * (model.rotary_dim // 2)


def turns_bytes(model: Model) -> int:
    """Bytes of the frequencies as 64-bit turns: all that is kept without tables.

    >>> turns_bytes(LLAMA)
    512
    """
    return 8 * (model.rotary_dim // 2)


def places(model: Model, seq: int, world: int) -> Iterator[tuple[str, int | None, int | None]]:
    """(where k is rotated, bytes moved on one device in a layer, rows of cos and sin it needs)."""
    own = seq // world

    def turn(q_tokens: int, k_tokens: int) -> int:
        dim = model.rotary_dim
        return moved(q_tokens, model.q_heads, 0, dim) + moved(k_tokens, 0, model.k_heads, dim)

    yield "before the exchange, on the rank that has it", turn(own, own), own
    yield "ring: every block when it arrives", turn(own, seq), seq
    yield "all-gather: all of k after the exchange", turn(own, seq), seq
    after = rotated(model, seq, world, "heads")
    yield "Ulysses: q and k after the all-to-all", after, None if after is None else seq


def alternatives(model: Model, seq: int, world: int) -> Iterator[tuple[str, int]]:
    """(what another design would send, bytes that one device receives); RoPE here receives none."""
    rows = seq // world
    kv = 2 * ITEM * model.k_heads * model.rotary_dim
    yield "positions from rank 0, once", 8 * rows
    yield "own rows of cos and sin from rank 0, once", table_bytes(model, rows)
    yield "all-gather of everybody's rows, once", table_bytes(model, seq - rows)
    yield "cos and sin beside k on the ring, in a layer", table_bytes(model, seq - rows)
    yield "for scale: k and v themselves on the ring, in a layer", kv * (seq - rows)


def balance(order: str, seq: int, world: int) -> float:
    """Causal (query, key) pairs of the busiest rank, over the mean of all ranks.

    >>> balance("contiguous", 4, 2), balance("head_tail", 4, 2), balance("striped", 4, 2)
    (1.4, 1.0, 1.2)
    """
    if order == "head_tail":
        return 1.0
    if order == "striped":
        return (seq + world) / (seq + 1)
    return (2 * seq - seq // world + 1) / (seq + 1)


def seconds(
    constants: dict[str, float], count: int, q: int, k: int, rotary_dim: int, dtype: str
) -> float:
    """Predicted time of one rotation with given tables."""
    bytes_ = moved(count, q, k, rotary_dim, ITEMS[dtype])
    return constants["call_us"] * 1e-6 + constants[f"{dtype}_ns_per_byte"] * 1e-9 * bytes_


# --- measured on one machine ---


Shape = tuple[int, int, int, int, str]  # tokens, heads of q, heads of k, rotary_dim, dtype
ONE: Shape = (1, 32, 8, 128, "float32")
FITTED: tuple[Shape, ...] = ((4096, 32, 8, 128, "float32"), (4096, 32, 8, 128, "bfloat16"))
HELD_OUT: tuple[Shape, ...] = (
    (1024, 32, 8, 128, "bfloat16"),
    (16384, 4, 1, 128, "float32"),
    (2048, 128, 1, 64, "bfloat16"),
)
ROWS = (131_072, 16_384)  # of the tables: fitted, held out


def measure(smaller: int = 1, rounds: int = 61) -> dict[str, Any]:
    """Constants from some shapes, and the times of shapes that they were not taken from.

    Every shape has one in `smaller` of its tokens.
    """
    import torch

    from rotary import bench

    from . import verify

    verify.gate(compiled=False)
    one, *others = (
        (max(shape[0] // smaller, 1), *shape[1:]) for shape in (ONE, *FITTED, *HELD_OUT)
    )
    fitted, held_out = others[: len(FITTED)], others[len(FITTED) :]
    fitted_rows, held_out_rows = (count // smaller for count in ROWS)
    cases: dict[str, bench.Case] = {}
    for shape in (one, *others):
        count, q, k, dim, dtype = shape
        sizes = bench.Shape(count, q_heads=q, k_heads=k)
        made = bench.torch_cases(Rotary(head_dim=dim, base=5e5), sizes, getattr(torch, dtype))
        cases |= {f"{name} {shape}": made[name] for name in ("copy", "rotary out=")}
    for count in (fitted_rows, held_out_rows):
        made = bench.table_cases(Rotary(head_dim=128, base=5e5), count)
        cases |= {f"{name} {count}": case for name, case in made.items()}
    timed = bench.measure(cases, rounds=rounds, between=bench.torch_matmul())
    best = {name: each.best for name, each in timed.items()}

    constants = {"call_us": best[f"rotary out= {one}"] * 1e6}
    for shape in fitted:
        dtype, bytes_ = shape[4], moved(*shape[:4], ITEMS[shape[4]])
        constants[f"{dtype}_copy_GB_per_s"] = bytes_ / best[f"copy {shape}"] * 1e-9
        constants[f"{dtype}_ns_per_byte"] = best[f"rotary out= {shape}"] / bytes_ * 1e9
    for name, of in (("table", "rotary"), ("numpy_float32_table", "numpy float32")):
        constants[f"{name}_ns_per_entry"] = best[f"{of} {fitted_rows}"] / (fitted_rows * 64) * 1e9
    predicted = [seconds(constants, *shape) for shape in held_out]
    names = ["{} tokens, {} + {} heads x {}, {}".format(*shape) for shape in held_out]
    found = [best[f"rotary out= {shape}"] for shape in held_out]
    names.append(f"cos and sin of {held_out_rows} rows")
    predicted.append(constants["table_ns_per_entry"] * 1e-9 * held_out_rows * 64)
    found.append(best[f"rotary {held_out_rows}"])
    keys = ("case", "predicted", "measured")
    checks = zip(names, predicted, found, strict=True)
    return {
        "date": datetime.date.today().isoformat(),
        "versions": bench.versions(),
        "threads": torch.get_num_threads(),
        "constants": constants,
        "checks": [dict(zip(keys, check, strict=True)) for check in checks],
    }


def is_near(check: dict[str, Any]) -> bool:
    """Whether a measured time is within FACTOR of what was predicted.

    >>> is_near({"predicted": 1.0, "measured": 1.9}), is_near({"predicted": 1.0, "measured": 0.4})
    (True, False)
    """
    return bool(1 / FACTOR <= check["measured"] / check["predicted"] <= FACTOR)


# --- the tables ---


def size(count: int | None) -> str:
    """Bytes in binary units, three digits.

    >>> size(512), size(64 * 2**20), size(10 * 2**30 + 2**29), size(None)
    ('512 B', '64 MiB', '10.5 GiB', '-')
    """
    if count is None:
        return "-"
    value, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{value:.4g} {unit}" if value >= 1000 else f"{value:.3g} {unit}"


def moved_table(model: Model) -> str:
    """Bytes that RoPE moves per device and layer, for each way to share the work."""
    ways = [("batch", 1)]
    ways += [("heads", world) for world in (8, 32, 128) if heads(model, world, "heads")]
    ways += [("sequence", world) for world in WORLDS]
    rows = []
    for sharding, world in ways:
        cells = [size(rotated(model, seq, world, sharding)) for seq in LENGTHS.values()]
        rows.append([sharding, "any" if world == 1 else str(world), *cells])
    return table(["split by", "devices", *LENGTHS], rows)


def memory_table(model: Model) -> str:
    """Bytes of cos and sin on one device, against the turns."""
    rows = [["cos and sin, all rows", *(size(table_bytes(model, n)) for n in LENGTHS.values())]]
    for world in WORLDS:
        own = (size(table_bytes(model, n // world)) for n in LENGTHS.values())
        rows.append([f"cos and sin, own rows of {world}", *own])
    rows.append(["no tables: turns", *[size(turns_bytes(model))] * len(LENGTHS)])
    return table(["on one device", *LENGTHS], rows)


CASES = (("128k", 8), ("1M", 64), ("10M", 1024))
ON = [f"{name} on {world}" for name, world in CASES]  # heads of their columns


def places_table(model: Model) -> str:
    """What it costs to turn k in another place: bytes moved, and rows of cos and sin."""
    each = [list(places(model, LENGTHS[name], world)) for name, world in CASES]
    rows = []
    for same in zip(*each, strict=True):
        cells = [
            "-"
            if here is None or count is None
            else f"{size(here)}, tables {size(table_bytes(model, count))}"
            for _, here, count in same
        ]
        rows.append([same[0][0], *cells])
    return table(["where k is rotated", *ON], rows)


def alternatives_table(model: Model) -> str:
    """What other designs would send."""
    each = [list(alternatives(model, LENGTHS[name], world)) for name, world in CASES]
    rows = [[same[0][0], *(size(count) for _, count in same)] for same in zip(*each, strict=True)]
    rows = [["RoPE of this library", *["0 B"] * len(CASES)], *rows]
    return table(["received by one device", *ON], rows)


def balance_table() -> str:
    """The busiest rank of a causal mask, over the mean."""
    orders = {"contiguous, ring": "contiguous", "striped": "striped", "head_tail": "head_tail"}
    rows = [
        [label, *(f"{balance(order, LENGTHS[name], world):.7g}" for name, world in CASES)]
        for label, order in orders.items()
    ]
    return table(["order", *ON], rows)


def precision_table() -> str:
    """How far cos or sin is off near the last position of each length, whichever pair is worst."""
    spec = from_hf_config(CONFIG)
    assert spec is not None
    names = {
        "positions in bfloat16": "bfloat16",
        "float32 angles": "float32",
        "exact, float32 tables": "exact",
    }
    rows = []
    for label, arithmetic in names.items():
        errors = error_near(spec, list(LENGTHS.values()), arithmetic)
        cells = [f"{error:.1g}" for error in errors]
        last = longest_safe_position(spec, 1e-2, arithmetic)
        rows.append([label, *cells, f"{last:,}" if last < 2**40 else "2^40 and more"])
    return table(["error of cos or sin near", *LENGTHS, "angles right to 1e-2 rad up to"], rows)


def constants_table(report: dict[str, Any]) -> str:
    """The measured constants."""
    names = {
        "float32_copy_GB_per_s": "copy, float32, GB/s read and written",
        "bfloat16_copy_GB_per_s": "copy, bfloat16, GB/s read and written",
        "float32_ns_per_byte": "rotate, float32, ns per byte",
        "bfloat16_ns_per_byte": "rotate, bfloat16, ns per byte",
        "call_us": "one call of one token, after large ones, us",
        "table_ns_per_entry": "exact cos and sin, ns per position and pair",
        "numpy_float32_table_ns_per_entry": "the same in NumPy float32, ns",
    }
    rows = [[label, f"{report['constants'][name]:.3g}"] for name, label in names.items()]
    return table(["constant", "measured"], rows)


def checks_table(report: dict[str, Any]) -> str:
    """What the constants say of shapes they were not taken from, and what these took."""
    rows = [
        [each["case"], f"{each['predicted'] * 1e3:.2f}", f"{each['measured'] * 1e3:.2f}",
         f"{each['measured'] / each['predicted']:.2f}"]
        for each in report["checks"]
    ]  # fmt: skip
    return table(["held out", "predicted, ms", "measured, ms", "ratio"], rows)


def tables(report: dict[str, Any]) -> dict[str, str]:
    """Every table of the page, by its title."""
    return {
        f"Bytes moved, {LLAMA.name}": moved_table(LLAMA),
        f"Bytes moved, {DEEPSEEK.name}": moved_table(DEEPSEEK),
        f"Memory, {LLAMA.name}": memory_table(LLAMA),
        f"Where to rotate, {LLAMA.name}": places_table(LLAMA),
        f"What others would send, {LLAMA.name}": alternatives_table(LLAMA),
        "Balance": balance_table(),
        f"Precision, {LLAMA.name}": precision_table(),
        "Constants": constants_table(report),
        "Checked": checks_table(report),
    }


def latest() -> dict[str, Any]:
    """The newest report that was written."""
    return json.loads(command.newest(RESULTS).read_text())


def main() -> None:
    """Print the tables; with --measure, measure first, and write what the formulas predict."""
    parser = command.parser(__doc__)
    parser.add_argument("--measure", action="store_true", help="measure on this machine and write")
    parser.set_defaults(smaller=1, rounds=61)
    given = command.parsed(parser, {"measure": True, "smaller": 64, "rounds": 3}, RESULTS)
    report = measure(given.smaller, given.rounds) if given.measure else latest()
    for title, text in tables(report).items():
        print(f"## {title}\n\n{text}\n")
    far = [each["case"] for each in report["checks"] if not is_near(each)]
    if far and not given.quick:
        sys.exit(f"further than a factor of {FACTOR:g} from the prediction: {'; '.join(far)}")
    if given.measure:
        text = json.dumps(report, indent=1) + "\n"
        command.write(given.out, {f"{report['date']}.json": text})


if __name__ == "__main__":
    main()
