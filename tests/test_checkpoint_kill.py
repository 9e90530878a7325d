"""Conversions that are killed, stopped, starved of disk or run twice: all go on, whole."""

import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from checkpoints import INDEX, Inline, contents, converted, is_finished, leftovers, llama, name_of
from command import environment

from rotary.checkpoint import writing

HERE = Path(__file__).parent
SHARDS, SHARD = 2, 2**28  # one for each thread
COMMAND = """
    sys.argv = ["rotary", *sys.argv[2:]]
    from rotary.cli import main
    main()
"""


def child(code, *arguments, before=None, **changes):
    """A new interpreter that finds the helpers of the tests; it calls `before` first."""
    text = "import sys; sys.path.insert(0, sys.argv[1])\n" + textwrap.dedent(code)
    command = [sys.executable, "-c", text, str(HERE), *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=environment(**changes), preexec_fn=before, **pipes)


# A process of one thread forks a conversion for each step, and kills it there.
DRIVER = """
    import builtins, json, os, pathlib, signal, shutil
    from checkpoints import Inline, contents, is_finished, leftovers
    from rotary.checkpoint import convert_checkpoint
    from rotary.checkpoint.files import JOURNAL
    from rotary.checkpoint.writing import LOCK
    from rotary.whole_files import is_unfinished

    source, root = (pathlib.Path(argument) for argument in sys.argv[2:4])

    def convert(target):
        convert_checkpoint(source, target, from_layout="half", to_layout="interleaved",
                           executor=Inline(step))

    def step(*ignored):
        global steps
        steps += 1
        if steps == when:
            os.kill(os.getpid(), signal.SIGKILL)

    def counted(module, name):
        real = getattr(module, name)
        def wrapper(*args, **kwargs):
            step()
            return None if name == "fsync" else real(*args, **kwargs)  # a kill is no power cut
        setattr(module, name, wrapper)

    def killed(target):
        child = os.fork()
        if child == 0:
            try:
                convert(target)
            finally:
                os._exit(1)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    before = contents(source)
    for module, name in ((os, "fsync"), (os, "replace"), (os, "open"), (os, "unlink"),
                         (os, "mkdir"), (os, "close"), (builtins, "open")):
        counted(module, name)
    steps = when = 0
    convert(root / "whole")
    whole, count = contents(root / "whole"), steps
    seen = set()
    for kill_at in range(1, count + 1):
        target, steps, when = root / "target", 0, kill_at
        assert killed(target) == -signal.SIGKILL, kill_at
        when = 0
        assert contents(source) == before, kill_at
        found = {path: content for path, content in contents(target).items()
                 if not is_unfinished(target / path) and path not in (JOURNAL, LOCK)}
        assert found.items() <= whole.items(), (kill_at, found.keys())
        seen.add(len(found))
        if is_finished(target):
            assert found == whole, kill_at
        else:
            convert(target)
            assert contents(target) == whole, kill_at
        shutil.rmtree(target, ignore_errors=True)
    print(json.dumps([count, sorted(seen), len(whole)]))
"""


def test_a_kill_at_any_step_leaves_whole_files_and_the_next_call_ends_it(tmp_path):
    source = llama(tmp_path / "a", sidecars=False)
    (source / "tokenizer.json").write_text("{}")
    out, err = child(DRIVER, source, tmp_path).communicate(timeout=300)
    assert err.decode() == ""
    count, seen, files = json.loads(out)
    assert count > 100
    assert seen == list(range(files + 1))  # killed before and behind each of the files


SLOWLY = """
    import signal, time
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell starts by &
    from checkpoints import Inline
    from rotary.checkpoint import shards
    real = shards.read_piece

    def slow(*arguments):
        print("at work", flush=True)
        time.sleep(60)
        return real(*arguments)

    shards.read_piece = slow
    sys.argv = ["rotary", "convert", *sys.argv[2:], "--from", "half", "--to", "interleaved"]
    from rotary.cli import main
    main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_command_without_a_trace_of_its_work(tmp_path, number):
    source = llama(tmp_path / "a")
    slow = SLOWLY.replace("time.sleep(60)", "time.sleep(0.5)")
    process = child(slow, source, tmp_path / "b")
    process.stdout.readline()
    process.send_signal(number)
    _, err = process.communicate(timeout=100)
    assert process.returncode == (130 if number == signal.SIGINT else 128 + number)
    assert b"Traceback" not in err
    assert not is_finished(tmp_path / "b")
    assert leftovers(tmp_path / "b") == []
    converted(source, tmp_path / "b")
    assert is_finished(tmp_path / "b")


def test_of_two_processes_one_is_refused_and_the_other_goes_on(tmp_path):
    source = llama(tmp_path / "a")
    first = child(SLOWLY, source, tmp_path / "b")
    try:
        first.stdout.readline()
        with pytest.raises(BlockingIOError, match="another process is writing here"):
            converted(source, tmp_path / "b")
        assert len(leftovers(tmp_path / "b")) > 1  # the lock and what the first one writes
    finally:
        first.kill()
        first.communicate()
    converted(source, tmp_path / "b")
    assert is_finished(tmp_path / "b")


def test_a_conversion_that_ends_while_another_call_begins_is_not_done_twice(tmp_path, monkeypatch):
    """Between the first look at the folder and the lock another process may have ended."""
    source, folder = llama(tmp_path / "a"), tmp_path / "b"
    real = writing.check_space

    def another(*arguments):
        monkeypatch.setattr(writing, "check_space", real)
        converted(source, folder)

    monkeypatch.setattr(writing, "check_space", another)
    with pytest.raises(ValueError, match="holds a finished conversion"):
        converted(source, folder)
    assert is_finished(folder)


# --- a disk that is full, a folder that cannot be written ---


def limit(size):
    """What a child does first: no file of it may be longer."""
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def test_a_file_that_may_not_grow_is_an_error_of_one_line_and_the_next_call_ends_it(tmp_path):
    source = llama(tmp_path / "a")
    arguments = ("convert", source, tmp_path / "b", "--from", "half", "--to", "interleaved")
    # nor a file of bytecode, which would be cut short and break later processes
    process = child(COMMAND, *arguments, before=limit(6000), PYTHONDONTWRITEBYTECODE="1")
    out, err = process.communicate(timeout=100)
    assert (process.returncode, out) == (1, b"")
    warning, error = err.splitlines()
    assert warning.startswith(b"warning: transformers will load")
    assert error.startswith(b"error: ")
    assert error.endswith(b"File too large")
    assert leftovers(tmp_path / "b") == []
    assert not [name for name in contents(tmp_path / "b") if name.endswith(".safetensors")]
    converted(source, tmp_path / "b")
    assert is_finished(tmp_path / "b")


@pytest.mark.parametrize("count", range(1, 12))
def test_a_disk_that_is_full_at_any_file_leaves_whole_files(tmp_path, monkeypatch, count):
    """The disk is full when file number `count` is made safe, and has room for the next call."""
    source, folder = llama(tmp_path / "a", sidecars=False), tmp_path / "b"
    converted(source, tmp_path / "whole")
    whole, real, calls = contents(tmp_path / "whole"), os.fsync, []

    def full(handle):
        calls.append(handle)
        if len(calls) == count:
            raise OSError(28, "No space left on device")
        real(handle)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            converted(source, folder, executor=Inline())
    found = contents(folder) if folder.exists() else {}
    assert {name: found[name] for name in found if name in whole}.items() <= whole.items()
    if folder.exists():
        assert found, "an empty folder is left"
        assert leftovers(folder) == []
    converted(source, folder)
    assert contents(folder) == whole


@pytest.mark.parametrize("target", ["file/b", "a/config.json/b", "/proc/b", "/dev/null/b"])
def test_a_place_where_nothing_can_be_written_is_refused(tmp_path, target):
    source = llama(tmp_path / "a", sidecars=False)
    (tmp_path / "file").write_text("")
    before = contents(tmp_path)
    with pytest.raises((OSError, ValueError)) as error:
        converted(source, tmp_path / target)
    assert "\n" not in str(error.value)
    assert contents(tmp_path) == before


def test_everything_works_in_the_locale_c_without_a_word_of_the_folder_being_text(tmp_path):
    source = llama(tmp_path / "a b")
    os.rename(source, tmp_path / os.fsdecode(b"\xff\xfe"))
    folder = tmp_path / os.fsdecode(b"\xe9")
    arguments = (tmp_path / os.fsdecode(b"\xff\xfe"), folder, "--from", "half", "--to")
    process = child(COMMAND, "convert", *arguments, "interleaved", LC_ALL="C", PYTHONUTF8="0")
    _, err = process.communicate(timeout=100)
    assert process.returncode == 0
    assert err.startswith(b"warning: transformers will load these weights")
    assert err.count(b"\n") == 1
    assert is_finished(folder)
    assert name_of(0) in contents(folder)


# --- size ---


SPARSE = """
    import json, pathlib, re, time
    from rotary.checkpoint import convert_checkpoint, writing

    writing.check_space = lambda folder, needed: None  # holes take none
    start = time.perf_counter()
    done = convert_checkpoint(sys.argv[2], sys.argv[3], from_layout="half", to_layout="interleaved")
    told = pathlib.Path("/proc/self/status").read_text()  # ru_maxrss counts the parent's as well
    peak = int(re.search(r"VmHWM:\\s+(\\d+) kB", told)[1]) * 1024
    print(json.dumps([peak, time.perf_counter() - start, done.proof.error, len(done.plan.moves)]))
"""


def sparse(path, layer, size, random):
    """A shard of `size` bytes, nearly all of them holes; the query is a quarter."""
    prefix, heads, kv_heads, head_dim = f"model.layers.{layer}.self_attn.", 32, 8, 128
    hidden = size // 4 // (heads * head_dim * 2)
    shapes = {prefix + "k_proj.weight": (kv_heads * head_dim, hidden),
              prefix + "q_proj.weight": (heads * head_dim, hidden)}  # fmt: skip
    rest = size - sum(2 * rows * width for rows, width in shapes.values())
    shapes[f"model.layers.{layer}.mlp.up_proj.weight"] = (rest // 2,)
    header, at = {}, 0
    for name, shape in shapes.items():
        end = at + 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.write(random.bytes(2 * kv_heads * head_dim * 8))
        file.truncate(8 + len(text) + at)
        file.seek(8 + len(text) + 2 * kv_heads * head_dim * 8 + 2**15)
        file.write(random.bytes(2**14))
    return dict.fromkeys(shapes, path.name)


@pytest.mark.slow
def test_half_a_gigabyte_of_holes_takes_little_memory_and_no_disk(tmp_path):
    """Shards of 256 MiB, with queries of 64 MiB: a few MB are held at once."""
    random, where = np.random.default_rng(0), {}
    source, folder = tmp_path / "a", tmp_path / "b"
    source.mkdir()
    for layer in range(SHARDS):
        where |= sparse(source / name_of(layer, SHARDS), layer, SHARD, random)
    (source / INDEX).write_text(json.dumps({"weight_map": where}))
    (source / "config.json").write_text(json.dumps(
        {"model_type": "llama", "num_attention_heads": 32, "num_key_value_heads": 8,
         "head_dim": 128, "hidden_size": SHARD // 4 // (32 * 128 * 2)}))  # fmt: skip
    out, err = child(SPARSE, source, folder).communicate(timeout=1200)
    assert err == b""
    peak, _, error, moves = json.loads(out)
    assert (error, moves) == (0.0, 2 * SHARDS)
    assert peak < 2 * 10**8  # Python, NumPy and blocks of 4 MiB on two threads; a query is 64 MiB
    sizes = [path.stat() for path in folder.glob("*.safetensors")]
    assert sum(found.st_size for found in sizes) > SHARDS * SHARD
    assert sum(512 * found.st_blocks for found in sizes) < SHARDS * 10 * 2**20
