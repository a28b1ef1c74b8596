"""How this room puts bytes on disk: whole files are replaced atomically, and a failed write says which file and what to do.

In: a path and a writer. Out: the finished file, or a ``TrackingError``. It knows nothing of what is written.
"""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from numbers import Integral
from pathlib import Path

from miles_wan.errors import MilesWanError

_REMEDIES = {
    errno.ENOSPC: "Free space there",
    errno.EDQUOT: "Free space or raise the quota there",
    errno.EFBIG: "Raise the file size limit (ulimit -f)",
    errno.EACCES: "Make it writable",
    errno.EPERM: "Make it writable",
    errno.EROFS: "Mount it writable",
    errno.ENOENT: "The folder is gone: create it again",
    errno.ENOTDIR: "A file stands where a folder should be: move it away",
    errno.EEXIST: "A file stands where a folder should be: move it away",
    errno.EISDIR: "A folder stands where the file should be: move it away",
}


class TrackingError(MilesWanError):
    """A metric, phase or video broke its contract, or a file of the output folder could not be written."""


def write_failure(path: Path, error: OSError) -> TrackingError:
    """The message for a failed write: path, cause, remedy, and that the run can be continued."""
    remedy = _REMEDIES.get(error.errno or 0, "Check the disk")
    return TrackingError(
        f"Cannot write {path}: {error.strerror or error}. {remedy}, then continue with --resume latest; "
        "what was written before is intact."
    )


@contextmanager
def replacing(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; what is written there takes its place atomically at the end.

    ``durable`` waits until the bytes are on the disk, so that even a power cut leaves the old or the new file.

    On any failure the temporary file is removed and the old ``path`` stays as it was.

    Raises:
        TrackingError: the disk refused (full, read-only, gone).
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        if durable:
            _sync_to_disk(temporary)
        temporary.replace(path)
    except OSError as error:
        raise write_failure(path, error) from error
    finally:
        with suppress(OSError):
            temporary.unlink()


def _sync_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def plain_number(value: object) -> int | float | None:
    """``value`` as a Python number for JSON (numpy and 0-d tensors included); None when it is not finite.

    Raises:
        TypeError: not one number (a string, a bool, an array of several).
    """
    if isinstance(value, bool | str | bytes) or value is None:
        raise TypeError(f"{value!r} is not a number")
    if isinstance(value, Integral):
        return int(value)
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{value!r} is not a number") from error
    return number if math.isfinite(number) else None
