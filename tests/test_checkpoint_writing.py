"""Writing a checkpoint: whole files or none, one writer, whatever kills it."""

import os
import signal
import stat
import subprocess
import sys
import textwrap

import pytest

from rotary.checkpoint import writing

# Replaces a file, and kills itself at system call number argument 2; prints how many there were.
CHILD = textwrap.dedent("""
    import os, signal, sys
    from pathlib import Path
    from rotary.checkpoint import writing

    target, when, calls = Path(sys.argv[1]), int(sys.argv[2]), []

    def counted(call):
        def wrapper(*args, **kwargs):
            calls.append(call.__name__)
            if len(calls) == when:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)
        return wrapper

    for name in ("fsync", "replace", "open"):
        setattr(os, name, counted(getattr(os, name)))
    with writing.replacing(target) as file:
        file.write(b"new" * 1000)
        file.flush()
        counted(len)("")
    print(len(calls))
""")


def run(*args):
    return subprocess.run([sys.executable, "-c", CHILD, *args], capture_output=True, text=True)


def test_a_kill_at_any_step_leaves_the_old_file_or_the_new_one(tmp_path):
    path = tmp_path / "a"
    steps = int(run(path, "0").stdout)
    assert steps >= 4
    seen = set()
    for step in range(1, steps + 1):
        path.write_bytes(b"old")
        assert run(path, str(step)).returncode == -signal.SIGKILL
        content = path.read_bytes()
        assert content in (b"old", b"new" * 1000)
        seen.add(content)
        with writing.locked(tmp_path):
            assert [file.name for file in tmp_path.iterdir() if file.name != writing.LOCK] == ["a"]
    assert len(seen) == 2


def test_an_error_inside_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"old")

    def broken_off():
        with writing.replacing(path) as file:
            file.write(b"new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        broken_off()
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_the_mode_is_that_of_a_new_file(tmp_path, mask, mode):
    before = os.umask(mask)
    try:
        with writing.replacing(tmp_path / "a"):
            pass
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == mode


def test_one_process_at_a_time_writes_in_a_folder(tmp_path):
    with writing.locked(tmp_path):
        second = writing.locked(tmp_path)
        with pytest.raises(BlockingIOError, match="another process writes here"):
            second.__enter__()
        assert (tmp_path / writing.LOCK).exists()
    assert os.listdir(tmp_path) == []
    with writing.locked(tmp_path):
        pass


def test_a_lock_that_was_deleted_while_it_was_waited_for_is_not_trusted(tmp_path, monkeypatch):
    """Between the opening and the taking of a lock its holder may leave and delete the name."""
    opened, real = [], os.open

    def open_and_delete(path, *args, **kwargs):
        handle = real(path, *args, **kwargs)
        opened.append(path)
        if len(opened) == 1:
            os.unlink(path)
        return handle

    monkeypatch.setattr(os, "open", open_and_delete)
    with writing.locked(tmp_path):
        assert (tmp_path / writing.LOCK).exists()
    assert len(opened) == 2


def test_a_killed_process_leaves_no_lock_behind(tmp_path):
    child = (
        "import os, signal, sys; from pathlib import Path; from rotary.checkpoint import writing\n"
        "with writing.locked(Path(sys.argv[1])): os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", child, tmp_path], capture_output=True)
    assert done.returncode == -signal.SIGKILL
    assert (tmp_path / writing.LOCK).exists()
    with writing.locked(tmp_path):
        pass
    assert os.listdir(tmp_path) == []


def test_a_disk_that_is_too_small_is_refused_with_both_numbers(tmp_path):
    with pytest.raises(OSError, match=r"1000000000.00 GB are needed and .* GB are free"):
        writing.check_space(tmp_path, 10**18)
    writing.check_space(tmp_path, 1)


@pytest.mark.parametrize("target", ["source", "source/inner", ".", "link", "file"])
def test_a_target_that_overlaps_the_source_is_refused(tmp_path, target):
    source = tmp_path / "source"
    source.mkdir()
    (tmp_path / "link").symlink_to(source)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"overlaps the source|a link|not a folder"):
        writing.check_target(source, tmp_path / target)
    writing.check_target(source, tmp_path / "source2")
