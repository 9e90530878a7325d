"""How a conversion of 1 000 small shards gains by workers: one and two of Dask, and threads.

    python -m benchmarks.fanout

A Llama of 1 000 thin layers, a shard each, is converted by every case in turn, `--rounds` times.
What each case wrote is compared with what a plain conversion wrote, byte for byte, before any time
counts. The table says where the time goes: `workers` is the sum of their jobs, `main_thread` the
processor time of the thread that plans, keeps the journal, copies and writes the manifest, and
`processor` that of this whole process, in which the scheduler of the cluster lives. The medians go
into benchmarks/results/fanout/DATE.json. Exit status 1 if two workers take more than 0.6 of the
time of one. `--quick` converts 4 shards, with Dask's workers as threads of this process.
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

from rotary.checkpoint import convert_checkpoint

from . import command

RESULTS = command.RESULTS / "fanout"
TIME_LIMIT = 0.6  # of the time of one worker
HEAD_DIM, HEADS = 48, 4
ONE, TWO = "1 Dask worker", "2 Dask workers"


def main() -> None:
    """Make the checkpoint, convert it by every case in turn, print and keep the medians."""
    given = parsed()
    processes = not given.quick
    with tempfile.TemporaryDirectory(dir=given.folder) as name, cluster(processes) as client:
        root = Path(name)
        source = llama(root / "source", given.shards)
        size = sum(path.stat().st_size for path in source.glob("*.safetensors"))
        converted(source, root / "plain", None)
        cases = executors(client)
        command.gate(errors(root, cases), "the bytes of a plain conversion")
        spent: dict[str, list[dict[str, float]]] = {case: [] for case in cases}
        for _ in range(given.rounds):
            for case, executor in cases.items():
                os.sync()
                spent[case].append(measured(client, source, root / "target", executor))
                shutil.rmtree(root / "target")
    report(given, size, spent)


def parsed() -> argparse.Namespace:
    """Sizes of the run."""
    parser = command.parser(__doc__)
    parser.add_argument("--shards", type=int, default=1000, help="default 1000")
    parser.add_argument("--rounds", type=int, default=3, help="default 3")
    parser.add_argument("--folder", help="where the files lie meanwhile; default /tmp")
    return command.parsed(parser, {"shards": 4, "rounds": 1}, RESULTS)


@contextmanager
def cluster(processes: bool) -> Iterator[Client]:
    """Two workers of one thread each, on this machine, in processes of their own or in this one."""
    with (
        LocalCluster(
            n_workers=2,
            threads_per_worker=1,
            processes=processes,
            dashboard_address="127.0.0.1:0" if processes else None,
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


def errors(root: Path, cases: dict[str, Executor | None]) -> Iterator[tuple[str, float, float]]:
    """(case, files that differ from a plain conversion, 0 allowed); this also warms the workers."""
    plain, target = root / "plain", root / "target"
    names = {path.name for path in plain.iterdir()}
    for case, executor in cases.items():
        converted(root / "source", target, executor)
        same = filecmp.cmpfiles(plain, target, names, shallow=False)[0]
        yield case, len(names | {path.name for path in target.iterdir()}) - len(same), 0
        shutil.rmtree(target)


def measured(
    client: Client, source: Path, target: Path, executor: Executor | None
) -> dict[str, float]:
    """Seconds of one conversion: of the clock, of processors here, of jobs in Dask's workers."""
    before, begun = computed(client), time.perf_counter()
    processor, thread = time.process_time(), time.thread_time()
    converted(source, target, executor)
    return {
        "seconds": time.perf_counter() - begun,
        "main_thread": time.thread_time() - thread,
        "processor": time.process_time() - processor,
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
    rows = [(case, *(f"{value:.2f}" for value in each.values())) for case, each in medians.items()]
    print(command.table(("", *medians[ONE]), rows))
    print(f"{TWO} / {ONE}: {ratio:.2f}, limit {TIME_LIMIT}")
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    content = {
        "date": today, "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "shards": given.shards, "bytes": size, "ratio": ratio, "medians": medians, "runs": spent,
    }  # fmt: skip
    command.write(given.out, {f"{today}.json": json.dumps(content, indent=2) + "\n"})
    sys.exit(ratio > TIME_LIMIT and not given.quick)


if __name__ == "__main__":
    main()
