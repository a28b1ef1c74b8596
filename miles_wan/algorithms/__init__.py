"""Scores to advantages, trajectories to losses: the papers, on tensors. Knows nothing of Ray, engines or models."""

from miles_wan.algorithms.advantages import count_equal_groups, group_advantages
from miles_wan.algorithms.losses import PolicyLoss, clipped_policy_loss, gaussian_kl

__all__ = ["PolicyLoss", "clipped_policy_loss", "count_equal_groups", "gaussian_kl", "group_advantages"]
