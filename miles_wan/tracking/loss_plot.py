"""The curves of a supervised run as a picture, one panel per expert: training loss with its running mean, validation loss with its
95 % interval. In: ``metrics.jsonl``. Out: a PNG; it can be made while the run is going on.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from miles_wan.tracking.sinks import read_metrics
from miles_wan.tracking.writing import TrackingError, replacing

# Colour-blind safe pair (Okabe-Ito).
_TRAINING, _VALIDATION = "#0072B2", "#D55E00"
_TITLES = {"high": "expert of high noise", "low": "expert of low noise", "model": "the model"}
_LOSS, _VALIDATED, _INTERVAL = "sft/loss", "validation/loss", "validation/loss_ci95"

History = dict[int, dict[str, float | None]]


def plot_loss_curves(metrics_jsonl: str | Path, out_png: str | Path) -> Path:
    """Draw the loss of every expert and return the picture's path.

    Raises:
        TrackingError: the file holds no loss yet, or the picture cannot be written.
    """
    history = read_metrics(metrics_jsonl)
    experts = [name for name in _TITLES if any(f"{_LOSS}/{name}" in row for row in history.values())]
    if not experts:
        raise TrackingError(f"{metrics_jsonl} holds no loss yet: there is nothing to plot.")
    figure = Figure(figsize=(9.6, 4.2), dpi=133, layout="constrained")
    panels = figure.subplots(1, len(experts), squeeze=False)[0]
    for axes, expert in zip(panels, experts, strict=True):
        _draw(axes, history, expert)
    target = Path(out_png)
    with replacing(target) as temporary:
        figure.savefig(temporary, format="png")
    return target


def _draw(axes: Axes, history: History, expert: str) -> None:
    steps, losses = _curve(history, f"{_LOSS}/{expert}")
    axes.plot(steps, losses, color=_TRAINING, linewidth=0.8, alpha=0.4, label="training: mean of the step")
    width = max(1, len(steps) // 10)
    if width > 1:
        smooth = np.array([losses[max(0, end - width) : end].mean() for end in range(1, len(losses) + 1)])
        axes.plot(steps, smooth, color=_TRAINING, linewidth=2, label=f"training: mean of the last {width}")
    validated, means = _curve(history, f"{_VALIDATED}/{expert}")
    if len(validated):
        at, intervals = _curve(history, f"{_INTERVAL}/{expert}")
        spread = dict(zip(at, intervals, strict=True))
        axes.errorbar(
            validated,
            means,
            yerr=[spread.get(step, 0.0) for step in validated],
            color=_VALIDATION,
            marker="o",
            markersize=3,
            linewidth=1.5,
            capsize=2,
            zorder=3,
            label="validation: fixed timesteps and noise, 95 %",
        )
    axes.set_title(_TITLES[expert])
    axes.set_xlabel("optimizer steps")
    axes.set_ylabel("flow-matching loss")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.25)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(frameon=False, loc="best", fontsize="small")


def _curve(history: History, name: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    rows = [(step, row[name]) for step, row in history.items() if row.get(name) is not None]
    table = np.array(rows, dtype=np.float64).reshape(-1, 2)
    return table[:, 0], table[:, 1]
