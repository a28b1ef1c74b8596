"""The driver's clock: named intervals that exclude each other, so that their sum can be held against the wall time.

In: entering and leaving a phase. Out: seconds per phase, of the run and of the last rollout. Work that runs beside a phase
is added as overlap and never counted into the sum. It knows no phase by name.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from miles_wan.tracking.writing import TrackingError

ROLLOUT_TOTAL = "rollout_total"


class PhaseClock:
    """Accumulates seconds per phase over the whole run, also across resumes (``state`` and ``restore``).

    The loop starts at ``start()``, or at the first phase. Args: ``now`` is the time source in seconds.
    """

    def __init__(self, *, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._started: float | None = None
        self._lap_started = 0.0
        self._wall_before = 0.0
        self._current: str | None = None
        self._seconds: dict[str, float] = defaultdict(float)
        self._overlap: dict[str, float] = defaultdict(float)
        self._lap_seconds: dict[str, float] = defaultdict(float)
        self._lap_overlap: dict[str, float] = defaultdict(float)

    def start(self) -> None:
        """The loop begins now. A second call changes nothing."""
        if self._started is None:
            self._started = self._lap_started = self._now()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time inside the block as ``name``. Raises ``TrackingError`` inside another phase."""
        if self._current is not None:
            raise TrackingError(
                f"Phase {name!r} was entered inside phase {self._current!r}: phases exclude each other. "
                "Leave the outer one first, or count the inner work with add_overlap."
            )
        if name == ROLLOUT_TOTAL:
            raise TrackingError(f"{ROLLOUT_TOTAL!r} is the name of the whole rollout's time, not of a phase.")
        self.start()
        self._current = name
        begin = self._now()
        try:
            yield
        finally:
            elapsed = self._now() - begin
            self._seconds[name] += elapsed
            self._lap_seconds[name] += elapsed
            self._current = None

    def add_overlap(self, name: str, seconds: float) -> None:
        """Report ``seconds`` of work that ran beside the phases (scoring while videos still arrive)."""
        self._overlap[name] += seconds
        self._lap_overlap[name] += seconds

    @property
    def current(self) -> str | None:
        """The phase that is running, None between phases."""
        return self._current

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of every finished phase of the run, in the order of their first appearance."""
        return dict(self._seconds)

    @property
    def overlap(self) -> dict[str, float]:
        """Seconds of the work that ran beside the phases."""
        return dict(self._overlap)

    @property
    def wall(self) -> float:
        """Seconds of the loop so far, those before a resume included."""
        return self._wall_before + (0.0 if self._started is None else self._now() - self._started)

    @property
    def coverage(self) -> float:
        """Sum of the phases / wall time: 1 when the phases explain everything (1 as well before the start)."""
        wall = self.wall
        return sum(self._seconds.values()) / wall if wall > 0 else 1.0

    def lap(self) -> dict[str, float]:
        """Metrics of the time since the last lap: ``time/<phase>``, ``time/overlap/<work>``, ``time/rollout_total``."""
        self.start()
        now = self._now()
        metrics = {f"time/{name}": value for name, value in self._lap_seconds.items()}
        metrics |= {f"time/overlap/{name}": value for name, value in self._lap_overlap.items()}
        metrics[f"time/{ROLLOUT_TOTAL}"] = now - self._lap_started
        self._lap_started = now
        self._lap_seconds.clear()
        self._lap_overlap.clear()
        return metrics

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: ``{"wall": s, "seconds": {...}, "overlap": {...}}``."""
        return {"wall": self.wall, "seconds": self.seconds, "overlap": self.overlap}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state()`` of the checkpoint. Call it before ``start()``."""
        if self._started is not None:
            raise TrackingError("The clock is already running: restore it before the loop starts.")
        self._wall_before = float(state["wall"])
        self._seconds.update(state["seconds"])
        self._overlap.update(state["overlap"])
