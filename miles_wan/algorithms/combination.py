"""Several rewards to one signal. In: rewards by name [N] and their weights. Out: one reward, or one advantage, a sample."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from miles_wan.algorithms.advantages import check_rewards, group_advantages, std
from miles_wan.algorithms.elements import wide


def weighted_rewards(rewards: Mapping[str, Tensor], weights: Mapping[str, float]) -> Tensor:
    """``sum``: R = sum of weight r over the rewards, to be normalised afterwards (``group_advantages``).

    Args:
        rewards: [N] each.
        weights: one for every reward.

    Returns:
        [N] float64 if a reward is, else float32.

    Raises:
        ValueError: no rewards, or weights for other names.
    """
    _check_names(rewards, weights)
    return torch.stack([weights[name] * wide(values) for name, values in rewards.items()]).sum(0)


def gdpo_advantages(
    rewards: Mapping[str, Tensor],
    group_ids: Tensor,
    *,
    weights: Mapping[str, float],
    ddof: int = 0,
    floor: float = 1e-6,
    clip: float | None = None,
) -> Tensor:
    """``gdpo``: every reward is normalised in its groups, weighted and summed, and the sum normalised over the batch.

    A_k = (r_k - mean of the group) / max(std of the group, floor), X = sum of weight_k A_k, A = X / max(std of X, floor)
    (GDPO, arXiv 2601.05242). A reward of a large scale does not drown the others, as it does in a sum.

    Args:
        rewards: [N] each.
        group_ids: [N] integers; samples of one prompt share one.
        weights: one for every reward.
        ddof: 0 divides by n, 1 by n - 1.
        clip: advantages are clamped to +- this.

    Returns:
        [N]. Groups whose every reward is equal, and groups of one, give exactly 0.

    Raises:
        ValueError: no rewards, weights for other names, non-finite rewards (with their name), shapes that differ.
    """
    _check_names(rewards, weights)
    for name, values in rewards.items():
        check_rewards(values, group_ids, name=name)
    own = {
        name: group_advantages(values, group_ids, ddof=ddof, eps=0.0, floor=floor) for name, values in rewards.items()
    }
    # Its mean over the batch is 0 already, as it is in every group: nothing to subtract but rounding errors.
    total = weighted_rewards(own, weights)
    spread = std(total, ddof)
    advantages = total / spread.clamp(min=floor)
    return advantages if clip is None else advantages.clamp(-clip, clip)


def _check_names(rewards: Mapping[str, Tensor], weights: Mapping[str, float]) -> None:
    if not rewards or set(rewards) != set(weights):
        raise ValueError(
            f"rewards {sorted(rewards)} and weights {sorted(weights)} must have the same names, at least one"
        )
