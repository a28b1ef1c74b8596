"""Which transformer computes which timestep. In: the components of a checkpoint and its boundary. Out: names and ranges. It
is the one place that knows the boundary; it knows no weights, no trainer and no engine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

TIMESTEPS = 1000  # the released models' training timesteps: t = 1000 sigma

# What people and metrics call the components of a model with two.
LABELS = {"transformer": "high", "transformer_2": "low"}


@dataclass(frozen=True)
class Experts:
    """The experts of a checkpoint: component ``names``, that of the high noise first, and ``boundary`` (``boundary_ratio``
    of model_index.json; None with a single one)."""

    names: tuple[str, ...]
    boundary: float | None

    def __post_init__(self) -> None:
        if (len(self.names) == 2) != (self.boundary is not None):
            raise ValueError(f"{len(self.names)} expert(s) {', '.join(self.names)} with boundary {self.boundary}")

    def of(self, timestep: float) -> str:
        """The expert of one timestep in [0, 1000], by the inference rule of the released pipelines and the engine:
        int(t) >= 1000 boundary is high noise."""
        if self.boundary is None:
            return self.names[0]
        return self.names[0 if int(timestep) >= self.boundary * TIMESTEPS else 1]

    def route(self, timesteps: Sequence[float]) -> dict[str, list[int]]:
        """Positions of the timesteps by expert, high noise first; an expert without any has an empty list."""
        routed: dict[str, list[int]] = {name: [] for name in self.names}
        for position, timestep in enumerate(timesteps):
            routed[self.of(float(timestep))].append(position)
        return routed

    def ranges(self) -> Mapping[str, tuple[float, float]]:
        """The timesteps [low, high) of each expert; the largest one, 1000, belongs to the first, too."""
        if self.boundary is None:
            return {self.names[0]: (0.0, float(TIMESTEPS))}
        edge = float(math.ceil(self.boundary * TIMESTEPS))  # int(t) >= b is t >= ceil(b): 899.98 is below 900
        return {self.names[0]: (edge, float(TIMESTEPS)), self.names[1]: (0.0, edge)}

    def guidance(self, first: float, second: float | None) -> Mapping[str, float]:
        """The guidance scale of each expert. Raises ValueError as ``guidance_by_expert``."""
        return guidance_by_expert(self.names, first, second)

    def label(self, name: str) -> str:
        """``high`` or ``low``; ``model`` where there is only one."""
        return LABELS[name] if len(self.names) == 2 else "model"

    def chosen(self, which: str) -> tuple[str, ...]:
        """The components that ``both``, ``high`` or ``low`` names.

        Raises:
            ValueError: one of two is meant, and there is only one.
        """
        if which == "both":
            return self.names
        if len(self.names) == 1:
            raise ValueError(f"there is no expert of {which} noise in a model with a single transformer; use both")
        return tuple(name for name in self.names if self.label(name) == which)


def guidance_by_expert(names: Sequence[str], first: float, second: float | None) -> Mapping[str, float]:
    """The guidance scale of each expert of ``names``, that of the high noise first.

    Raises:
        ValueError: the second is missing with two experts, or given with one (there is no fallback); or only one of the two is
            above 1: by the first an engine decides whether there is guidance at all.
    """
    if (second is not None) != (len(names) == 2):
        raise ValueError(f"{len(names)} expert(s) with guidance scales {first:g} and {second}")
    if second is None:
        return {names[0]: first}
    if (first > 1) != (second > 1):
        raise ValueError(
            f"guidance scales {first:g} and {second:g}: guidance is on for both experts (above 1) or for neither"
        )
    return dict(zip(names, (first, second), strict=True))
