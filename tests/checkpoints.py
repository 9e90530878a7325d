"""Small checkpoints as people have them, and what converts them in tests of many files."""

import functools
import json
import os
import signal
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from rotary.checkpoint import convert_checkpoint
from rotary.checkpoint.files import JOURNAL, MANIFEST, Tensor
from rotary.checkpoint.plan import plan
from rotary.checkpoint.shards import pieces, write_shard
from rotary.checkpoint.writing import LOCK
from rotary.fanout import Batch
from rotary.whole_files import is_unfinished

HEADS, KV_HEADS, HEAD_DIM, WIDTH, LAYERS = 4, 2, 8, 24, 3
LLAMA = {
    "model_type": "llama",
    "hidden_size": WIDTH,
    "head_dim": HEAD_DIM,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
}
SIDECARS = {
    "tokenizer.json": b'{"a": "\xc3\xbc"}\r\n',
    "generation_config.json": b"{ }",
    "modeling_x.py": b"raise RuntimeError('this code was imported')\n",
    "original/params.json": b"not even JSON",
    "empty": b"",
}
INDEX = "model.safetensors.index.json"
OTHER = {"half": "interleaved", "interleaved": "half"}
DTYPES = {"float32": "F32", "uint16": "BF16", "int32": "I32", "uint32": "U32", "uint8": "U8",
          "int8": "I8", "float64": "F64"}  # fmt: skip


def converted(source, target, before="half", **more):
    return convert_checkpoint(source, target, from_layout=before, to_layout=OTHER[before], **more)


def there(source, folder, before="half", **more):
    """The source in the other layout, in a new folder."""
    converted(source, folder, before, **more)
    return folder


def tensor_of(array: np.ndarray) -> Tensor:
    return Tensor(DTYPES[array.dtype.name], array.shape, 0, array.nbytes)


def moved(raw, tensor, move):
    """The bytes of a tensor after its move."""
    return np.concatenate([
        turn(raw[begin - tensor.begin : end - tensor.begin])
        for begin, end, turn in pieces(tensor, move)
    ])  # fmt: skip


def carried(arrays, config, source="half", **trust):
    """Arrays by name after their moves to the other layout, and the plan."""
    todo = plan({name: tensor_of(x) for name, x in arrays.items()}, config, source, OTHER[source],
                **trust)  # fmt: skip
    result = dict(arrays)
    for name, move in todo.moves.items():
        array = np.ascontiguousarray(arrays[name])
        raw = moved(array.reshape(-1).view(np.uint8), tensor_of(array), move)
        result[name] = raw.view(array.dtype).reshape(array.shape)
    return result, todo


def name_of(layer: int, count: int = LAYERS) -> str:
    return f"model-{layer + 1:05}-of-{count:05}.safetensors"


def weights(layer: int) -> dict[str, np.ndarray]:
    """The tensors of one layer, and of what stands beside the layers in the first shard."""
    random = np.random.default_rng(layer)
    rows = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}
    found = {
        f"model.layers.{layer}.self_attn.{name}_proj.weight": random.standard_normal((size, WIDTH))
        for name, size in rows.items()
    }
    found[f"model.layers.{layer}.self_attn.q_proj.bias"] = random.standard_normal(rows["q"])
    found[f"model.layers.{layer}.self_attn.o_proj.weight"] = random.standard_normal((WIDTH, 32))
    found[f"model.layers.{layer}.mlp.up_proj.weight"] = random.standard_normal((5, WIDTH))
    if layer == 0:
        found["model.embed_tokens.weight"] = random.standard_normal((7, WIDTH))
        found["lm_head.weight"] = found["model.embed_tokens.weight"].copy()
    return {name: value.astype(np.float32) for name, value in found.items()}


def llama(folder: Path, config: str | None = None, sidecars: bool = True) -> Path:
    """A folder of three shards, a layer each, with an index, a config and files beside."""
    folder.mkdir()
    where = {}
    for layer in range(LAYERS):
        tensors = weights(layer)
        save_file(tensors, folder / name_of(layer), metadata={"format": "pt"})
        where |= dict.fromkeys(tensors, name_of(layer))
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    (folder / "config.json").write_text(config or json.dumps(LLAMA))
    for name, content in SIDECARS.items() if sidecars else ():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    """The bytes of every file in a folder, by its path."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def leftovers(folder: Path) -> list[str]:
    """Files that only a process at work has."""
    found = [path.name for path in folder.rglob("*") if is_unfinished(path)]
    return found + [LOCK] * (folder / LOCK).exists()


def is_finished(folder: Path) -> bool:
    return (folder / MANIFEST).exists() and not (folder / JOURNAL).exists()


class Inline(Executor):
    """An executor of no library: it does the work at once, in the process that asks."""

    def __init__(self, tick=None):
        self.tick, self.count = tick, 0

    def submit(self, function, /, batch):
        self.count += 1
        future = Future()
        if batch.function is write_shard:
            batch = Batch(functools.partial(write_shard, advance=self.tick), batch.jobs)
        try:
            future.set_result(function(batch))
        except Exception as error:
            future.set_exception(error)
        return future


class Dying(ProcessPoolExecutor):
    """A pool of processes that loses the one which writes the second shard, in the middle of it."""

    def submit(self, function, /, batch):
        (job,) = batch.jobs
        is_second = job.target.name == name_of(1)
        return super().submit(_write_and_die if is_second else function, batch)


def _write_and_die(batch):
    (job,) = batch.jobs
    write_shard(job, lambda count: os.kill(os.getpid(), signal.SIGKILL))
