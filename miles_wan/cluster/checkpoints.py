"""Atomic checkpoints: a folder is complete or it is not there.

    checkpoints/partial-rollout_000010/   the ranks' shards, then state.json
    checkpoints/rollout_000010/           after one rename: the commit

Anything left under ``partial-`` by a kill is removed at the next start.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from miles_wan.errors import CheckpointError
from miles_wan.faults import reach
from miles_wan.tracking.writing import replacing

logger = logging.getLogger(__name__)

STATE_FILE = "state.json"
PARTIAL = "partial-"


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        directory: ``<output_dir>/checkpoints``.
        keep_last: complete ones that are kept.
        unit: what the run counts, and the folders are named by: ``rollout`` or ``step``.
    """

    def __init__(self, directory: Path, *, keep_last: int, unit: str = "rollout") -> None:
        self._directory = directory
        self._keep_last = keep_last
        self._unit = unit

    def complete(self) -> list[Path]:
        """Committed checkpoints, oldest first."""
        return [path for path in self._committed() if (path / STATE_FILE).is_file()]

    def damaged(self) -> list[Path]:
        """Folders that bear a checkpoint's name and lack its state: a commit never leaves one."""
        return [path for path in self._committed() if not (path / STATE_FILE).is_file()]

    def _committed(self) -> list[Path]:
        named = re.compile(rf"{self._unit}_\d{{6,}}")
        return sorted(path for path in self._directory.glob(f"{self._unit}_*") if named.fullmatch(path.name))

    def latest(self) -> tuple[Path, dict[str, Any]] | None:
        """The newest committed checkpoint and its driver state; None if there is none.

        Raises:
            CheckpointError: its state cannot be read.
        """
        found = self.complete()
        if not found:
            return None
        try:
            state = json.loads((found[-1] / STATE_FILE).read_text())
            if not isinstance(state, dict) or not state:
                raise ValueError("it holds no state")
            return found[-1], state
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(
                f"{found[-1] / STATE_FILE} cannot be read ({error}); remove this folder to resume from the one before"
            ) from error

    def clean(self) -> None:
        """Remove what an interrupted save left."""
        for path in self._directory.glob(f"{PARTIAL}*"):
            logger.info("removing the unfinished checkpoint %s", path)
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

    def save(self, finished: int, state: dict[str, Any], write_shards: Callable[[str], None]) -> Path:
        """Write one checkpoint and commit it, then remove the oldest beyond ``keep_last``.

        Args:
            finished: rollouts finished; names the folder.
            state: the driver's part, JSON.
            write_shards: called with the folder that the ranks write into.

        Raises:
            CheckpointError: it could not be written; earlier checkpoints are untouched.
        """
        final = self._directory / f"{self._unit}_{finished:06d}"
        partial = self._directory / f"{PARTIAL}{final.name}"
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            write_shards(str(partial))
            reach("checkpoint/before_state", finished)
            with replacing(partial / STATE_FILE) as temporary:
                temporary.write_text(json.dumps(state, indent=1))
            reach("checkpoint/before_commit", finished)
            if final.exists():
                shutil.rmtree(final)
            partial.rename(final)
            _sync_directory(self._directory)
        except OSError as error:
            raise CheckpointError(
                f"could not write the checkpoint {final}: {error}. Earlier checkpoints are whole: free space, then "
                "--resume latest"
            ) from error
        reach("checkpoint/after_commit", finished)
        for old in self.complete()[: -self._keep_last]:
            try:
                shutil.rmtree(old)
            except OSError as error:  # the new one is written: an old one too many is no reason to end the run
                logger.warning("the old checkpoint %s could not be removed (%s)", old, error)
        return final


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
