"""The tables of ``agreement.py``. In: what was measured. Out: markdown. It computes nothing but maxima and means."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

BOUND = 1e-5
BOUNDED = ("latents_relative", "sglang_by_trainer", "local_by_sglang")
FIGURES = (
    "latents_relative",
    "latents_absolute",
    "velocity_relative",
    "log_prob",
    "sglang_by_trainer",
    "local_by_sglang",
)
HEADER = (
    "latents, rel.",
    "latents, abs.",
    "velocity, rel.",
    "log-prob, each its own",
    "SGLang's by trainer",
    "local's by SGLang",
)


@dataclass(frozen=True)
class Case:
    """What is sampled; ``size`` is width, height, frames; ``guidance_2`` that of the low-noise expert, if there is one."""

    kind: str
    image: bool
    guidance: float
    size: tuple[int, int, int]
    guidance_2: float | None = None

    @property
    def guidance_text(self) -> str:
        return f"{self.guidance:g}" if self.guidance_2 is None else f"{self.guidance:g} / {self.guidance_2:g}"


@dataclass(frozen=True)
class Measurement:
    """Largest differences of a case over seeds and steps. Relative: norm of the difference by norm. Log-probs: absolute.
    ``trainer_gaps`` holds, by step, for every seed the log-prob of the trainer's forward minus SGLang's."""

    case: Case
    latents_relative: float
    latents_absolute: float
    velocity_relative: float
    log_prob: float
    sglang_by_trainer: float
    local_by_sglang: float
    trainer_gaps: dict[str, list[float]]


@dataclass(frozen=True)
class Report:
    """One combination: the cases before any update and after the last one, some of these again with the trainer's adapter
    switched off (``control``), what each update said, and by how much (relative) they moved the latents of one sample."""

    name: str
    start: list[Measurement]
    after: list[Measurement]
    control: list[Measurement]
    updates: list[dict[str, float]]
    moved: float

    @classmethod
    def read(cls, file: Path) -> Report:
        values = json.loads(file.read_text())
        for when in ("start", "after", "control"):
            values[when] = [
                Measurement(**row | {"case": Case(**row["case"] | {"size": tuple(row["case"]["size"])})})
                for row in values[when]
            ]
        return cls(**values)

    @property
    def tables(self) -> tuple[tuple[str, list[Measurement]], ...]:
        return ("start", self.start), (f"after {len(self.updates)} updates", self.after)

    @property
    def exact(self) -> bool:
        """Whether the bound is promised: in float32."""
        return "fp32" in self.name

    def within(self, bound: float) -> bool:
        """Whether latents and both ways of scoring agree."""
        return all(getattr(row, name) <= bound for row in (*self.start, *self.after) for name in BOUNDED)


def markdown(reports: Sequence[Report], own_rounding: Mapping[str, float]) -> str:
    """Overview, log-prob gaps by step, and every case of every combination; ``own_rounding`` of bfloat16 by guidance scale."""
    parts = ["## Overview", *_overview(reports), "", "## Log-prob of SGLang against the trainer's forward, by step", ""]
    parts += [*_steps(reports), "", "## Updates", "", *_updates(reports)]
    for guidance, difference in own_rounding.items():
        parts += ["", f"bfloat16 against float32 arithmetic, velocity, guidance {guidance}: {difference:.1e}"]
    for report in reports:
        for when, rows in report.tables:
            parts += ["", f"## {report.name}, {when}", "", *_cases(rows)]
    return "\n".join(parts) + "\n"


def _overview(reports: Iterable[Report]) -> list[str]:
    lines = _head("combination", "when", "law", *HEADER)
    for report in reports:
        for when, rows in (*report.tables, ("control: adapter off on one side", report.control)):
            for kind in dict.fromkeys(row.case.kind for row in rows):
                own = [row for row in rows if row.case.kind == kind]
                lines.append(_row(report.name, when, kind, *_figures(own)))
    return lines


def _cases(rows: Sequence[Measurement]) -> list[str]:
    lines = _head("law", "image", "guidance", "size", *HEADER)
    for row in rows:
        case = row.case
        lines.append(
            _row(case.kind, "yes" if case.image else "no", case.guidance_text, _size(case.size), *_figures([row]))
        )
    return lines


def _steps(reports: Sequence[Report]) -> list[str]:
    """By size: what is random in these differences averages out over the elements, what is systematic does not."""
    steps = _kept(reports)
    lines = _head("combination", "when", "law", "size", *(f"step {step}: mean abs., max abs., mean" for step in steps))
    for report in reports:
        for when, rows in report.tables:
            scored = [row for row in rows if row.trainer_gaps]
            for kind, size in dict.fromkeys((row.case.kind, row.case.size) for row in scored):
                gaps = [row.trainer_gaps for row in scored if (row.case.kind, row.case.size) == (kind, size)]
                columns = [np.concatenate([gap[step] for gap in gaps]) for step in steps]
                lines.append(_row(report.name, when, kind, _size(size), *map(_spread, columns)))
    return lines


def _spread(values: np.ndarray) -> str:
    return f"{np.abs(values).mean():.1e}, {np.abs(values).max():.1e}, {values.mean():+.1e}"


def _size(size: tuple[int, int, int]) -> str:
    return "x".join(map(str, size))


def _kept(reports: Iterable[Report]) -> list[str]:
    return next((list(row.trainer_gaps) for report in reports for row in report.start if row.trainer_gaps), [])


def _updates(reports: Iterable[Report]) -> list[str]:
    lines = _head(
        "combination", "tensors confirmed", "unmapped", "largest log-prob gap before each update", "latents moved by"
    )
    for report in reports:
        gaps = ", ".join(f"{update['log_prob_gap_max']:.1e}" for update in report.updates)
        tensors, unmapped = (sum(int(update[key]) for update in report.updates) for key in ("tensors", "unmapped"))
        lines.append(_row(report.name, str(tensors), str(unmapped), gaps, f"{100 * report.moved:.1f} %"))
    return lines


def _figures(rows: Sequence[Measurement]) -> list[str]:
    scored = any(row.trainer_gaps for row in rows)
    return [
        f"{max(getattr(row, name) for row in rows):.1e}" if scored or index < 3 else "none"
        for index, name in enumerate(FIGURES)
    ]


def _head(*names: str) -> list[str]:
    return ["", _row(*names), _row(*["---"] * len(names))][1:]


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
