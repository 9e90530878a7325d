"""How a conversion of 1 000 small shards gains by workers: one and two of Dask, and threads.

    python -m benchmarks.fanout

A Llama of 1 000 thin layers, a shard each, is converted by every case in turn, `--rounds` times.
What each case wrote is compared with what a plain conversion wrote, byte for byte, before any time
counts. The table says where the time goes: `workers` is the sum of their jobs, `parent` what this
process does beside waiting for them: it plans, keeps the journal, copies and writes the manifest.
The medians go into benchmarks/results/fanout/DATE.json. The scheduler of the cluster lives in this
process. Exit status 1 if two workers take more than 0.6 of the time of one.
"""

import argparse
import datetime
import filecmp
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from distributed import Client, LocalCluster

from rotary import fanout
from rotary.checkpoint import convert_checkpoint

RESULTS = Path(__file__).parent / "results" / "fanout"
TARGET = 0.6  # of the time of one worker
HEAD_DIM, HEADS = 48, 4
ONE, TWO = "1 Dask worker", "2 Dask workers"


def main() -> None:
    """Make the checkpoint, convert it by every case in turn, print and keep the medians."""
    given = parsed()
    with tempfile.TemporaryDirectory(dir=given.folder) as name, cluster() as client:
        root = Path(name)
        source = llama(root / "source", given.shards)
        size = sum(path.stat().st_size for path in source.glob("*.safetensors"))
        converted(source, root / "plain", None)
        cases = executors(client)
        for case, executor in cases.items():  # the gate, which also warms the workers
            converted(source, root / "target", executor)
            check_equal(root / "plain", root / "target", case)
            shutil.rmtree(root / "target")
        spent: dict[str, list[dict[str, float]]] = {case: [] for case in cases}
        for _ in range(given.rounds):
            for case, executor in cases.items():
                os.sync()
                spent[case].append(measured(client, source, root / "target", executor))
                shutil.rmtree(root / "target")
    report(given, size, spent)


def parsed() -> argparse.Namespace:
    """Sizes of the run; small ones make a quick try."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shards", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", help="where the files lie meanwhile; default /tmp")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args()


@contextmanager
def cluster() -> Iterator[Client]:
    """Two workers of one thread each, on this machine."""
    with (
        LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address="127.0.0.1:0"
        ) as made,
        Client(made) as client,
    ):
        yield client


def executors(client: Client) -> dict[str, Executor | None]:
    """What converts, by name; one worker is the first of the two, while the other rests."""
    first = next(iter(client.scheduler_info(n_workers=-1)["workers"]))
    return {
        "1 thread": ThreadPoolExecutor(1),
        "2 threads": ThreadPoolExecutor(2),
        ONE: client.get_executor(pure=False, workers=[first]),
        TWO: client.get_executor(pure=False),
    }


def llama(folder: Path, layers: int) -> Path:
    """A checkpoint of random bfloat16 bits, a layer in each shard, in the shares of Llama 3."""
    folder.mkdir()
    width, kv, inner = HEADS * HEAD_DIM * 2, HEADS // 4 * HEAD_DIM * 2, HEADS * HEAD_DIM * 7
    shapes = {
        "self_attn.q_proj": (width, width), "self_attn.k_proj": (kv, width),
        "self_attn.v_proj": (kv, width), "self_attn.o_proj": (width, width),
        "mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }  # fmt: skip
    random, where = np.random.default_rng(0), {}
    for layer in range(layers):
        file = f"model-{layer + 1:05}-of-{layers:05}.safetensors"
        header, end = {}, 0
        for name, shape in shapes.items():
            begin, end = end, end + 2 * shape[0] * shape[1]
            entry = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
            header[f"model.layers.{layer}.{name}.weight"] = entry
        text = json.dumps(header).encode()
        with open(folder / file, "wb") as written:
            written.write(len(text).to_bytes(8, "little") + text + random.bytes(end))
        where |= dict.fromkeys(header, file)
    config = {
        "model_type": "llama", "hidden_size": width, "head_dim": HEAD_DIM,
        "num_attention_heads": width // HEAD_DIM, "num_key_value_heads": kv // HEAD_DIM,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def converted(source: Path, target: Path, executor: Executor | None) -> None:
    """Convert as a user does."""
    convert_checkpoint(
        source, target, from_layout="half", to_layout="interleaved", executor=executor
    )


def check_equal(first: Path, second: Path, case: str) -> None:
    """Stop unless two folders hold the same bytes."""
    names = sorted(path.name for path in first.iterdir())
    same = filecmp.cmpfiles(first, second, names, shallow=False)[0]
    if sorted(same) != names or sorted(path.name for path in second.iterdir()) != names:
        raise SystemExit(f"{case}: {len(same)} of {len(names)} files are as they must be")


def measured(
    client: Client, source: Path, target: Path, executor: Executor | None
) -> dict[str, float]:
    """Seconds of one conversion: of the clock, of jobs in Dask's workers, of this process."""
    waited, ready = 0.0, fanout._ready

    def timed(done: Any) -> Any:
        nonlocal waited
        begun = time.perf_counter()
        found = ready(done)
        waited += time.perf_counter() - begun
        return found

    before, processor, begun = computed(client), time.process_time(), time.perf_counter()
    fanout._ready = timed
    try:
        converted(source, target, executor)
    finally:
        fanout._ready = ready
    whole = time.perf_counter() - begun
    return {
        "seconds": whole,
        "parent": whole - waited,
        "parent_processor": time.process_time() - processor,
        "workers": computed(client) - before,
    }


def computed(client: Client) -> float:
    """Seconds that the workers have spent in jobs so far."""

    def total(dask_scheduler: Any) -> float:
        prefixes = dask_scheduler.task_prefixes.values()
        return sum(float(prefix.all_durations.get("compute", 0.0)) for prefix in prefixes)

    return float(client.run_on_scheduler(total))


def report(given: argparse.Namespace, size: int, spent: dict[str, list[dict[str, float]]]) -> None:
    """Print the medians of every case and write them down with the machine they are of."""
    medians = {
        case: {what: statistics.median(run[what] for run in runs) for what in runs[0]}
        for case, runs in spent.items()
    }
    ratio = medians[TWO]["seconds"] / medians[ONE]["seconds"]
    print(f"{given.shards} shards, {size / 1e9:.2f} GB, medians of {given.rounds} rounds, seconds")
    print(f"{'':16}" + "".join(f"{what:>18}" for what in medians[ONE]))
    for case, found in medians.items():
        print(f"{case:16}" + "".join(f"{value:18.2f}" for value in found.values()))
    print(f"{TWO} / {ONE}: {ratio:.2f}, target {TARGET}")
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    content = {
        "date": today, "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "shards": given.shards, "bytes": size, "ratio": ratio, "medians": medians, "runs": spent,
    }  # fmt: skip
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / f"{today}.json").write_text(json.dumps(content, indent=2) + "\n")
    sys.exit(ratio > TARGET)


if __name__ == "__main__":
    main()
