"""Flattens trajectories to (sample, step) pairs and stacks them into micro-batches on the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from miles_wan.records import Conditioning, TrainItem, Trajectory


@dataclass(frozen=True)
class PairBatch:
    """B (sample, step) pairs. ``latents``, ``next_latents`` [B, C, F, h, w]; ``sigma``, ``sigma_next``, ``sigma_max``,
    ``old_log_prob``, ``advantages`` [B]; ``condition_latent`` [B, C, 1, h, w] or None; ``has_condition`` bool [B];
    ``prompt_embeds``, ``negative_prompt_embeds`` [B, L, D] (the latter may be None)."""

    latents: Tensor
    next_latents: Tensor
    sigma: Tensor
    sigma_next: Tensor
    sigma_max: Tensor
    old_log_prob: Tensor
    advantages: Tensor
    condition_latent: Tensor | None
    has_condition: Tensor
    prompt_embeds: Tensor
    negative_prompt_embeds: Tensor | None


def micro_batches(items: Sequence[TrainItem], *, size: int, device: torch.device) -> Iterator[PairBatch]:
    """Every kept step of every item, ``size`` pairs at a time, sample by sample.

    Raises:
        ValueError: an item with an image whose first-frame latent is missing.
    """
    pairs = [(item, k) for item in items for k in range(len(item.trajectory.steps))]
    for start in range(0, len(pairs), size):
        yield _stack(pairs[start : start + size], device)


def _stack(pairs: Sequence[tuple[TrainItem, int]], device: torch.device) -> PairBatch:
    trajectories: list[tuple[Trajectory, int]] = [(item.trajectory, k) for item, k in pairs]
    conditionings: list[Conditioning] = [item.conditioning for item, _ in pairs]
    has_condition = torch.tensor([trajectory.has_condition for trajectory, _ in trajectories])

    def column(values: Sequence[float | np.floating]) -> Tensor:
        return torch.tensor([float(value) for value in values], dtype=torch.float32, device=device)

    def stack(arrays: Sequence[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.stack(arrays)).to(device)

    negatives = [c.negative_prompt_embeds for c in conditionings if c.negative_prompt_embeds is not None]
    return PairBatch(
        latents=stack([trajectory.latents[k, 0] for trajectory, k in trajectories]),
        next_latents=stack([trajectory.latents[k, 1] for trajectory, k in trajectories]),
        sigma=column([trajectory.sigmas[trajectory.steps[k]] for trajectory, k in trajectories]),
        sigma_next=column([trajectory.sigmas[trajectory.steps[k] + 1] for trajectory, k in trajectories]),
        sigma_max=column([trajectory.sigmas[1] for trajectory, _ in trajectories]),
        old_log_prob=column([trajectory.log_probs[k] for trajectory, k in trajectories]),
        advantages=column([item.advantage for item, _ in pairs]),
        condition_latent=_condition_latents(pairs, device) if bool(has_condition.any()) else None,
        has_condition=has_condition.to(device),
        prompt_embeds=stack([conditioning.prompt_embeds for conditioning in conditionings]),
        negative_prompt_embeds=stack(negatives) if len(negatives) == len(pairs) else None,
    )


def _condition_latents(pairs: Sequence[tuple[TrainItem, int]], device: torch.device) -> Tensor:
    rows = []
    for item, k in pairs:
        latent = item.conditioning.condition_latent
        if item.trajectory.has_condition and latent is None:
            raise ValueError(f"record {item.record_id} has an image, and its first-frame latent is missing")
        rows.append(latent if latent is not None else np.zeros_like(item.trajectory.latents[k, 0][:, :1]))
    return torch.from_numpy(np.stack(rows)).to(device)
