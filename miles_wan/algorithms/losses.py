"""Policy losses over log-likelihoods, and the KL to a reference. In: tensors [B]. Out: scalars with their statistics."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from miles_wan.flow.transitions import masked_mean


@dataclass(frozen=True)
class PolicyLoss:
    """``loss`` (scalar, differentiable), ``ratio`` [B], ``clip_fraction`` and ``approx_kl`` (scalars, detached)."""

    loss: Tensor
    ratio: Tensor
    clip_fraction: Tensor
    approx_kl: Tensor


def clipped_policy_loss(
    log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, adv_clip: float
) -> PolicyLoss:
    """The clipped objective of Flow-GRPO (arXiv 2505.05470, eq. 4; PPO's), as a loss.

    L = mean max(-A' rho, -A' clamp(rho, 1 - clip_low, 1 + clip_high)), A' = clamp(A, -adv_clip, adv_clip),
    rho = exp(log_prob - old_log_prob).

    Args:
        log_prob, old_log_prob, advantages: [B].
    """
    clamped = advantages.clamp(-adv_clip, adv_clip)
    difference = log_prob - old_log_prob
    ratio = torch.exp(difference)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(-clamped * ratio, -clamped * clipped).mean()
    with torch.no_grad():
        outside = (ratio < 1 - clip_low) | (ratio > 1 + clip_high)
        return PolicyLoss(loss, ratio.detach(), outside.to(ratio.dtype).mean(), 0.5 * (difference**2).mean())


def gaussian_kl(mean: Tensor, reference_mean: Tensor, std: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """KL between two Gaussians of equal std, mean over the sampled elements: mean (mean - reference)^2 / (2 std^2).

    Args:
        mean, reference_mean: [B, ...].
        std: [B], above 0.
        mask: broadcastable to [B, ...], 1 on sampled elements.

    Returns:
        [B].
    """
    shape = (-1, *[1] * (mean.dim() - 1))
    return masked_mean((mean - reference_mean) ** 2 / (2 * std.reshape(shape) ** 2), mask)
