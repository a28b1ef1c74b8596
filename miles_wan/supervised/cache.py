"""A cache of encodings by content. In: what an entry is made of. Out: the tensors under that key, written once. An entry is
complete or it is not there, so that an interrupted run goes on where it was; it knows no encoder.

    <cache_dir>/ab/ab12...ef.safetensors    one entry: the key is a sha256 over all that its tensors follow from
    <cache_dir>/digests.json                sha256 of files seen before, by path, size and time
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from miles_wan.errors import CheckpointError
from miles_wan.tracking.writing import replacing

logger = logging.getLogger(__name__)

# Part of every key: raised when the same inputs give other tensors.
FORMAT = 1
_BLOCK = 1 << 22


def entry_key(kind: str, parts: Mapping[str, Any]) -> str:
    """The key of an entry.

    Args:
        kind: what it holds, such as ``clip`` or ``text``.
        parts: everything the tensors follow from, as JSON: digests of files and weights, size, frames, prompt.
    """
    said = json.dumps({"format": FORMAT, "kind": kind, **parts}, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(said.encode("utf-8", "surrogatepass")).hexdigest()


class EncodingCache:
    """Entries in ``folder``, which is made if need be. Several processes and runs may use one at the same time."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)

    def path(self, key: str) -> Path:
        """Where the entry of ``key`` is or would be."""
        return self._folder / key[:2] / f"{key}.safetensors"

    def notes(self, key: str) -> Mapping[str, Any] | None:
        """What was noted about an entry; None if there is none. One that a disk has damaged counts as absent."""
        path = self.path(key)
        if not path.is_file():
            return None
        try:
            with safe_open(path, framework="pt") as entry:  # compares the header with the length of the file
                notes = json.loads((entry.metadata() or {})["notes"])
        except (SafetensorError, OSError, KeyError, ValueError) as error:
            logger.warning("the cache entry %s is damaged (%s) and is made again", path, error)
            return None
        return notes if isinstance(notes, dict) else None

    def __contains__(self, key: str) -> bool:
        return self.notes(key) is not None

    def load(self, key: str) -> dict[str, Tensor]:
        """The tensors of an entry.

        Raises:
            CheckpointError: it is gone or damaged.
        """
        path = self.path(key)
        try:
            return load_file(path)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"the cache entry {path} cannot be read ({error}); remove it and resume: it is made again"
            ) from error

    def store(self, key: str, tensors: Mapping[str, Tensor], notes: Mapping[str, Any]) -> None:
        """Write an entry. It appears at once and complete. Raises TrackingError when the disk refuses."""
        own = {name: tensor.contiguous() for name, tensor in tensors.items()}
        with replacing(self.path(key)) as temporary:
            save_file(own, temporary, metadata={"notes": json.dumps(notes)})


class FileDigests:
    """sha256 of files, remembered by path, size and time of change, so that a large data set is read through once.

    Args:
        memory: the file to remember them in.
    """

    def __init__(self, memory: Path) -> None:
        self._memory = memory
        self._known: dict[str, list[Any]] = _read(memory)

    def of(self, paths: Iterable[str]) -> dict[str, str]:
        """Path -> sha256 of the bytes. A file that cannot be read has none and is left out."""
        wanted = list(dict.fromkeys(paths))
        with ThreadPoolExecutor() as pool:
            found = dict(zip(wanted, pool.map(self._digest, wanted), strict=True))
        return {path: digest for path, digest in found.items() if digest is not None}

    def save(self) -> None:
        """Remember what was computed. Call it in one process."""
        with replacing(self._memory, durable=False) as temporary:
            temporary.write_text(json.dumps(self._known), encoding="utf-8")

    def _digest(self, path: str) -> str | None:
        try:
            stat = Path(path).stat()
            state = [stat.st_size, stat.st_mtime_ns]
            known = self._known.get(path)
            if known is not None and known[:2] == state:
                return str(known[2])
            digest = _file_digest(Path(path))
        except OSError:
            return None
        self._known[path] = [*state, digest]
        return digest


def _file_digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def component_digest(folder: Path, digests: FileDigests) -> str:
    """sha256 over every file of a component of a checkpoint (configuration, vocabulary, weights) and its name."""
    files = sorted(str(path) for path in folder.iterdir() if path.is_file())
    found = digests.of(files)
    said = [[Path(file).name, found.get(file)] for file in files]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()


def _read(memory: Path) -> dict[str, list[Any]]:
    try:
        known = json.loads(memory.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # absent, or torn by a kill: the files are read again
        return {}
    if not isinstance(known, dict):
        return {}
    return {path: entry for path, entry in known.items() if isinstance(entry, list) and len(entry) == 3}
