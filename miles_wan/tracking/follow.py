"""The launcher's terminal shows the bars of a driver that runs elsewhere (a Ray job, whose own output is a log file).

In: the ``progress.json`` that the driver keeps. Out: live bars under the streamed log. It knows nothing of Ray.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from rich.console import Console

from miles_wan.tracking.logs import console, is_watched
from miles_wan.tracking.progress import LiveBars, ProgressState


@contextmanager
def follow_progress(path: str | Path) -> Iterator[None]:
    """Draw the bars of ``path`` while the block runs; without a terminal, do nothing.

    What the block writes to ``sys.stdout`` (the job's log) appears above the bars.
    """
    if not is_watched():
        yield
        return
    with ProgressFollower(Path(path), console()):
        yield


class ProgressFollower:
    """The launcher's side: draws the bars of a driver that runs elsewhere, from its ``progress.json``. A context manager."""

    def __init__(self, path: Path, console: Console, *, poll_seconds: float = 0.5) -> None:
        self._path = path
        self._poll_seconds = poll_seconds
        self._bars = LiveBars(console)
        self._begun = time.time()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="progress", daemon=True)

    def __enter__(self) -> ProgressFollower:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._bars.close()

    def _follow(self) -> None:
        while not self._stop.wait(self._poll_seconds):
            state = self._read()
            if state is not None:
                self._bars.show(state)

    def _read(self) -> ProgressState | None:
        """The state of this run; None before its driver has written one (an older file is an earlier run's)."""
        try:
            if self._path.stat().st_mtime < self._begun:
                return None
            return ProgressState(**json.loads(self._path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None
