"""Flattens trajectories to (sample, step) pairs, or finished videos to (sample, noise level) pairs, splits them by expert and
stacks them into micro-batches on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from miles_wan.records import Conditioning, TrainItem, Trajectory, derived_seed
from miles_wan.timesteps import timestep_of
from miles_wan.wan.experts import Experts


@dataclass(frozen=True)
class ConditionBatch:
    """``latent`` of first images ([B, C, 1, h, w], or the further channels of I2V), or None; ``given`` bool [B]: whether
    there was one; ``prompt_embeds``, ``negative_prompt_embeds`` [B, L, D] (the latter may be None)."""

    latent: Tensor | None
    given: Tensor
    prompt_embeds: Tensor
    negative_prompt_embeds: Tensor | None


@dataclass(frozen=True)
class PairBatch:
    """B (sample, step) pairs of one ``expert``. ``latents``, ``next_latents`` and ``noise``, the unit noise that the engine
    added, [B, C, F, h, w]; ``sigma``, ``sigma_next``, ``sigma_max``, ``timestep``, ``engine_log_prob``, ``advantages``,
    ``weight`` [B]; ``steps`` are the B step indices. ``size`` is 0 for a filler, whose one pair counts for nothing."""

    expert: str
    size: int
    latents: Tensor
    next_latents: Tensor
    noise: Tensor
    sigma: Tensor
    sigma_next: Tensor
    sigma_max: Tensor
    timestep: Tensor
    engine_log_prob: Tensor
    advantages: Tensor
    weight: Tensor
    steps: tuple[int, ...]
    condition: ConditionBatch


@dataclass(frozen=True)
class ForwardBatch:
    """B (sample, noise level) pairs of the forward process, of one ``expert``. ``clean`` x0 and ``noisy`` (1 - sigma) x0 +
    sigma e [B, C, F, h, w]; ``sigma``, ``advantages``, ``weight`` [B]; ``size`` as in ``PairBatch``."""

    expert: str
    size: int
    clean: Tensor
    noisy: Tensor
    sigma: Tensor
    advantages: Tensor
    weight: Tensor
    condition: ConditionBatch


@dataclass(frozen=True)
class StepPair:
    """Position ``k`` of the kept steps of ``item``, and the unit ``noise`` [C, F, h, w] that was added there."""

    item: TrainItem
    k: int
    noise: np.ndarray

    @property
    def timestep(self) -> float:
        return float(self.item.trajectory.timesteps[self.k])

    def muted(self) -> StepPair:
        return replace(self, item=replace(self.item, weight=0.0))


@dataclass(frozen=True)
class NoisePair:
    """``item`` noised to ``sigma`` with the unit ``noise`` [C, F, h, w]."""

    item: TrainItem
    sigma: float
    noise: Tensor

    @property
    def timestep(self) -> float:
        return timestep_of(self.sigma)

    def muted(self) -> NoisePair:
        return replace(self, item=replace(self.item, weight=0.0))


Pair = TypeVar("Pair", StepPair, NoisePair)
Batch = TypeVar("Batch", PairBatch, ForwardBatch)


def step_pairs(items: Sequence[TrainItem]) -> list[StepPair]:
    """Every kept step of every item, sample by sample."""
    return [StepPair(item, k, noise) for item in items for k, noise in enumerate(step_noises(item.trajectory))]


def noise_pairs(
    items: Sequence[TrainItem], *, levels: int, seed: int, among: Sequence[int] | None = None
) -> list[NoisePair]:
    """Every item noised to ``levels`` different sigmas of its own grid, sample by sample.

    Args:
        seed: of the rollout. Noise and levels follow from it and the sample's own seed: not from ranks or order.
        among: indices of the grid to choose from; by default all but the terminal 0.

    Raises:
        ValueError: an item without its last latent.
    """
    pairs = []
    for item in items:
        trajectory: Trajectory = item.trajectory
        if trajectory.final_latent is None:
            raise ValueError(f"record {item.record_id}: forward-process training needs the last latent of its videos")
        choice = range(len(trajectory.sigmas) - 1) if among is None else among
        generator = torch.Generator().manual_seed(derived_seed(seed, "forward", trajectory.seed))
        for level in torch.randperm(len(choice), generator=generator)[:levels].tolist():
            noise = torch.randn(trajectory.final_latent.shape, generator=generator)
            pairs.append(NoisePair(item, float(trajectory.sigmas[choice[level]]), noise))
    return pairs


def by_expert(pairs: Sequence[Pair], experts: Experts) -> dict[str, list[Pair]]:
    """Split per pair, never by the first one: the timestep that the rollout recorded decides."""
    routed = experts.route([pair.timestep for pair in pairs])
    return {name: [pairs[position] for position in positions] for name, positions in routed.items()}


def micro_batches(
    pairs: Mapping[str, Sequence[Pair]],
    stack: Callable[[str, int, Sequence[Pair], torch.device], Batch],
    *,
    counts: Mapping[str, int],
    size: int,
    device: torch.device,
) -> Iterator[Batch]:
    """Expert by expert, ``size`` pairs at a time.

    Args:
        pairs: of each expert; not all empty.
        stack: ``stack_steps`` or ``stack_noised``.
        counts: micro-batches of each expert, the same on all ranks since their forwards are collectives: a rank with fewer
            fills up with a pair of weight 0.

    Raises:
        ValueError: an item with an image whose latent is missing.
    """
    spare = next(own[0] for own in pairs.values() if own).muted()
    for name, count in counts.items():
        own = pairs[name]
        for number in range(count):
            chosen = own[number * size : (number + 1) * size]
            yield stack(name, len(chosen), chosen or [spare], device)


def step_noises(trajectory: Trajectory) -> list[np.ndarray]:
    """The unit noise [C, F, h, w] that was added in every kept step: a function of the seed alone."""
    generator = torch.Generator().manual_seed(trajectory.seed)
    shape = (1, *trajectory.latents.shape[2:])
    wanted = range(len(trajectory.steps)) if trajectory.noise_draws is None else trajectory.noise_draws
    torch.randn(shape, generator=generator)  # the initial latent
    draws = [torch.randn(shape, generator=generator)[0].numpy() for _ in range(max(wanted, default=-1) + 1)]
    return [draws[place] for place in wanted]


def stack_steps(expert: str, size: int, pairs: Sequence[StepPair], device: torch.device) -> PairBatch:
    """One micro-batch of stored steps."""
    trajectories: list[tuple[Trajectory, int]] = [(pair.item.trajectory, pair.k) for pair in pairs]

    def column(values: Sequence[float | np.floating]) -> Tensor:
        return _column(values, device)

    return PairBatch(
        expert=expert,
        size=size,
        latents=_stack([trajectory.latents[k, 0] for trajectory, k in trajectories], device),
        next_latents=_stack([trajectory.latents[k, 1] for trajectory, k in trajectories], device),
        noise=_stack([pair.noise for pair in pairs], device),
        sigma=column([trajectory.sigmas[trajectory.steps[k]] for trajectory, k in trajectories]),
        sigma_next=column([trajectory.sigmas[trajectory.steps[k] + 1] for trajectory, k in trajectories]),
        sigma_max=column([trajectory.sigmas[1] for trajectory, _ in trajectories]),
        timestep=column([pair.timestep for pair in pairs]),
        engine_log_prob=column([trajectory.log_probs[k] for trajectory, k in trajectories]),
        advantages=column([pair.item.advantage for pair in pairs]),
        weight=column([pair.item.weight for pair in pairs]),
        steps=tuple(trajectory.steps[k] for trajectory, k in trajectories),
        condition=_condition([pair.item for pair in pairs], device),
    )


def stack_noised(expert: str, size: int, pairs: Sequence[NoisePair], device: torch.device) -> ForwardBatch:
    """One micro-batch of noised videos."""
    items = [pair.item for pair in pairs]
    clean = _stack([item.trajectory.final_latent for item in items], device)
    noise = torch.stack([pair.noise for pair in pairs]).to(device)
    sigma = _column([pair.sigma for pair in pairs], device)
    scale = sigma.reshape(-1, 1, 1, 1, 1)
    return ForwardBatch(
        expert=expert,
        size=size,
        clean=clean,
        noisy=(1 - scale) * clean + scale * noise,
        sigma=sigma,
        advantages=_column([item.advantage for item in items], device),
        weight=_column([item.weight for item in items], device),
        condition=_condition(items, device),
    )


def _condition(items: Sequence[TrainItem], device: torch.device) -> ConditionBatch:
    conditionings: list[Conditioning] = [item.conditioning for item in items]
    given = torch.tensor([item.trajectory.has_condition for item in items])
    negatives = [c.negative_prompt_embeds for c in conditionings if c.negative_prompt_embeds is not None]
    return ConditionBatch(
        latent=_condition_latents(items, device) if bool(given.any()) else None,
        given=given.to(device),
        prompt_embeds=_stack([conditioning.prompt_embeds for conditioning in conditionings], device),
        negative_prompt_embeds=_stack(negatives, device) if len(negatives) == len(items) else None,
    )


def _condition_latents(items: Sequence[TrainItem], device: torch.device) -> Tensor:
    """What first images give, zeros for a sample without one (which is ignored)."""
    latents = [item.conditioning.condition_latent for item in items]
    for item, latent in zip(items, latents, strict=True):
        if item.trajectory.has_condition and latent is None:
            raise ValueError(f"record {item.record_id} has an image, and its first-frame latent is missing")
    shape = next(latent.shape for latent in latents if latent is not None)
    return _stack([np.zeros(shape, np.float32) if latent is None else latent for latent in latents], device)


def _column(values: Sequence[float | np.floating], device: torch.device) -> Tensor:
    return torch.tensor([float(value) for value in values], dtype=torch.float32, device=device)


def _stack(arrays: Sequence[np.ndarray], device: torch.device) -> Tensor:
    return torch.from_numpy(np.stack(arrays)).to(device)
