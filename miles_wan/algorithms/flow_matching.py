"""The loss of supervised training. In: the velocity at noised clean latents [B, ...], and what they were made of. Out: one loss
per sample; the caller takes the mean over the whole batch, whatever parts it was computed in.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from miles_wan.algorithms.elements import sampled, wide
from miles_wan.flow.transitions import masked_mean

WEIGHTINGS = ("none", "cosmap")


def noised(clean: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
    """x_s = (1 - s) x0 + s e, for clean latents and noise [B, ...] and sigma [B]."""
    level = sigma.reshape(-1, *[1] * (clean.dim() - 1))
    return (1 - level) * clean + level * noise


def flow_matching_losses(velocity: Tensor, clean: Tensor, noise: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Mean over the sampled elements of (v - (e - x0))^2, for each sample.

    Args:
        velocity, clean, noise: [B, C, F, h, w]; computed in float32 or better.
        mask: [B, 1, F, h, w] or of their shape, 1 on sampled elements and 0 on the given first frame.

    Returns:
        Losses [B], differentiable in ``velocity``.
    """
    error = sampled(wide(velocity) - (wide(noise) - wide(clean)), mask)
    return masked_mean(error**2, mask)


def timestep_weights(weighting: str, sigma: Tensor) -> Tensor:
    """Weight [B] of the loss at ``sigma`` [B]. ``none``: 1; ``cosmap``: 2 / (pi (1 - 2 s + 2 s^2)), whose mean over s in
    [0, 1] is 1 (SD3, section 3.1).

    Raises:
        ValueError: another name.
    """
    if weighting == "none":
        return torch.ones_like(sigma, dtype=torch.float32)
    if weighting == "cosmap":
        level = sigma.double()
        return (2 / (math.pi * (1 - 2 * level + 2 * level**2))).float()
    raise ValueError(f"weighting {weighting!r} is not known; known are {', '.join(WEIGHTINGS)}")
