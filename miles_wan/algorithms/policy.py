"""The clipped objective of Flow-GRPO. In: log-likelihoods and advantages [B]. Out: a scalar with its statistics."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from miles_wan.algorithms.elements import wide


@dataclass(frozen=True)
class PolicyLoss:
    """``loss`` (scalar, differentiable), ``ratio`` [B], ``clip_fraction`` (share of samples that the trust region held
    back) and ``approx_kl`` = mean (log_prob - old_log_prob)^2 / 2 (scalars, detached)."""

    loss: Tensor
    ratio: Tensor
    clip_fraction: Tensor
    approx_kl: Tensor


def clipped_policy_loss(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    adv_clip: float,
    weight: Tensor | None = None,
) -> PolicyLoss:
    """The clipped objective of Flow-GRPO (arXiv 2505.05470, eq. 4; PPO's), as a loss.

    L = mean w max(-A' rho, -A' clamp(rho, 1 - clip_low, 1 + clip_high)), A' = clamp(A, -adv_clip, adv_clip),
    rho = exp(log_prob - old_log_prob).

    Args:
        log_prob, old_log_prob, advantages: [B].
        clip_low, clip_high: unequal ones are DAPO's "clip higher".
        weight: w [B], 1 if not given; ``noise_level_weights`` makes TempFlow-GRPO of it.
    """
    difference = wide(log_prob) - wide(old_log_prob)
    ratio = torch.exp(difference)
    loss, outside = clipped_objective(ratio, advantages, clip_low=clip_low, clip_high=clip_high, adv_clip=adv_clip)
    return policy_loss(loss if weight is None else weight * loss, ratio=ratio, outside=outside, difference=difference)


def clipped_objective(
    ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, adv_clip: float
) -> tuple[Tensor, Tensor]:
    """The loss of every sample [B], and which ratios are outside [1 - clip_low, 1 + clip_high] [B]."""
    clamped = wide(advantages).clamp(-adv_clip, adv_clip)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(-clamped * ratio, -clamped * clipped)
    return loss, (ratio < 1 - clip_low) | (ratio > 1 + clip_high)


def policy_loss(loss: Tensor, *, ratio: Tensor, outside: Tensor, difference: Tensor) -> PolicyLoss:
    """Means over the batch; ``difference`` [B] is log_prob - old_log_prob."""
    return PolicyLoss(
        loss=loss.mean(),
        ratio=ratio.detach(),
        clip_fraction=outside.to(ratio.dtype).mean(),
        approx_kl=0.5 * (difference.detach() ** 2).mean(),
    )
