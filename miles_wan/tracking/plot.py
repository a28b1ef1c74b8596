"""The curve of a run as a picture: training reward with its spread, validation reward with its 95 % interval.

In: ``metrics.jsonl``. Out: a PNG. It can be made while the run is going on, and knows nothing else of the run.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from miles_wan.tracking.sinks import read_metrics
from miles_wan.tracking.writing import TrackingError, replacing

# Colour-blind safe pair (Okabe-Ito).
_TRAINING, _VALIDATION = "#0072B2", "#D55E00"
_SMOOTHING_FROM = 20


class Curve(NamedTuple):
    """``steps`` [n], ``values`` [n] and ``spread`` [n] (0 where it is unknown)."""

    steps: NDArray[np.float64]
    values: NDArray[np.float64]
    spread: NDArray[np.float64]


def plot_reward_curve(metrics_jsonl: str | Path, out_png: str | Path, *, title: str = "Reward over the run") -> Path:
    """Draw the reward curve and return the picture's path (about 1280 x 720 pixels).

    Raises:
        TrackingError: the file holds no reward yet, or the picture cannot be written.
    """
    history = read_metrics(metrics_jsonl)
    training = _curve(history, value="rollout/reward_mean", spread="rollout/reward_std")
    validation = _curve(history, value="eval/reward_mean", spread="eval/reward_ci95")
    if not (training.steps.size or validation.steps.size):
        raise TrackingError(f"{metrics_jsonl} holds no reward yet: there is nothing to plot.")
    figure = Figure(figsize=(9.6, 5.4), dpi=133, layout="constrained")
    axes = figure.add_subplot()
    _draw_training(axes, training)
    _draw_validation(axes, validation)
    _focus(axes, training, validation)
    _label(axes, title)
    target = Path(out_png)
    with replacing(target) as temporary:
        figure.savefig(temporary, format="png")
    return target


def _curve(history: dict[int, dict[str, float | None]], *, value: str, spread: str) -> Curve:
    rows = [(step, row[value], row.get(spread) or 0.0) for step, row in history.items() if row.get(value) is not None]
    table = np.array(rows, dtype=np.float64).reshape(-1, 3)
    return Curve(table[:, 0], table[:, 1], table[:, 2])


def _draw_training(axes: Axes, curve: Curve) -> None:
    if not curve.steps.size:
        return
    long_run = curve.steps.size >= _SMOOTHING_FROM
    low, high = curve.values - curve.spread, curve.values + curve.spread
    axes.fill_between(
        curve.steps, low, high, color=_TRAINING, alpha=0.12, linewidth=0, label="training: ± std over videos"
    )
    axes.plot(
        curve.steps,
        curve.values,
        color=_TRAINING,
        linewidth=1.0 if long_run else 1.6,
        alpha=0.45 if long_run else 1.0,
        marker="." if not long_run else None,
        label="training: mean of the rollout",
    )
    if long_run:
        width = max(3, curve.steps.size // 10)
        axes.plot(
            curve.steps,
            _running_mean(curve.values, width),
            color=_TRAINING,
            linewidth=2,
            label=f"training: mean of the last {width}",
        )


def _running_mean(values: NDArray[np.float64], width: int) -> NDArray[np.float64]:
    """Mean of the last ``width`` values at each place, fewer at the beginning: it never looks ahead."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    end = np.arange(1, values.size + 1)
    begin = np.maximum(0, end - width)
    return (total[end] - total[begin]) / (end - begin)


def _draw_validation(axes: Axes, curve: Curve) -> None:
    if not curve.steps.size:
        return
    axes.errorbar(
        curve.steps,
        curve.values,
        yerr=curve.spread,
        color=_VALIDATION,
        marker="o",
        linewidth=2,
        capsize=4,
        zorder=3,
        label="validation: mean with 95 % interval",
    )


def _focus(axes: Axes, training: Curve, validation: Curve) -> None:
    """Give the means and intervals at least a third of the height: a wide band is cut rather than flattening the curve."""
    low = min([*training.values, *(validation.values - validation.spread)])
    high = max([*training.values, *(validation.values + validation.spread)])
    bottom, top = axes.get_ylim()
    if high > low:
        axes.set_ylim(max(bottom, low - (high - low)), min(top, high + (high - low)))


def _label(axes: Axes, title: str) -> None:
    axes.set_title(title)
    axes.set_xlabel("rollouts finished")
    axes.set_ylabel("reward")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.25)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(frameon=False, loc="best")
