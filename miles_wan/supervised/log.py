"""What a supervised run writes while it goes: metrics.jsonl, TensorBoard, lines for people. In: metrics by name. Out: files that
a resumed run continues. It knows no model.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from miles_wan.tracking.names import metric_of
from miles_wan.tracking.sinks import JsonlSink, TensorBoardSink
from miles_wan.tracking.writing import plain_number

logger = logging.getLogger(__name__)

_LINE_SECONDS = 5.0


class RunLog:
    """The log of one run; a context manager.

    Args:
        output_dir: folder of the run.
        num_steps: its length.
        resume_step: optimizer steps of the checkpoint that is resumed; None for a new run.

    Raises:
        TrackingError: the folder cannot be written.
    """

    def __init__(self, output_dir: Path, *, num_steps: int, resume_step: int | None) -> None:
        self._num_steps = num_steps
        self._first = (resume_step or 0, time.monotonic())
        self._last_line = 0.0
        with ExitStack() as stack:
            self._jsonl = JsonlSink(output_dir / "metrics.jsonl", resume_step=resume_step)
            stack.callback(self._jsonl.close)
            self._tensorboard = TensorBoardSink(output_dir / "tensorboard", resume_step=resume_step)
            stack.callback(self._tensorboard.close)
            self._stack = stack.pop_all()

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of ``step`` (steps finished). Raises TrackingError for an unknown name."""
        values: dict[str, int | float | None] = {}
        for name, value in metrics.items():
            metric_of(name)
            values[name] = plain_number(value)
            if values[name] is None:
                logger.warning("%s is %s at step %d: written as null", name, value, step)
        self._jsonl.write(step, values)
        self._tensorboard.write(step, values)
        if "validation/loss" in values:
            self._say(step, _parts(metrics, "validation/loss", "validation"))
        elif time.monotonic() - self._last_line > _LINE_SECONDS or step == self._num_steps:
            self._last_line = time.monotonic()
            speed = f"{metrics['sft/samples_per_second']:.2f} samples/s"
            self._say(
                step, f"{_parts(metrics, 'sft/loss', 'loss')} | gradient {metrics['sft/grad_norm']:.3g} | {speed}"
            )

    def _say(self, step: int, text: str) -> None:
        done, since = step - self._first[0], time.monotonic() - self._first[1]
        left = f" | ETA {since / done * (self._num_steps - step):.0f} s" if done and step < self._num_steps else ""
        logger.info("step %d/%d | %s%s", step, self._num_steps, text, left)


def _parts(metrics: Mapping[str, float], name: str, label: str) -> str:
    interval = metrics.get(f"{name}_ci95")
    spread = "" if interval is None else f" ± {interval:.4f}"
    experts = [f"{part} {metrics[f'{name}/{part}']:.4f}" for part in ("high", "low") if f"{name}/{part}" in metrics]
    return f"{label} {metrics[name]:.4f}{spread}" + (f" ({', '.join(experts)})" if experts else "")
