"""Why an engine and the trainer differ, as far as the recorded data alone tell it: grid, law, conditioning, log-prob. In:
pairs, returned and independently encoded conditioning. Out: the causes that fit, with their figures. It runs no model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from scipy.optimize import minimize_scalar

from miles_wan.flow import shifted_sigmas, step_std, transition
from miles_wan.flow.transitions import ETA_KINDS
from miles_wan.parity.pairs import Group, Pair, rms
from miles_wan.parity.report import CONDITIONS, FLOW_SHIFT, LAW, MASK, NOISE_LEVEL, UNKNOWN, Cause
from miles_wan.records import Conditioning, Float32

GRID_TOLERANCE = 1e-6
LAW_TOLERANCE = 1e-3
DENSITY_TOLERANCE = 2e-5
CONDITION_TOLERANCE = 0.02
_SHIFTS = (0.05, 100.0)


def grid_cause(used: Float32, wanted: Float32, configured: str) -> Cause:
    """Why the returned grid is not the configured one: which flow shift gives it.

    Args:
        configured: what was asked for, in words.
    """
    shift, misfit = fitted_shift(used)
    largest = float(np.abs(used - wanted).max()) if len(used) == len(wanted) else math.inf
    told = f"the returned sigmas differ from {configured} by up to {largest:.1e}"
    if misfit <= 10 * GRID_TOLERANCE:
        return Cause(FLOW_SHIFT, f"{told}; flow shift {shift:.4g} gives them (to {misfit:.0e})")
    return Cause(UNKNOWN, f"{told}; no flow shift gives them (the nearest is {shift:.4g}, off by {misfit:.1e})")


def fitted_shift(sigmas: Float32) -> tuple[float, float]:
    """The flow shift whose closed form is nearest to ``sigmas``, and the largest difference that it leaves."""

    def misfit(log_shift: float) -> float:
        grid = shifted_sigmas(len(sigmas) - 1, math.exp(log_shift)).numpy()
        return float(np.abs(grid.astype(np.float64) - sigmas).max())

    low, high = map(math.log, _SHIFTS)
    found = minimize_scalar(misfit, bounds=(low, high), method="bounded", options={"xatol": 1e-9})
    return math.exp(found.x), float(found.fun)


def law_misfit(pairs: Sequence[Pair], kind: str, noise_level: float) -> float:
    """How far the engine's steps are from a law: of the std (relative) or the mean (in stds), given the engine's own model
    outputs; the largest of all pairs."""
    return max(_misfit(pair, kind, noise_level) for pair in pairs)


def _misfit(pair: Pair, kind: str, noise_level: float) -> float:
    law = transition(
        kind,
        pair.state,
        pair.velocity,
        sigma=pair.sigma,
        sigma_next=pair.sigma_next,
        sigma_max=pair.sigma_max,
        noise_level=noise_level,
        noise=torch.zeros_like(pair.state),
    )
    std = float(law.std)
    if not std > 0 or not pair.engine_std > 0:
        return math.inf
    return max(abs(pair.engine_std / std - 1), rms(law.mean - pair.mean, pair.mask) / std)


def law_cause(pairs: Sequence[Pair]) -> Cause:
    """Which law and noise level the engine's steps follow."""
    sampling = pairs[0].sampling
    fits = {}
    for kind in (*ETA_KINDS, "flow_grpo_wan"):
        eta = _fitted_eta(pairs, kind)
        if eta is not None:
            fits[kind] = (law_misfit(pairs, kind, eta), eta)
    ratios = [pair.engine_std / pair.own_std for pair in pairs]
    told = f"the engine's std is {min(ratios):.4g} to {max(ratios):.4g} times that of the configured law"
    misfit, eta = fits.get(sampling.kind, (math.inf, 0.0))
    if misfit <= LAW_TOLERANCE:
        return Cause(
            NOISE_LEVEL,
            f"{told}; noise level {eta:.4g} fits its steps (to {misfit:.0e}), configured is {sampling.noise_level:g}",
        )
    kind, (misfit, eta) = min(fits.items(), key=lambda entry: entry[1][0], default=("none", (math.inf, 0.0)))
    if misfit <= LAW_TOLERANCE:
        level = "" if kind == "flow_grpo_wan" else f" with noise level {eta:.4g}"
        return Cause(LAW, f"{told}; {kind}{level} fits its steps (to {misfit:.0e}), configured is {sampling.kind}")
    return Cause(UNKNOWN, f"{told}; none of the known laws fits its steps")


def _fitted_eta(pairs: Sequence[Pair], kind: str) -> float | None:
    """The noise level of ``kind`` that gives the engine's std, on average; None if none does."""
    factors = []
    for pair in pairs:
        sigmas = {name: torch.tensor([getattr(pair, name)]) for name in ("sigma", "sigma_next", "sigma_max")}
        factors.append(pair.engine_std / float(step_std(kind, **sigmas, noise_level=1.0)))
    factor = float(np.mean(factors))
    if not math.isfinite(factor) or factor <= 0:
        return None
    if kind == "cps":
        return math.asin(factor) * 2 / math.pi if factor <= 1 else None
    return factor


def condition_gaps(returned: Conditioning, encoded: Conditioning) -> dict[str, float]:
    """Relative difference of every part of a conditioning; infinite where one side lacks it."""
    gaps = {}
    for name in ("prompt_embeds", "negative_prompt_embeds", "condition_latent"):
        ours, theirs = getattr(encoded, name), getattr(returned, name)
        if ours is None and theirs is None:
            continue
        same = ours is not None and theirs is not None and ours.shape == theirs.shape
        gaps[name] = float(np.linalg.norm(ours - theirs) / np.linalg.norm(ours)) if same else math.inf
    return gaps


def condition_causes(groups: Sequence[Group], references: Sequence[Conditioning]) -> list[Cause]:
    """Returned conditioning that is another record's, or nobody's."""
    causes = []
    for number, group in enumerate(groups):
        for returned in group.conditionings:
            own = condition_gaps(returned, references[number])
            wrong = {name: gap for name, gap in own.items() if not gap <= CONDITION_TOLERANCE}
            for name, gap in wrong.items():
                told = (
                    f"{name} that came back with {source_of(group)} differs from its encoding by {gap:.1e} (relative)"
                )
                twins = [
                    other
                    for other, reference in enumerate(references)
                    if other != number
                    and condition_gaps(returned, reference).get(name, math.inf) <= CONDITION_TOLERANCE
                ]
                if twins:
                    causes.append(Cause(CONDITIONS, f"{told}; it is that of {source_of(groups[twins[0]])}"))
                else:
                    causes.append(Cause(UNKNOWN, f"{told}; it is that of no other record of this check"))
    return causes


def density_cause(pairs: Sequence[Pair]) -> Cause:
    """Over which elements, and in which form, the engine's log-probs are those of its own noise."""
    worst = max(abs(pair.log_prob - own_density(pair)) for pair in pairs)
    told = f"the engine's log-probs differ from those of its own noise over the sampled elements by up to {worst:.1e}"
    given = [pair for pair in pairs if pair.has_given_frame]
    for stored, text in ((False, "noise"), (True, "stored next states")):
        squared = pairs[0].sampling.kind == "cps" and pairs[0].sampling.cps_log_prob == "squared_error"
        left = max(
            (
                abs(pair.log_prob - pair.engine_density(everywhere=True, stored=stored, squared_error=squared))
                for pair in given
            ),
            default=math.inf,
        )
        if left <= DENSITY_TOLERANCE:
            return Cause(MASK, f"{told}; over all frames, the given one too, its {text} give them (to {left:.0e})")
    return Cause(UNKNOWN, f"{told}; they are not those over all frames either")


def own_density(pair: Pair) -> float:
    """The log-prob that the engine's step should have by its own noise and std."""
    squared = pair.sampling.kind == "cps" and pair.sampling.cps_log_prob == "squared_error"
    return pair.engine_density(squared_error=squared)


def merged(causes: Sequence[Cause]) -> list[Cause]:
    """One cause for each name, known ones first, each with all its evidence."""
    texts: dict[str, list[str]] = {}
    for cause in causes:
        texts.setdefault(cause.name, []).append(cause.evidence)
    order: Mapping[str, int] = {UNKNOWN: 1}
    return [Cause(name, "; ".join(texts[name])) for name in sorted(texts, key=lambda name: order.get(name, 0))]


def source_of(group: Group) -> str:
    """Where the record of a group is from."""
    return group.request.record.source or group.request.record.record_id
