"""Reading a checkpoint: what is refused, before anything is written; a fuzz of headers."""

import errno
import gc
import json
import os
import random
import struct
from pathlib import Path

import numpy as np
import pytest
import safetensors
from checkpoints import llama
from safetensors.numpy import save, save_file

from rotary.checkpoint.files import BITS, MAX_HEADER_BYTES, Tensor, read_checkpoint, read_shard

CASES = 30_000


def shard(path, *names, size=4):
    save_file({name: np.arange(size, dtype=np.float32) for name in names}, path)
    return path


def raw(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(dtype="F32", shape=(1,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def sharded(folder, where=None, **extra):
    """Two shards with tensors a and b, and an index that says so."""
    folder.mkdir(exist_ok=True)
    shard(folder / "one.safetensors", "a")
    shard(folder / "two.safetensors", "b")
    where = {"a": "one.safetensors", "b": "two.safetensors"} if where is None else where
    index = {"metadata": {"total_size": 32}, "weight_map": where, **extra}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def refused(path, *words):
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        read_checkpoint(path)
    text = str(error.value)
    assert "\n" not in text
    for word in words:
        assert word in text
    return text


def test_a_shard_is_read_as_safetensors_wrote_it(tmp_path):
    tensors = {"b": np.ones((2, 3), np.float16), "a": np.zeros((0, 4), np.int64),
               "c": np.arange(5, dtype=np.uint8)}  # fmt: skip
    save_file(tensors, tmp_path / "m.safetensors", metadata={"format": "pt"})
    found = read_shard(tmp_path / "m.safetensors")
    content = (tmp_path / "m.safetensors").read_bytes()
    assert {name: t.shape for name, t in found.tensors.items()} == {
        name: value.shape for name, value in tensors.items()
    }
    for name, value in tensors.items():
        tensor = found.tensors[name]
        assert content[tensor.begin : tensor.end] == value.tobytes()


def test_a_folder_gives_its_shards_sidecars_and_what_is_left(tmp_path):
    folder = sharded(tmp_path / "model")
    (folder / "config.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    (folder / "original").mkdir()
    (folder / "original" / "params.json").write_text("{}")
    (folder / ".git").mkdir()
    (folder / ".git" / "HEAD").write_text("ref")
    found = read_checkpoint(folder)
    assert [each.path.name for each in found.shards] == ["one.safetensors", "two.safetensors"]
    assert [str(path) for path in found.beside] == [
        "config.json", "original/params.json", "model.safetensors.index.json"]  # fmt: skip
    assert found.left == (Path("pytorch_model.bin"),)
    assert set(found.tensors) == {"a", "b"}


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "too few"),
        (b"1234567", "too few"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 5\n", "git-lfs pointer"),
        (b"PK\x03\x04" + bytes(100), "zip"),
        (b"\x80\x02" + bytes(100), "pickle"),
        (b"\x1f\x8b" + bytes(100), "gzip"),
        (b"<!DOCTYPE html><html></html>" + bytes(100), "web page"),
        (b"GGUF" + bytes(100), "GGUF"),
        *(
            (text + b'"model_type": "llama"}', "JSON, as a config")
            for text in (b"{", b"{\r\n", b"{ ")
        ),
        (struct.pack("<Q", 2**62) + bytes(100), str(MAX_HEADER_BYTES)),
        (struct.pack("<Q", MAX_HEADER_BYTES + 1) + bytes(100), str(MAX_HEADER_BYTES)),
        (struct.pack("<Q", 101) + bytes(100), "truncated"),
        (struct.pack("<Q", 1) + b" ", "header of 1 bytes"),
    ],
)
def test_what_is_no_safetensors_file_is_refused_by_name(tmp_path, content, word):
    (tmp_path / "model.safetensors").write_bytes(content)
    refused(tmp_path / "model.safetensors", word, "model.safetensors")


@pytest.mark.parametrize(
    ("header", "word"),
    [
        (b"[1]", "brace"),
        (b' {"a": 1}', "brace"),
        (b'{"a": \xff}', "UTF-8"),
        (b'{"a": ' + b"[" * 100_000, "nested more than 64 deep"),
        (b'{"a": {"dtype": NaN}}', "NaN"),
        (b'{"a": %b, "a": %b}' % (2 * (json.dumps(entry()).encode(),)), "twice"),
        ({"a": 3}, "data_offsets"),
        ({"a": {**entry(), "more": 1}}, "alone"),
        ({"a": entry(dtype="F33")}, "F33"),
        ({"a": entry(dtype=["F32"])}, "dtype"),
        ({"a": entry(shape=(-1,))}, "whole numbers"),
        ({"a": entry(shape=(1.0,))}, "whole numbers"),
        ({"a": entry(shape=(True,))}, "whole numbers"),
        ({"a": entry(offsets=(0, 4, 8))}, "whole numbers"),
        ({"a": entry(shape=(2**62, 2**62, 4))}, "is not 4 bytes"),
        ({"a": entry(offsets=(4, 0))}, "is not -4 bytes"),
        ({"a": entry(), "b": entry()}, "'b' begins"),
        ({"a": entry(offsets=(1, 5))}, "begins at"),
        ({"a": entry(), "b": entry(offsets=(8, 12))}, "'b' begins"),
        ({"a": entry(offsets=(0, 2**64), shape=(2**62,))}, "truncated"),
        ({"a": entry("F16", (1,), (0, 2))}, "truncated"),
        ({"a": entry("F4", (1,), (0, 1))}, "is not 1 bytes"),
        ({"__metadata__": {"a": 1}, "a": entry()}, "only text"),
        ({"__metadata__": [], "a": entry()}, "only text"),
    ],
)  # fmt: skip
def test_a_header_that_breaks_the_format_is_refused(tmp_path, header, word):
    refused(raw(tmp_path / "m.safetensors", header, bytes(4)), word)


def test_names_are_kept_whatever_they_are(tmp_path):
    names = ["../../x", "", "a\0b", "\x1b[31m", "ü" * 1000]
    header = {name: entry(offsets=(4 * i, 4 * i + 4)) for i, name in enumerate(names)}
    found = read_shard(raw(tmp_path / "m.safetensors", header, bytes(4 * len(names))))
    assert list(found.tensors) == names


@pytest.mark.parametrize(
    "file",
    ["../two.safetensors", "/two.safetensors", "sub\\two.safetensors", "x.bin", "a\0.safetensors"],
)  # fmt: skip
def test_an_index_cannot_lead_out_of_its_folder(tmp_path, file):
    folder = sharded(tmp_path / "model", {"a": "one.safetensors", "b": file})
    refused(folder, "is missing, or no .safetensors file")


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ({"a": "one.safetensors", "b": "six.safetensors"}, ("'six.safetensors' is missing",)),
        ({"a": "one.safetensors"}, ("'two.safetensors' is not in the index",)),
        ({"a": "two.safetensors", "b": "one.safetensors"}, ("'a' is in 'one.safetensors'",)),
        ({"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"}, ("'c' is not",)),
        ({"a": "one.safetensors", "b": 3}, ("file name for each tensor",)),
        ([], ("file name for each tensor",)),
    ],
)  # fmt: skip
def test_an_index_that_does_not_fit_is_refused(tmp_path, where, words):
    refused(sharded(tmp_path / "model", where), *words)


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    folder = sharded(tmp_path / "model")
    shard(folder / "two.safetensors", "a", "b")
    refused(folder, "'a' is in 'one.safetensors' and 'two.safetensors'")


def test_another_total_size_is_a_warning(tmp_path):
    folder = sharded(tmp_path / "model", metadata={"total_size": 33})
    with pytest.warns(UserWarning, match="total_size is 33, the tensors have 32"):
        read_checkpoint(folder)


def test_folders_that_say_too_little_or_too_much_are_refused(tmp_path):
    refused(tmp_path, "no .safetensors file")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    refused(tmp_path, "pytorch_model.bin", "convert it to safetensors first")
    shard(tmp_path / "one.safetensors", "a")
    shard(tmp_path / "two.safetensors", "b")
    refused(tmp_path, "2 files and no model.safetensors.index.json")
    for name in ("model", "model.fp16"):
        (tmp_path / f"{name}.safetensors.index.json").write_text("{}")
    refused(tmp_path, "more than one index")


@pytest.mark.parametrize("target", ["/dev/zero", "/etc/passwd", "nothing"])
def test_links_out_of_the_folder_and_to_nothing_are_refused(tmp_path, target):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").symlink_to(target)
    refused(tmp_path / "model", "a link")


def test_devices_pipes_and_folders_under_the_name_of_a_shard_are_refused(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors")
    refused(tmp_path, "not a regular file")
    refused(tmp_path / "model.safetensors", "not a regular file")
    os.unlink(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").mkdir()
    refused(tmp_path, "no .safetensors file")


def test_a_folder_that_cannot_be_read_is_an_error(tmp_path, monkeypatch):
    """It was left out in silence: the copy lacked its files, and was called finished."""
    source = llama(tmp_path / "llama")
    scandir = os.scandir

    def closed(path):
        if Path(path).name == "original":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", closed)
    with pytest.raises(PermissionError, match="original"):
        read_checkpoint(source)


def test_the_cache_of_hugging_face_is_read_through_its_links(tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "1234"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    shard(blobs / "abcd", "a")
    (snapshot / "model.safetensors").symlink_to("../../blobs/abcd")
    assert set(read_checkpoint(snapshot).tensors) == {"a"}
    (tmp_path / "elsewhere").mkdir()
    shard(tmp_path / "elsewhere" / "abcd", "a")
    os.unlink(snapshot / "model.safetensors")
    (snapshot / "model.safetensors").symlink_to("../../elsewhere/abcd")
    refused(snapshot, "leads out of the folder")


def test_a_file_that_is_not_there_is_named(tmp_path):
    refused(tmp_path / "nothing", "nothing: no such file")


def test_every_type_has_the_size_that_safetensors_gives_it():
    for dtype, bits in BITS.items():
        header = json.dumps({"a": entry(dtype, (8,), (0, bits))}).encode()
        content = struct.pack("<Q", len(header)) + header + bytes(bits)
        assert [name for name, _ in safetensors.deserialize(content)] == ["a"], dtype


def test_very_many_tensors_and_the_longest_header_are_read(tmp_path):
    count = 200_000
    one = ",".join(
        f'"{i}":{{"dtype":"U8","shape":[1],"data_offsets":[{i},{i + 1}]}}' for i in range(count)
    )
    header = b"{" + one.encode() + b"}"
    path = raw(tmp_path / "m.safetensors", header.ljust(100_000_000), bytes(count))
    gc.disable()  # it looks at all of them again and again, half of the time
    try:
        found = read_shard(path)
    finally:
        gc.enable()
    assert len(found.tensors) == count
    assert found.tensors["7"].end - found.tensors["7"].begin == 1


@pytest.mark.slow
def test_a_broken_header_is_refused_or_is_one_that_safetensors_reads_too(tmp_path):
    """What we take, the library takes; whatever happens is a ValueError, in no time."""
    chance = random.Random(0)
    whole = save({"layer.0.q": np.ones((2, 3), np.float32), "k": np.zeros(0, np.int64),
                  "v": np.ones(5, np.uint8)}, metadata={"format": "pt"})  # fmt: skip
    length = 8 + int.from_bytes(whole[:8], "little")
    pieces = [*(bytes([c]) for c in b'"{}[],:-0'), b"9" * 20, b"1e9", b"null", b"NaN", b"\\ud800",
              b"\xff", b"\\u0000", b"true", b"  ", b"[0,4]", b'"F32"']  # fmt: skip
    path, taken = tmp_path / "m.safetensors", 0
    with open(path, "wb", buffering=0) as file:  # once: to make a file costs more than to read it
        for _ in range(CASES):
            content = bytearray(whole)
            for _ in range(chance.randrange(1, 4)):
                at = chance.randrange(max(min(length, len(content)), 1))
                kind = chance.randrange(4)
                if kind == 0:
                    content[at : at + 1] = chance.randbytes(1)
                elif kind == 1:
                    content[at : at + chance.randrange(1, 9)] = b""
                elif kind == 2 or not content:
                    content[at:at] = chance.choice(pieces)
                else:
                    del content[chance.randrange(len(content)) :]
                if chance.random() < 0.8 and len(content) > 16:  # a length that fits
                    end = content.rfind(b"}") + 1
                    content[:8] = struct.pack("<Q", max(end - 8, 0))
            file.seek(0)
            file.write(content)
            file.truncate()
            try:
                found = read_shard(path)
            except ValueError:
                continue
            taken += 1
            theirs = {
                name: tuple(each["shape"]) for name, each in safetensors.deserialize(bytes(content))
            }
            assert {name: tensor.shape for name, tensor in found.tensors.items()} == theirs
            assert all(isinstance(tensor, Tensor) for tensor in found.tensors.values())
    assert taken > CASES // 1200  # the cases are near enough to the format to pass now and then
