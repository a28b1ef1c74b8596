"""One object that the loop talks to: log these numbers, this phase begins, this many videos are done.

In: metrics by the names of ``names.py``. Out: ``metrics.jsonl``, ``tensorboard/``, ``progress.json`` and log lines, all in the
output folder. It knows no file format itself, and nothing of the loop.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType

from miles_wan.tracking.logs import console, is_watched
from miles_wan.tracking.names import metric_of
from miles_wan.tracking.phases import PhaseClock
from miles_wan.tracking.progress import ProgressReporter
from miles_wan.tracking.sinks import JsonlSink, TensorBoardSink, read_metrics
from miles_wan.tracking.writing import TrackingError, plain_number

logger = logging.getLogger(__name__)


class Tracker:
    """Everything the driver reports. A context manager; ``close`` flushes and stops the display.

    Args:
        output_dir: folder of the run.
        total_rollouts: length of the run.
        resume_step: rollouts finished at the checkpoint that is resumed; None for a new run. Lines behind it are dropped
            and will be written again.

    Raises:
        TrackingError: the output folder cannot be written.
    """

    def __init__(self, output_dir: str | Path, *, total_rollouts: int, resume_step: int | None = None) -> None:
        self.output_dir = Path(output_dir)
        self.clock = PhaseClock()
        self.non_finite = 0
        self._step = resume_step or 0
        with ExitStack() as stack:
            self._jsonl = JsonlSink(self.metrics_path, resume_step=resume_step)
            stack.callback(self._jsonl.close)
            self._tensorboard = TensorBoardSink(self.output_dir / "tensorboard", resume_step=resume_step)
            stack.callback(self._tensorboard.close)
            self.progress = ProgressReporter(
                self.output_dir / "progress.json",
                total_rollouts=total_rollouts,
                step=self._step,
                console=console() if is_watched() else None,
            )
            stack.callback(self.progress.close)
            self._stack = stack.pop_all()
        if resume_step is not None:
            self._remember_first_eval()

    @property
    def metrics_path(self) -> Path:
        """``metrics.jsonl`` of this run."""
        return self.output_dir / "metrics.jsonl"

    def log(self, step: int, metrics: Mapping[str, object]) -> None:
        """Write the metrics of ``step`` (rollouts finished; 0 is before training) and show them.

        Log all numbers of a rollout in one call: ``rollout/reward_mean`` among them ends the rollout on the display,
        ``eval/reward_mean`` is shown as a validation. A value that is not finite becomes null, is named in the log and
        counted as ``tracking/non_finite``.

        Raises:
            TrackingError: a name that is not in the table, a value that is no number, a step before the last one, or a
                write that failed.
        """
        if step < self._step:
            raise TrackingError(f"Metrics of step {step} came after those of step {self._step}: steps only go forward.")
        values = self._clean(step, metrics)
        self._step = step
        self._jsonl.write(step, values)
        self._tensorboard.write(step, values)
        if "rollout/reward_mean" in values:
            self.progress.finish_rollout(step, values)
        if "eval/reward_mean" in values:
            self.progress.finish_eval(step, values)

    @contextmanager
    def phase(self, name: str, *, total: int | None = None, unit: str = "") -> Iterator[None]:
        """An exclusive phase of the driver, on the clock and on the display; ``advance`` counts its ``total`` units."""
        with self.clock.phase(name):
            self.progress.begin_phase(name, total=total, unit=unit)
            try:
                yield
            finally:
                self.progress.end_phase()

    def advance(self, count: int = 1) -> None:
        """``count`` more units of the running phase are done."""
        self.progress.advance(count)

    def close(self) -> None:
        """Close files and display. A second call does nothing."""
        self._stack.close()

    def __enter__(self) -> Tracker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except TrackingError:
            if error is None:
                raise
            logger.exception("Closing the tracker failed after an error of the run")

    def _clean(self, step: int, metrics: Mapping[str, object]) -> dict[str, int | float | None]:
        values: dict[str, int | float | None] = {}
        for name, value in metrics.items():
            metric_of(name)
            try:
                values[name] = plain_number(value)
            except TypeError as error:
                raise TrackingError(f"Metric {name}: {value!r} is not a number.") from error
        faulty = [name for name, value in values.items() if value is None]
        if faulty:
            self.non_finite += len(faulty)
            logger.warning(
                "Not finite at step %d, written as null: %s", step, ", ".join(f"{n}={metrics[n]}" for n in faulty)
            )
            values["tracking/non_finite"] = len(faulty)
        return values

    def _remember_first_eval(self) -> None:
        if not self.metrics_path.exists():
            return
        rewards = (values.get("eval/reward_mean") for values in read_metrics(self.metrics_path).values())
        self.progress.remember_first_eval(next((reward for reward in rewards if reward is not None), None))
