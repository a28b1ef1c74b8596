"""Flow-DPPO. In: log-likelihoods [B] and the means of both policies [B, ...]. Out: the loss with its statistics."""

from __future__ import annotations

import torch
from torch import Tensor

from miles_wan.algorithms.divergence import gaussian_kl
from miles_wan.algorithms.elements import wide
from miles_wan.algorithms.policy import PolicyLoss, policy_loss


def dppo_loss(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    *,
    mean: Tensor,
    old_mean: Tensor,
    std: Tensor,
    kl_threshold: float,
    mask: Tensor | None = None,
    weight: Tensor | None = None,
) -> PolicyLoss:
    """A trust region by the exact divergence instead of a clipped ratio (Flow-DPPO, arXiv 2606.11025).

    L = mean keep w (-A rho), rho = exp(log_prob - old_log_prob). A sample is dropped when its step has moved by
    KL = mean (mean - old_mean)^2 / (2 std^2) >= kl_threshold and the update would move it on: rho > 1 and A > 0, or
    rho < 1 and A < 0. The advantage is not clamped. ``clip_fraction`` is the share of dropped samples.

    Args:
        log_prob, old_log_prob, advantages: [B].
        mean, old_mean: [B, ...] of the step's law under the present and the old policy; without gradient.
        std: [B], of the noise actually added.
        mask: broadcastable to [B, ...], 1 on sampled elements.
        weight: w [B], 1 if not given.
    """
    difference = wide(log_prob) - wide(old_log_prob)
    ratio, advantages = torch.exp(difference), wide(advantages)
    divergence = gaussian_kl(mean.detach(), old_mean, std, mask=mask)
    moves_on = ((ratio > 1) & (advantages > 0)) | ((ratio < 1) & (advantages < 0))
    dropped = (divergence >= kl_threshold) & moves_on
    loss = -advantages * ratio if weight is None else -weight * advantages * ratio
    loss = torch.where(dropped, torch.zeros_like(loss), loss)
    return policy_loss(loss, ratio=ratio, outside=dropped, difference=difference)
