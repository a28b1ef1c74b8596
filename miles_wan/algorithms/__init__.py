"""Scores to advantages, trajectories to losses: the papers, on tensors. Knows nothing of Ray, engines or models."""

from miles_wan.algorithms.advantages import count_equal_groups, group_advantages
from miles_wan.algorithms.combination import gdpo_advantages, weighted_rewards
from miles_wan.algorithms.divergence import gaussian_kl
from miles_wan.algorithms.dppo import dppo_loss
from miles_wan.algorithms.flow_matching import flow_matching_losses, noised, timestep_weights
from miles_wan.algorithms.guard import guard_loss
from miles_wan.algorithms.nft import NftLoss, nft_loss
from miles_wan.algorithms.policy import PolicyLoss, clipped_policy_loss
from miles_wan.algorithms.selection import Selection, best_of_n, spread_filter
from miles_wan.algorithms.weighting import noise_level_weights

__all__ = [
    "NftLoss",
    "PolicyLoss",
    "Selection",
    "best_of_n",
    "clipped_policy_loss",
    "count_equal_groups",
    "dppo_loss",
    "flow_matching_losses",
    "gaussian_kl",
    "gdpo_advantages",
    "group_advantages",
    "guard_loss",
    "nft_loss",
    "noise_level_weights",
    "noised",
    "spread_filter",
    "timestep_weights",
    "weighted_rewards",
]
