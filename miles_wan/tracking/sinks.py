"""Where metrics go: ``metrics.jsonl``, one object a line, and TensorBoard event files.

In: a step and clean numbers (None for a value that was not finite). Out: files that survive a kill at any moment and that a
resumed run continues without gap or duplicate. It knows nothing of names or of the loop.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from miles_wan.tracking.writing import replacing, write_failure

logger = logging.getLogger(__name__)

Values = Mapping[str, int | float | None]


class JsonlSink:
    """Appends ``{"step": n, "time": "...", <metric>: value, ...}``; each line is on disk when ``write`` returns.

    Args:
        path: the file; folders are created.
        resume_step: None starts a new file (one that is already there is set aside under a number, never overwritten);
            otherwise lines of later steps and a line torn by a kill are dropped and the file is continued.

    Raises:
        TrackingError: the file cannot be created or written.
    """

    def __init__(self, path: str | Path, *, resume_step: int | None = None) -> None:
        self.path = Path(path)
        if resume_step is None:
            _set_aside(self.path)
        else:
            truncate_after(self.path, resume_step)
        with _refusals(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def write(self, step: int, values: Values) -> None:
        """Append one line. A line that the disk took only in part is taken back before the error is raised."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = json.dumps({"step": step, "time": now, **values}, allow_nan=False, ensure_ascii=False) + "\n"
        size = os.fstat(self._descriptor).st_size
        with _refusals(self.path):
            try:
                _write_all(self._descriptor, line.encode())
                os.fsync(self._descriptor)
            except OSError:
                with suppress(OSError):
                    os.ftruncate(self._descriptor, size)
                raise

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class TensorBoardSink:
    """Event files in ``folder``. Events of steps behind ``resume_step`` (all, for a new run) are hidden by TensorBoard.

    Raises:
        TrackingError: the folder cannot be created or written.
    """

    def __init__(self, folder: str | Path, *, resume_step: int | None = None) -> None:
        self.path = Path(folder)
        with _refusals(self.path):
            self._writer = SummaryWriter(str(self.path), purge_step=0 if resume_step is None else resume_step + 1)

    def write(self, step: int, values: Values) -> None:
        with _refusals(self.path):
            for name, value in values.items():
                if value is not None:
                    self._writer.add_scalar(name, value, global_step=step)
            self._writer.flush()

    def close(self) -> None:
        with _refusals(self.path):
            self._writer.close()


def truncate_after(path: Path, step: int) -> int:
    """Keep the lines of steps up to ``step`` and return how many were dropped, torn ones included.

    The file is always replaced by a new one, even when nothing is dropped: a process of the killed run that still lives
    goes on writing into the old, now nameless file.
    """
    if not path.is_file():
        if step > 0:
            logger.warning("%s is missing: the curve starts again at rollout %d", path, step + 1)
        return 0
    dropped = 0
    with replacing(path) as temporary, path.open("rb") as old, temporary.open("wb") as new:
        for line in old:
            record = _parse(line)
            if record is not None and record["step"] <= step:
                new.write(line)
            else:
                dropped += 1
    if dropped:
        logger.info("%s: dropped %d lines behind rollout %d, they will be written again", path, dropped, step)
    return dropped


def read_metrics(path: str | Path) -> dict[int, dict[str, Any]]:
    """The metrics of every step, in order: ``{step: {name: value}}``. Lines of one step are merged, the later one wins;
    a torn line is left out."""
    steps: dict[int, dict[str, Any]] = {}
    with Path(path).open("rb") as file:
        for line in file:
            record = _parse(line)
            if record is not None:
                steps.setdefault(record.pop("step"), {}).update(record)
    for values in steps.values():
        values.pop("time", None)
    return dict(sorted(steps.items()))


def _parse(line: bytes) -> dict[str, Any] | None:
    """The record of a complete line, None for a torn one (a kill can only tear the end of the file)."""
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


def _set_aside(path: Path) -> None:
    if not path.is_file() or path.stat().st_size == 0:
        return
    number = 1
    while (aside := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    with _refusals(path):
        path.rename(aside)
    logger.warning("A new run starts in %s: metrics of the earlier one are kept as %s", path.parent, aside.name)


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


@contextmanager
def _refusals(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise write_failure(path, error) from error
