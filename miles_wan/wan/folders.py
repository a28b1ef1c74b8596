"""Makes a large folder whole or not at all. In: where it is to be, and what is written into it. Out: the folder, or nothing but
what was there before. It knows no weights.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

GIB = 2**30


@contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """Yield an empty folder beside ``out`` that becomes ``out`` at the end. It is removed on every failure; what a killed call
    left of it is removed at the start."""
    partial = _partial(out)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        yield partial
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def space_fault(out: Path, needed: int) -> str | None:
    """Why ``needed`` bytes do not fit at ``out``: what is free, with what lies at ``out`` and what a killed call left of it, which
    are removed before."""
    nearest = next(path for path in (out, *out.absolute().parents) if os.path.isdir(path))
    free = shutil.disk_usage(nearest).free + folder_bytes(out) + folder_bytes(_partial(out))
    return None if needed <= free else f"takes {needed / GIB:.1f} GiB, {free / GIB:.1f} GiB are free"


def _partial(out: Path) -> Path:
    return out.with_name(f".{out.name}.partial")


def folder_bytes(folder: Path, *, links: bool = False) -> int:
    """Bytes of all files inside; with ``links`` of what links lead to, without what goes when the folder is removed."""
    size = 0
    for root, _, names in os.walk(folder, followlinks=links):
        for name in names:
            with suppress(OSError):  # a link to nothing, or it is being removed
                size += (Path(root) / name).stat(follow_symlinks=links).st_size
    return size
