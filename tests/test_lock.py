"""requirements.lock has what constraints.txt pins, each file with its hash."""

import re
from pathlib import Path

from packaging.requirements import Requirement
from tools.make_lock import lock

ROOT = Path(__file__).resolve().parent.parent
LINE = re.compile(r"([a-z0-9-]+)==(\S+) --hash=sha256:[0-9a-f]{64}")


def locked():
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    found = [LINE.fullmatch(line) for line in lines if not line.startswith("#")]
    assert all(found), "a line without a version and a hash"
    return {match[1]: match[2] for match in found}


def named(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def test_each_pin_is_locked_and_torch_is_not():
    text = (ROOT / "constraints.txt").read_text()
    pins = [Requirement(line) for line in text.splitlines() if not line.startswith("#")]
    at = {"python_version": "3.11", "sys_platform": "linux"}
    held = {named(pin.name): str(pin.specifier).removeprefix("==") for pin in pins
            if pin.marker is None or pin.marker.evaluate(at)}  # fmt: skip
    assert held.pop("torch") == "2.13.0"
    versions = locked()
    assert {name: versions.get(name) for name in held} == held
    assert not {"torch", "rotary"} & set(versions)


def test_what_the_tests_need_is_locked():
    text = (ROOT / "pyproject.toml").read_text()
    (dev,) = re.findall(r"^dev = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    names = {named(Requirement(each).name) for each in re.findall(r'"(.+?)"', dev)} - {"rotary"}
    assert len(names) > 15
    assert names <= set(locked())


def test_no_line_has_a_place():
    """A file is asked for by name and hash; from where is for the settings of pip."""
    assert "://" not in (ROOT / "requirements.lock").read_text()
    one = {
        "metadata": {"name": "A_b", "version": "1"},
        "download_info": {"url": "https://x", "archive_info": {"hashes": {"sha256": "00"}}},
    }
    assert lock([one]).endswith("\na-b==1 --hash=sha256:00\n")
