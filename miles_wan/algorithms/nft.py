"""DiffusionNFT, on the forward process. In: velocities at noised clean samples [B, ...]. Out: the loss with its parts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from miles_wan.algorithms.elements import sampled, wide
from miles_wan.flow.transitions import masked_mean


@dataclass(frozen=True)
class NftLoss:
    """``loss`` (scalar, differentiable). Detached: its parts ``policy_loss`` and ``reference_loss`` (before its weight),
    ``positive_loss`` and ``negative_loss`` (means of l(v+) and l(v-)), and ``reward_probability`` [B]."""

    loss: Tensor
    policy_loss: Tensor
    reference_loss: Tensor
    positive_loss: Tensor
    negative_loss: Tensor
    reward_probability: Tensor


def nft_loss(
    velocity: Tensor,
    old_velocity: Tensor,
    *,
    clean: Tensor,
    noisy: Tensor,
    sigma: Tensor,
    advantages: Tensor,
    adv_clip: float,
    beta: float,
    reference_velocity: Tensor | None = None,
    reference_weight: float = 0.0,
    min_error: float = 1e-5,
    mask: Tensor | None = None,
    weight: Tensor | None = None,
) -> NftLoss:
    """Negative-aware finetuning (DiffusionNFT, arXiv 2509.16117).

    v+ = beta v + (1 - beta) v_old, v- = (1 + beta) v_old - beta v, xhat(u) = noisy - sigma u,
    l(u) = mean (xhat(u) - clean)^2 / w(u), w(u) = max(mean |xhat(u) - clean|, min_error) without gradient,
    r = A' / (2 adv_clip) + 1/2, A' = clamp(A, -adv_clip, adv_clip), and
    L = adv_clip mean (r l(v+) + (1 - r) l(v-)) / beta + reference_weight mean (v - v_reference)^2.
    At v = v_old the gradient is that of mean A' l(v), whatever beta.

    Args:
        velocity, old_velocity: v and v_old [B, ...] at ``noisy``: of the policy and of its slow average (EMA).
        clean, noisy: x0 and (1 - sigma) x0 + sigma e [B, ...]; x0 is the end of a rollout.
        sigma: [B].
        advantages: [B], of the rollouts that made ``clean``.
        beta: above 0; large ones take v+ and v- further from v_old.
        reference_velocity: [B, ...] of the frozen base; needed with ``reference_weight``.
        mask: broadcastable to [B, ...], 1 on sampled elements; all means over elements are over these.
        weight: of every sample [B], 1 if not given.

    Raises:
        ValueError: ``beta`` not above 0, or a ``reference_weight`` without a reference.
    """
    if beta <= 0:
        raise ValueError(f"beta must be above 0, got {beta}")
    if reference_weight > 0 and reference_velocity is None:
        raise ValueError(f"reference_weight {reference_weight} needs reference_velocity")
    v, v_old = wide(velocity), wide(old_velocity).detach()
    residual = wide(noisy) - wide(clean)
    scale = wide(sigma).reshape(-1, *[1] * (v.dim() - 1))
    probability = wide(advantages).clamp(-adv_clip, adv_clip) / (2 * adv_clip) + 0.5
    positive = _error(residual - scale * (beta * v + (1 - beta) * v_old), min_error=min_error, mask=mask)
    negative = _error(residual - scale * ((1 + beta) * v_old - beta * v), min_error=min_error, mask=mask)
    count = torch.ones_like(probability) if weight is None else weight
    policy = adv_clip * (count * (probability * positive + (1 - probability) * negative) / beta).mean()
    reference = torch.zeros_like(policy)
    if reference_velocity is not None:
        reference = (count * masked_mean(sampled(v - wide(reference_velocity), mask) ** 2, mask)).mean()
    return NftLoss(
        loss=policy + reference_weight * reference,
        policy_loss=policy.detach(),
        reference_loss=reference.detach(),
        positive_loss=positive.detach().mean(),
        negative_loss=negative.detach().mean(),
        reward_probability=probability,
    )


def _error(difference: Tensor, *, min_error: float, mask: Tensor | None) -> Tensor:
    """Squared error over the size of the error, which keeps the steps of large and small sigma comparable: [B]."""
    difference = sampled(difference, mask)
    size = masked_mean(difference.detach().abs(), mask).clamp(min=min_error)
    return masked_mean(difference**2, mask) / size
