"""GRPO-Guard. In: log-likelihoods [B] and the means of both policies [B, ...]. Out: the loss with its statistics."""

from __future__ import annotations

import torch
from torch import Tensor

from miles_wan.algorithms.divergence import gaussian_kl
from miles_wan.algorithms.elements import wide
from miles_wan.algorithms.policy import PolicyLoss, clipped_objective, policy_loss


def guard_loss(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    *,
    mean: Tensor,
    old_mean: Tensor,
    std: Tensor,
    d: Tensor,
    clip_low: float,
    clip_high: float,
    adv_clip: float,
    mask: Tensor | None = None,
    weight: Tensor | None = None,
) -> PolicyLoss:
    """The clipped objective on a normalised ratio, balanced over the steps (GRPO-Guard, arXiv 2510.22319).

    The mean of log rho is minus the KL of the two policies, so that a plain ratio drifts below 1 as the policy moves,
    and its spread goes as 1 / std, so that one clip range means another thing in every step. Hence
    b = mean (mean - old_mean)^2 / (2 std^2), rho = exp((log_prob - old_log_prob + b) std), and
    L = mean w max(-A' rho, -A' clamp(rho, 1 - clip_low, 1 + clip_high)) / (-d).

    Args:
        log_prob, old_log_prob, advantages: [B]; log_prob is the true density (mean over elements).
        mean, old_mean: [B, ...] of the step's law under the present and the old policy. ``log_prob`` and ``mean`` carry
            the gradient.
        std: [B], of the noise actually added.
        d: [B], sigma_next - sigma, below 0.
        mask: broadcastable to [B, ...], 1 on sampled elements: b is a mean over these, for every sample by itself.
        weight: w [B], 1 if not given.

    Raises:
        ValueError: a ``d`` that is not below 0.
    """
    if not bool((d < 0).all()):
        raise ValueError(f"d is sigma_next - sigma and must be below 0, got {d.flatten().tolist()}")
    difference = wide(log_prob) - wide(old_log_prob)
    bias = gaussian_kl(mean, old_mean, std, mask=mask)
    ratio = torch.exp((difference + bias) * std)
    loss, outside = clipped_objective(ratio, advantages, clip_low=clip_low, clip_high=clip_high, adv_clip=adv_clip)
    loss = loss / -d if weight is None else weight * loss / -d
    return policy_loss(loss, ratio=ratio, outside=outside, difference=difference)
