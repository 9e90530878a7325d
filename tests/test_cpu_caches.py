"""The sizes of the caches, as Linux reports them."""

import pytest

pytest.importorskip("numba")

from rotary.kernels.cpu import caches

KB, MB = 1 << 10, 1 << 20
HOST = {"level": "3", "type": "Unified", "size": "307200K", "shared_cpu_map": "3"}


@pytest.fixture
def reported(tmp_path, monkeypatch):
    """Writes files as in /sys for each cache, and reads the size of one level from them."""
    monkeypatch.setattr(caches, "_FOLDER", tmp_path)

    def size(level, *listed):
        for number, files in enumerate(listed):
            folder = tmp_path / f"index{number}"
            folder.mkdir()
            for name, text in files.items():
                (folder / name).write_text(f"{text}\n")
        return caches.size.__wrapped__(level)

    return size


@pytest.mark.parametrize(
    ("map_", "most"), [("1", 16), ("3", 32), ("ff", 128), ("ffffffff,ffffffff", 300)]
)
def test_the_cache_of_a_host_counts_as_16_mb_for_each_processor_of_this_machine(
    reported, map_, most
):
    assert reported(3, {**HOST, "shared_cpu_map": map_}) == most * MB


def test_a_cache_of_usual_size_is_as_reported(reported):
    one = {**HOST, "level": "1", "type": "Data", "size": "48K", "shared_cpu_map": "1"}
    code = {**one, "type": "Instruction", "size": "64K"}
    two = {**one, "level": "2", "type": "Unified", "size": "2048K"}
    assert reported(1, code, one, two, {**HOST, "size": "32768K"}) == 48 * KB
    assert caches.size.__wrapped__(2) == 2048 * KB
    assert caches.size.__wrapped__(3) == 32 * MB


def test_what_is_not_reported_has_a_usual_size(reported):
    assert reported(3, {"level": "3", "type": "Unified", "size": "98304K"}) == 32 * MB
    assert caches.size.__wrapped__(1) == 32 * KB
