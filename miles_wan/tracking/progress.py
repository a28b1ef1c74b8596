"""Where a run stands, for people: one compact line per rollout in the log, and live bars where a terminal watches.

In: phases, counts and the metrics of a rollout. Out: log lines, bars, and ``progress.json`` from which another process (the
launcher, whose terminal is the user's) draws the same bars. It knows nothing of files of metrics.
"""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn
from rich.text import Text

from miles_wan.tracking.writing import replacing

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 60.0
_SAVE_SECONDS = 0.5
_RATE_WINDOW = 10

Values = Mapping[str, int | float | None]


@dataclass(frozen=True)
class ProgressState:
    """Everything a display needs. ``phase_total`` is None where the number of units is not known."""

    total: int
    step: int
    phase: str = ""
    unit: str = ""
    phase_done: int = 0
    phase_total: int | None = None
    headline: str = ""
    eta_seconds: float | None = None


class LiveBars:
    """On a terminal: a bar for the run, a bar for the phase at work, and the numbers of the last rollout below."""

    def __init__(self, console: Console) -> None:
        columns = (
            TextColumn("{task.description:<10}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            SpinnerColumn(finished_text=" "),
        )
        self._progress = Progress(*columns, console=console)
        self._run: TaskID = self._progress.add_task("rollouts", total=None, note="")
        self._phase: TaskID = self._progress.add_task("", total=None, note="", visible=False)
        self._headline = Text(no_wrap=True, overflow="ellipsis")
        self._live = Live(Group(self._progress, self._headline), console=console, refresh_per_second=4)
        self._live.start()

    def show(self, state: ProgressState) -> None:
        self._progress.update(self._run, completed=state.step, total=state.total, note=_eta(state.eta_seconds))
        self._progress.update(
            self._phase,
            description=state.phase,
            completed=state.phase_done,
            total=state.phase_total,
            note=state.unit,
            visible=bool(state.phase),
        )
        self._headline.plain = state.headline

    def close(self) -> None:
        self._live.stop()


class ProgressReporter:
    """The driver's side. Every change goes to ``progress.json`` and, on a terminal, to the bars.

    Args:
        path: ``progress.json``.
        total_rollouts: length of the run.
        step: rollouts already finished.
        console: draw live bars there; None writes lines only.
        now: time source in seconds.
    """

    def __init__(
        self,
        path: Path,
        *,
        total_rollouts: int,
        step: int = 0,
        console: Console | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = path
        self._now = now
        self._bars = LiveBars(console) if console is not None else None
        self._state = ProgressState(total=total_rollouts, step=step)
        self._finished: deque[tuple[int, float]] = deque(maxlen=_RATE_WINDOW + 1)
        self._last_save = -_SAVE_SECONDS
        self._last_line = now()
        self._first_eval: float | None = None
        self._publish(urgent=True)

    @property
    def state(self) -> ProgressState:
        return self._state

    def begin_phase(self, name: str, *, total: int | None = None, unit: str = "") -> None:
        """``name`` is at work on ``total`` units."""
        if not self._finished:
            self._finished.append((self._state.step, self._now()))
        self._change(phase=name, phase_done=0, phase_total=total, unit=unit, urgent=True)

    def end_phase(self) -> None:
        self._change(phase="", phase_done=0, phase_total=None, unit="", urgent=True)

    def advance(self, count: int = 1) -> None:
        """``count`` more units of the phase are done. A long phase says so in the log about once a minute."""
        self._change(phase_done=self._state.phase_done + count)
        if self._now() - self._last_line >= HEARTBEAT_SECONDS:
            self._line(_heartbeat(self._state))

    def finish_rollout(self, step: int, values: Values) -> None:
        """Rollout ``step`` is finished: one line, and a new estimate of the time that is left."""
        self._finished.append((step, self._now()))
        self._change(step=step, headline=headline(values), eta_seconds=self._remaining(), urgent=True)
        self._line(rollout_line(self._state, values))

    def finish_eval(self, step: int, values: Values) -> None:
        """One line for a validation, with the change since the first one this process saw."""
        mean = values.get("eval/reward_mean")
        self._line(eval_line(step, values, self._first_eval))
        if self._first_eval is None and mean is not None:
            self._first_eval = float(mean)

    def remember_first_eval(self, reward: float | None) -> None:
        """The validation reward before training, known from the file of a run that is resumed."""
        self._first_eval = reward

    def close(self) -> None:
        if self._bars is not None:
            self._bars.close()

    def _remaining(self) -> float | None:
        (first_step, first_time), (last_step, last_time) = self._finished[0], self._finished[-1]
        if last_step <= first_step:
            return None
        return (last_time - first_time) / (last_step - first_step) * (self._state.total - last_step)

    def _line(self, text: str) -> None:
        logger.info(text)
        self._last_line = self._now()

    def _change(self, *, urgent: bool = False, **changes: object) -> None:
        self._state = replace(self._state, **changes)  # type: ignore[arg-type]
        self._publish(urgent=urgent)

    def _publish(self, *, urgent: bool) -> None:
        if self._bars is not None:
            self._bars.show(self._state)
        if urgent or self._now() - self._last_save >= _SAVE_SECONDS:
            with replacing(self._path, durable=False) as temporary:
                temporary.write_text(json.dumps(asdict(self._state)), encoding="utf-8")
            self._last_save = self._now()


def headline(values: Values) -> str:
    """The numbers a person watches: reward, KL, clip fraction, parity with the engine. Absent ones are left out."""
    parts = [_reward(values)]
    for label, name, form in (
        ("KL", "train/kl" if values.get("train/kl") else "train/approx_kl", "{:.1e}"),
        ("clip", "train/clip_fraction", "{:.0%}"),
        ("parity", "train/log_prob_gap_max", "{:.1e}"),
    ):
        value = values.get(name)
        if name in values:
            parts.append(f"{label} " + ("not finite" if value is None else form.format(value)))
    return " | ".join(part for part in parts if part)


def rollout_line(state: ProgressState, values: Values) -> str:
    """``rollout 12/45 | reward 21.310 ± 0.420 | KL 1.2e-04 | clip 12% | parity 3.1e-07 | 48.2 s | ETA 0:26:12``."""
    seconds = values.get("time/rollout_total")
    parts = [
        f"rollout {state.step}/{state.total}",
        headline(values),
        f"{seconds:.1f} s" if seconds is not None else "",
        _eta(state.eta_seconds),
    ]
    dropped = values.get("rollout/dropped_samples")
    if dropped:
        parts.append(f"{dropped} videos dropped")
    return " | ".join(part for part in parts if part)


def eval_line(step: int, values: Values, first: float | None) -> str:
    """``validation after 10 | reward 0.8123 ± 0.0102 (95 %) | change +0.0123``."""
    mean, interval = values.get("eval/reward_mean"), values.get("eval/reward_ci95")
    reward = (
        "reward not finite"
        if mean is None
        else f"reward {mean:.4f}" + ("" if interval is None else f" ± {interval:.4f} (95 %)")
    )
    change = "" if first is None or mean is None else f"change {mean - first:+.4f}"
    return " | ".join(part for part in (f"validation after {step}", reward, change) if part)


def _reward(values: Values) -> str:
    if "rollout/reward_mean" not in values:
        return ""
    mean, std = values["rollout/reward_mean"], values.get("rollout/reward_std")
    return "reward not finite" if mean is None else f"reward {mean:.4f}" + ("" if std is None else f" ± {std:.4f}")


def _heartbeat(state: ProgressState) -> str:
    of = f"/{state.phase_total}" if state.phase_total is not None else ""
    return f"rollout {state.step + 1}/{state.total} | {state.phase} {state.phase_done}{of} {state.unit}".rstrip()


def _eta(seconds: float | None) -> str:
    if seconds is None:
        return ""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"ETA {hours}:{minutes:02}:{rest:02}"
