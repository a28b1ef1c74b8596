"""Flattens trajectories to (sample, step) pairs, or finished videos to (sample, noise level) pairs, and stacks them into
micro-batches on the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from miles_wan.records import Conditioning, TrainItem, Trajectory, derived_seed


@dataclass(frozen=True)
class ConditionBatch:
    """``latent`` [B, C, 1, h, w] of given first frames, or None; ``given`` bool [B]: whether frame 0 was given;
    ``prompt_embeds``, ``negative_prompt_embeds`` [B, L, D] (the latter may be None)."""

    latent: Tensor | None
    given: Tensor
    prompt_embeds: Tensor
    negative_prompt_embeds: Tensor | None


@dataclass(frozen=True)
class PairBatch:
    """B (sample, step) pairs. ``latents``, ``next_latents`` and ``noise``, the unit noise that the engine added,
    [B, C, F, h, w]; ``sigma``, ``sigma_next``, ``sigma_max``, ``engine_log_prob``, ``advantages``, ``weight`` [B];
    ``steps`` are the B step indices."""

    latents: Tensor
    next_latents: Tensor
    noise: Tensor
    sigma: Tensor
    sigma_next: Tensor
    sigma_max: Tensor
    engine_log_prob: Tensor
    advantages: Tensor
    weight: Tensor
    steps: tuple[int, ...]
    condition: ConditionBatch

    @property
    def size(self) -> int:
        return self.sigma.numel()


@dataclass(frozen=True)
class ForwardBatch:
    """B (sample, noise level) pairs of the forward process. ``clean`` x0 and ``noisy`` (1 - sigma) x0 + sigma e
    [B, C, F, h, w]; ``sigma``, ``advantages``, ``weight`` [B]."""

    clean: Tensor
    noisy: Tensor
    sigma: Tensor
    advantages: Tensor
    weight: Tensor
    condition: ConditionBatch

    @property
    def size(self) -> int:
        return self.sigma.numel()


def step_batches(items: Sequence[TrainItem], *, size: int, device: torch.device) -> Iterator[PairBatch]:
    """Every kept step of every item, ``size`` pairs at a time, sample by sample.

    Raises:
        ValueError: an item with an image whose first-frame latent is missing.
    """
    waiting: list[tuple[TrainItem, int, np.ndarray]] = []
    for item in items:
        noises = step_noises(item.trajectory)
        for k in range(len(item.trajectory.steps)):
            waiting.append((item, k, noises[k]))
            if len(waiting) == size:
                yield _steps(waiting, device)
                waiting = []
    if waiting:
        yield _steps(waiting, device)


def noise_batches(
    items: Sequence[TrainItem], *, levels: int, size: int, seed: int, device: torch.device
) -> Iterator[ForwardBatch]:
    """Every item noised to ``levels`` different sigmas of its own grid, ``size`` pairs at a time, sample by sample.

    Args:
        seed: of the rollout. Noise and levels follow from it and the sample's own seed: not from ranks or order.

    Raises:
        ValueError: an item without its last latent, or with an image whose first-frame latent is missing.
    """
    waiting: list[tuple[TrainItem, float, Tensor]] = []
    for item in items:
        trajectory: Trajectory = item.trajectory
        if trajectory.final_latent is None:
            raise ValueError(f"record {item.record_id}: forward-process training needs the last latent of its videos")
        generator = torch.Generator().manual_seed(derived_seed(seed, "forward", trajectory.seed))
        for level in torch.randperm(len(trajectory.sigmas) - 1, generator=generator)[:levels].tolist():
            noise = torch.randn(trajectory.final_latent.shape, generator=generator)
            waiting.append((item, float(trajectory.sigmas[level]), noise))
            if len(waiting) == size:
                yield _noised(waiting, device)
                waiting = []
    if waiting:
        yield _noised(waiting, device)


def step_noises(trajectory: Trajectory) -> list[np.ndarray]:
    """The unit noise [C, F, h, w] that was added in every kept step: a function of the seed alone."""
    generator = torch.Generator().manual_seed(trajectory.seed)
    shape = (1, *trajectory.latents.shape[2:])
    wanted = range(len(trajectory.steps)) if trajectory.noise_draws is None else trajectory.noise_draws
    torch.randn(shape, generator=generator)  # the initial latent
    draws = [torch.randn(shape, generator=generator)[0].numpy() for _ in range(max(wanted, default=-1) + 1)]
    return [draws[place] for place in wanted]


def _steps(pairs: Sequence[tuple[TrainItem, int, np.ndarray]], device: torch.device) -> PairBatch:
    trajectories: list[tuple[Trajectory, int]] = [(item.trajectory, k) for item, k, _ in pairs]

    def column(values: Sequence[float | np.floating]) -> Tensor:
        return _column(values, device)

    return PairBatch(
        latents=_stack([trajectory.latents[k, 0] for trajectory, k in trajectories], device),
        next_latents=_stack([trajectory.latents[k, 1] for trajectory, k in trajectories], device),
        noise=_stack([noise for _, _, noise in pairs], device),
        sigma=column([trajectory.sigmas[trajectory.steps[k]] for trajectory, k in trajectories]),
        sigma_next=column([trajectory.sigmas[trajectory.steps[k] + 1] for trajectory, k in trajectories]),
        sigma_max=column([trajectory.sigmas[1] for trajectory, _ in trajectories]),
        engine_log_prob=column([trajectory.log_probs[k] for trajectory, k in trajectories]),
        advantages=column([item.advantage for item, _, _ in pairs]),
        weight=column([item.weight for item, _, _ in pairs]),
        steps=tuple(trajectory.steps[k] for trajectory, k in trajectories),
        condition=_condition([item for item, _, _ in pairs], device),
    )


def _noised(pairs: Sequence[tuple[TrainItem, float, Tensor]], device: torch.device) -> ForwardBatch:
    clean = _stack([item.trajectory.final_latent for item, _, _ in pairs], device)
    noise = torch.stack([noise for _, _, noise in pairs]).to(device)
    sigma = _column([sigma for _, sigma, _ in pairs], device)
    scale = sigma.reshape(-1, 1, 1, 1, 1)
    return ForwardBatch(
        clean=clean,
        noisy=(1 - scale) * clean + scale * noise,
        sigma=sigma,
        advantages=_column([item.advantage for item, _, _ in pairs], device),
        weight=_column([item.weight for item, _, _ in pairs], device),
        condition=_condition([item for item, _, _ in pairs], device),
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
    rows = []
    for item in items:
        latent = item.conditioning.condition_latent
        if item.trajectory.has_condition and latent is None:
            raise ValueError(f"record {item.record_id} has an image, and its first-frame latent is missing")
        channels, _, height, width = item.trajectory.latents.shape[2:]
        rows.append(latent if latent is not None else np.zeros((channels, 1, height, width), np.float32))
    return _stack(rows, device)


def _column(values: Sequence[float | np.floating], device: torch.device) -> Tensor:
    return torch.tensor([float(value) for value in values], dtype=torch.float32, device=device)


def _stack(arrays: Sequence[np.ndarray], device: torch.device) -> Tensor:
    return torch.from_numpy(np.stack(arrays)).to(device)
