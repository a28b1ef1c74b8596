"""What the comparison of an engine with the trainer says. Plain data: it knows neither of the two."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

# The causes that are looked for, by name.
FLOW_SHIFT = "wrong flow shift"
NOISE_LEVEL = "wrong noise level"
LAW = "wrong transition law"
CONDITIONS = "swapped conditions"
STALE = "stale weights"
MASK = "first-frame mask off"
EXPERT = "wrong expert"
GUIDANCE = "wrong guidance scale"
UNKNOWN = "unknown"


@dataclass(frozen=True)
class StepRow:
    """Differences of one step over its ``pairs`` (samples that kept it), all of one ``expert`` (``high``, ``low``, or
    ``model`` where there is one). ``model_output`` is the largest relative one (norms); the others are absolute, over sampled
    elements."""

    step: int
    sigma: float
    expert: str
    pairs: int
    model_output: float
    model_output_mean: float
    model_output_max: float
    mean_mean: float
    mean_max: float
    log_prob_mean: float
    log_prob_max: float


@dataclass(frozen=True)
class Check:
    """One quantity against its bound; ``value`` is the largest over all pairs, and holds if it is at most ``bound``."""

    name: str
    value: float
    bound: float
    unit: str

    @property
    def holds(self) -> bool:
        return self.value <= self.bound  # not for NaN


@dataclass(frozen=True)
class Cause:
    """A likely cause (one of the names above) and the figures that speak for it."""

    name: str
    evidence: str


@dataclass(frozen=True)
class ParityReport:
    """The verdict with all it rests on.

    ``checks`` in the order of the computation: the first that fails is where the two sides part. ``causes``: the likeliest
    first, empty if everything holds. ``refused``: what the engine or a push said instead of working. ``clip`` names the
    bounds within which a loss takes log-probs (or KLs) for equal; ``noise_floor`` and ``kl_floor`` are the largest
    differences seen.
    """

    engine: str
    precision: str
    records: int
    samples: int
    rows: Sequence[StepRow] = ()
    checks: Sequence[Check] = ()
    causes: Sequence[Cause] = ()
    warnings: Sequence[str] = ()
    refused: str | None = None
    clip: dict[str, float] = field(default_factory=dict)
    noise_floor: float | None = None
    kl_floor: float | None = None

    @property
    def holds(self) -> bool:
        return self.refused is None and not self.causes and all(check.holds for check in self.checks)

    @property
    def likely_cause(self) -> str | None:
        return self.causes[0].name if self.causes else None

    def as_json(self) -> dict[str, Any]:
        """Everything, for ``json.dumps``; numbers that are not finite become null."""
        values = asdict(self)
        for check, told in zip(self.checks, values["checks"], strict=True):
            told["holds"] = check.holds
        return _finite(values | {"holds": self.holds, "likely_cause": self.likely_cause})


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
