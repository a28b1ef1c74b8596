"""The checkpoint that an engine loads beside a trainer with a quantized base. In: a checkpoint folder and how the trainer
loads it. Out: a folder of the same format whose experts hold the weights that the trainer computes with, so that both sides
are one policy. It knows no engine.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from miles_wan.errors import InputError, MilesWanError
from miles_wan.wan.family import ModelFolder
from miles_wan.wan.load import load_transformer, meta_transformer
from miles_wan.wan.merge import save_merged
from miles_wan.wan.quantization import Quantization, parameter_bytes

logger = logging.getLogger(__name__)

RECORD = "dequantised.json"
_FORMAT = 1  # raise it when equal weights would be rounded to others


def dequantised_checkpoint(folder: ModelFolder, scheme: Quantization, dtype: str, out: Path) -> Path:
    """Make ``out``, or keep it if it was made whole from the same files with the same arguments.

    The experts hold, bit for bit, what ``load_transformer`` with ``scheme`` and ``dtype`` computes with; everything else is
    linked to ``folder``. A killed call leaves no ``out``; calls for one ``out`` at the same time wait for each other.

    Args:
        folder: the checkpoint.
        scheme: of ``model.quantization``; with ``none`` nothing is made.
        dtype: ``model.dtype``.
        out: the folder to make.

    Returns:
        ``out``, or the folder of the checkpoint with ``none``.

    Raises:
        InputError: ``out`` is something else, there is not enough space, or the weights cannot be quantized.
        MilesWanError: it could not be written.
    """
    if scheme == "none":
        return folder.path
    wanted = {"format": _FORMAT, "scheme": scheme, "dtype": dtype, "source": _fingerprint(folder)}
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with _alone(out):
            if _is_whole(out, wanted):
                logger.info("%s is made from the same weights already", out)
            else:
                _check_place(out, folder, dtype)
                _make(folder, scheme, dtype, out, wanted)
    except (OSError, SafetensorError) as error:
        raise MilesWanError(
            f"the dequantised checkpoint {out} could not be written ({error}); free or give another place for it, or set "
            "model.quantization to none"
        ) from error
    return out


def _make(folder: ModelFolder, scheme: Quantization, dtype: str, out: Path, wanted: dict[str, Any]) -> None:
    others = [entry for entry in folder.path.iterdir() if entry.name not in (*folder.experts, RECORD)]
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    for entry in others:
        (partial / entry.name).symlink_to(entry.resolve(), target_is_directory=entry.is_dir())
    for expert in folder.experts:
        logger.info("writing the %s weights of %s to %s", scheme, expert, out)
        transformer = load_transformer(folder.path, dtype=dtype, subfolder=expert, quantization=scheme)
        save_merged(transformer, partial / expert)
        del transformer  # before the next expert is read
    (partial / RECORD).write_text(json.dumps({**wanted, "files": _files(partial)}, indent=1))
    if out.exists():
        shutil.rmtree(out)
    partial.rename(out)


def _fingerprint(folder: ModelFolder) -> list[list[Any]]:
    """Name, size and time of every file of the experts. Their contents are tens of gigabytes; what changes them changes one
    of these."""
    entries = []
    for expert in folder.experts:
        for file in sorted((folder.path / expert).iterdir()):
            state = file.stat()  # of the file itself: a hub's snapshot holds links
            entries.append([f"{expert}/{file.name}", state.st_size, state.st_mtime_ns])
    return [[str(folder.path.resolve())], *entries]


def _files(path: Path) -> dict[str, int]:
    """Size of everything inside, below links too."""
    walked = ((Path(root) / name) for root, _, names in os.walk(path, followlinks=True) for name in names)
    return {str(file.relative_to(path)): file.stat().st_size for file in walked if file.name != RECORD}


def _is_whole(out: Path, wanted: dict[str, Any]) -> bool:
    try:
        record = json.loads((out / RECORD).read_text())
        return {**wanted, "files": _files(out)} == record
    except (OSError, ValueError):  # no such folder, half a record, a link to nothing
        return False


def _check_place(out: Path, folder: ModelFolder, dtype: str) -> None:
    """Nothing that is not ours is replaced, and the disk is asked before the work."""
    if folder.path.resolve() in out.resolve().parents:
        raise InputError([f"{out} lies inside the checkpoint that it is made from; choose another place"])
    if out.is_symlink() or (out.exists() and not (out / RECORD).is_file()):
        raise InputError([f"{out} is to hold the dequantised checkpoint, but is something else; move it away"])
    needed = parameter_bytes(meta_transformer(folder.transformer, dtype=dtype)) * len(folder.experts)
    free = shutil.disk_usage(out.parent).free
    if needed > free:
        raise InputError(
            [
                f"{out}: the dequantised checkpoint for the engine takes {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are "
                "free; give more space, or set model.quantization to none"
            ]
        )


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Holds a lock beside ``out``; the system frees that of a killed process."""
    descriptor = os.open(out.with_name(f".{out.name}.lock"), os.O_RDWR | os.O_CREAT, 0o644)
    try:
        with suppress(OSError):  # some network file systems have no locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
