"""Checks the output folder. It is left as it was found."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

GIB = 2**30
_MIN_FREE_DISK = 1 * GIB
_FOLDERS = ("checkpoints", "videos", "adapter", "tensorboard", "logs")
_FILES = ("metrics.jsonl", "summary.json", "progress.json", "config.yaml", "reward.png", ".rendezvous", ".lock")


def output_faults(folder: Path, *, resume: bool) -> list[str]:
    """Faults of the output folder: not writable (a file is really written), nearly full, or holding another run."""
    resolved = Path(os.path.realpath(folder))
    if resolved == Path(resolved.anchor):
        return [f"output_dir: {folder}: is the root of the file system; choose another folder with --output-dir"]
    faults = _write_faults(folder) or _kind_faults(folder)
    if faults:
        return faults
    free = shutil.disk_usage(_nearest_existing(folder)).free
    if free < _MIN_FREE_DISK:
        faults.append(
            f"output_dir: {folder}: only {free / GIB:.2f} GiB are free, 1 GiB is the least; free some disk space"
        )
    found = [name for name in ("metrics.jsonl", "checkpoints", "summary.json") if _holds(folder / name)]
    if found and not resume:
        faults.append(
            f"output_dir: {folder}: holds a run already ({', '.join(found)}); continue it with --resume latest, or choose "
            "another folder with --output-dir"
        )
    return faults


def _write_faults(folder: Path) -> list[str]:
    created = [path for path in (folder, *folder.parents) if not os.path.exists(path)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"can this be written?")
            file.flush()
    except OSError as error:
        reason = error.strerror or str(error)
        return [f"output_dir: {folder}: cannot be written ({reason}); choose another folder with --output-dir"]
    finally:
        for path in created:  # the run makes its folder itself; a refused one leaves none behind
            with contextlib.suppress(OSError):  # never made, or somebody else put something there
                path.rmdir()
    return []


def _kind_faults(folder: Path) -> list[str]:
    """What lies where the run will write something of another kind."""
    in_the_way = [name for name in _FOLDERS if (folder / name).exists() and not (folder / name).is_dir()]
    in_the_way += [name for name in _FILES if (folder / name).is_dir()]
    if (folder / "model_index.json").exists():
        in_the_way.append("model_index.json")
    return [
        f"output_dir: {folder}: {name} is in the way; choose another folder with --output-dir" for name in in_the_way
    ]


def _holds(path: Path) -> bool:
    return (path.is_file() and path.stat().st_size > 0) or (path.is_dir() and any(path.iterdir()))


def _nearest_existing(path: Path) -> Path:
    return next(candidate for candidate in (path, *path.absolute().parents) if os.path.exists(candidate))
