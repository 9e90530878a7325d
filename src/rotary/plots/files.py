"""Writes figures to files: completely or not at all, and with the same bytes every time."""

import io
import os
import threading
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from ..whole_files import replacing

# No dates and no versions: the same figure gives the same bytes
METADATA = {
    ".png": {"Software": None},
    ".svg": {"Date": None, "Creator": "rotary"},
    ".pdf": {"CreationDate": None, "Creator": "rotary", "Producer": None},
}
DPI = 150
_settings = threading.Lock()  # the settings of matplotlib, such as the salt, are per process


def save(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Write a figure to `path` as PNG, SVG or PDF, by its suffix.

    An old file stays until the new one is complete. No folder is created.
    Raises ValueError for another suffix or a missing folder; OSError if the file cannot be written.

    >>> save(Figure(), "plot.jpg")
    Traceback (most recent call last):
    ValueError: plots are written as .png, .svg or .pdf; got 'plot.jpg'
    """
    if not isinstance(figure, Figure):
        raise ValueError(f"save writes a matplotlib Figure, got {type(figure).__name__}")
    target = check_target(path)
    content = rendered(figure, target.suffix.lower())
    with replacing(target) as file:
        file.write(content)


def check_target(path: str | os.PathLike[str]) -> Path:
    """Return the file that `save` writes for `path`; ValueError for a path that it refuses.

    >>> check_target("plot.jpg")
    Traceback (most recent call last):
    ValueError: plots are written as .png, .svg or .pdf; got 'plot.jpg'
    """
    target = Path(os.path.realpath(path))  # a symbolic link is followed, not replaced
    _check_suffix(target.suffix.lower(), os.fspath(path))
    if not target.parent.is_dir():
        raise ValueError(f"no folder {str(target.parent)!r} to write {target.name!r} in; make it")
    if target.is_dir():
        raise ValueError(f"{os.fspath(path)!r} is a folder; give the name of a file")
    return target


def rendered(figure: Figure, suffix: str) -> bytes:
    """Return the bytes of a figure as ".png", ".svg" or ".pdf"; ValueError for another suffix.

    >>> rendered(Figure(), ".png")[1:4]
    b'PNG'
    """
    _check_suffix(suffix, suffix)
    stream = io.BytesIO()
    with _settings, mpl.rc_context({"svg.hashsalt": "rotary", "svg.fonttype": "path"}):
        figure.savefig(stream, format=suffix[1:], dpi=DPI, metadata=METADATA[suffix])
    return stream.getvalue()


def _check_suffix(suffix: str, name: object) -> None:
    if suffix not in METADATA:
        raise ValueError(f"plots are written as .png, .svg or .pdf; got {name!r}")
