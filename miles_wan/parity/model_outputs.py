"""Why model outputs differ: the trainer's forward is tried with other conditions, weights and timesteps, by the other expert and
with another guidance scale, and what fits the engine's outputs better is named. In: pairs, references, a trainer. Out: at most one cause.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from miles_wan.flow import masked_mean
from miles_wan.parity.causes import source_of
from miles_wan.parity.pairs import Group, Pair, relative
from miles_wan.parity.parts import Adapter, Trainer
from miles_wan.parity.report import CONDITIONS, EXPERT, GUIDANCE, MASK, STALE, UNKNOWN, Cause
from miles_wan.records import Conditioning

_BETTER = 0.5  # another explanation of one sample counts if it leaves less than this share of the difference
_BETTER_TOGETHER = 0.8  # the same, of all samples
_NOISE = 1e-5  # relative differences below it are float32's own


@dataclass(frozen=True)
class Explanation:
    """A model output by other means: relative difference from the engine's that is left."""

    cause: str
    text: str
    left: float


def model_causes(
    pairs: Sequence[Pair],
    groups: Sequence[Group],
    references: Sequence[Conditioning],
    trainer: Trainer,
    *,
    previous: Adapter,
    current: Adapter,
    tolerance: float,
) -> list[Cause]:
    """Whether the engine's model outputs are explained better by other conditions, other weights, the other expert, another
    guidance scale or one timestep for all tokens. The first kept step of every sample is tried; with two experts the first
    and the last of each, since a wrong boundary shows beside it.

    An explanation has to fit all outputs that the nominal one does not.
    """
    probes = _probes(pairs, several=len(trainer.model.experts.names) > 1)
    tried = [_explanations(probe, groups, references, trainer, previous, current, tolerance) for probe in probes]
    bad = [
        at
        for at, (probe, explanations) in enumerate(zip(probes, tried, strict=True))
        if not probe.model_output_gap <= tolerance
        or (probe.model_output_gap > _NOISE and min(e.left for e in explanations) < _BETTER * probe.model_output_gap)
    ]
    # Beneath the rounding of one sample, all together may still show what one alone does not.
    share, chosen = (_BETTER, bad) if bad else (_BETTER_TOGETHER, list(range(len(probes))))
    gap = _together([probes[at].model_output_gap for at in chosen])
    told = f"model outputs of {len(chosen)} of {len(probes)} samples differ by {gap:.1e} (relative)"
    fits = [
        (left, cause, best[0].text)
        for cause in (CONDITIONS, STALE, MASK, EXPERT, GUIDANCE)
        if (best := _best(cause, [tried[at] for at in chosen]))
        and (left := _together([e.left for e in best])) < share * gap
        and max(e.left for e in best) <= tolerance
    ]
    if fits and gap > _NOISE:
        left, cause, text = min(fits)
        return [Cause(cause, f"{told}; {text} leaves {left:.1e}")]
    if not bad:
        return []
    left = min(e.left for at in bad for e in tried[at])
    return [
        Cause(
            UNKNOWN,
            f"{told}; no other conditions, weights, expert, guidance scale or timesteps explain them (at best {left:.1e} is "
            "left)",
        )
    ]


def _best(cause: str, tried: Sequence[Sequence[Explanation]]) -> list[Explanation]:
    """The best explanation by this cause for every sample; empty if one has none."""
    own = [[e for e in explanations if e.cause == cause] for explanations in tried]
    return [min(some, key=lambda e: e.left) for some in own] if all(own) else []


def _together(values: Sequence[float]) -> float:
    """Root mean square."""
    return math.sqrt(sum(value**2 for value in values) / len(values))


def _explanations(
    probe: Pair,
    groups: Sequence[Group],
    references: Sequence[Conditioning],
    trainer: Trainer,
    previous: Adapter,
    current: Adapter,
    tolerance: float,
) -> list[Explanation]:
    own = groups[probe.group].conditionings[0]

    def velocity(conditioning: Conditioning = own, **options: Any) -> Tensor:
        found, _ = trainer.velocity(
            probe.state[0].numpy(),
            probe.timestep,
            conditioning,
            has_condition=probe.has_condition,
            sampling=probe.sampling,
            **options,
        )
        return found

    def left(conditioning: Conditioning = own, **options: Any) -> float:
        return relative(velocity(conditioning, **options), probe.velocity, probe.mask)

    tried: list[Explanation] = []

    def add(cause: str, text: str, value: float) -> None:
        tried.append(Explanation(cause, text, value))

    for number, reference in enumerate(references):
        # With its own latent first frame: that is in the state, whoever mixed up the prompts.
        prompts = replace(reference, condition_latent=own.condition_latent)
        add(CONDITIONS, f"the prompt of {source_of(groups[number])}", left(prompts))
        latent, other = own.condition_latent, reference.condition_latent
        if latent is not None and other is not None and not np.array_equal(latent, other):
            add(CONDITIONS, f"prompt and first frame of {source_of(groups[number])}", left(reference))
            frame = replace(own, condition_latent=other)
            add(CONDITIONS, f"the first frame of {source_of(groups[number])}", left(frame))
    with trainer.base():
        add(STALE, "the base without an adapter", left())
    trainer.hold(previous)
    add(STALE, "the adapter pushed before", left())
    trainer.hold(current)
    experts = trainer.model.experts
    for name in experts.names:
        if name != probe.expert:
            add(EXPERT, f"the expert of {experts.label(name)} noise ({name}), with its guidance,", left(expert=name))
    scale = experts.guidance(probe.sampling.guidance_scale, probe.sampling.guidance_scale_2)[probe.expert]
    unguided = velocity(unguided=True) if scale > 1 else probe.own_velocity
    # What guidance changes must stand out from rounding, which a fit along a difference of roundings would explain, too.
    if relative(probe.own_velocity, unguided, probe.mask) > tolerance:
        fitted, rest = _fitted_guidance(probe, unguided, scale)
        add(GUIDANCE, f"guidance scale {fitted:.4g} of the {experts.label(probe.expert)} expert, not {scale:g},", rest)
    if probe.has_given_frame:
        add(MASK, "one timestep for all tokens, those of the given frame too,", left(scalar_timestep=True))
    return tried


def _fitted_guidance(probe: Pair, unguided: Tensor, scale: float) -> tuple[float, float]:
    """The guidance scale with which the trainer is nearest to the engine, and the relative difference that it leaves: v is
    linear in it, v(w) = v(1) + (w - 1) (v(scale) - v(1)) / (scale - 1)."""
    direction = (probe.own_velocity - unguided) / (scale - 1)
    squares = float(masked_mean(direction.double() ** 2, probe.mask))
    along = float(masked_mean(((probe.velocity - unguided) * direction).double(), probe.mask))
    excess = along / squares if squares > 0 else 0.0
    return 1 + excess, relative(unguided + excess * direction, probe.velocity, probe.mask)


def _probes(pairs: Sequence[Pair], *, several: bool) -> list[Pair]:
    """The first kept step of every sample; with ``several`` experts the first and the last of each."""
    found = []
    for _, own in itertools.groupby(pairs, key=lambda pair: (pair.group, pair.sample)):
        steps = list(own)
        if not several:
            found += steps[:1]
            continue
        for _, group in itertools.groupby(steps, key=lambda pair: pair.expert):
            chosen = list(group)
            found += chosen if len(chosen) == 1 else [chosen[0], chosen[-1]]
    return found
