"""Which samples of a rollout are trained. In: rewards and group ids [N]. Out: the positions to keep, and what was dropped.

Advantages are made before, of the whole group: the mean of what is kept is not the mean of what was sampled.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from miles_wan.algorithms.advantages import all_equal, check_rewards, std
from miles_wan.algorithms.elements import wide


@dataclass(frozen=True)
class Selection:
    """``kept`` [M] int64: positions, ascending. The numbers of dropped samples and of groups of which nothing is left."""

    kept: Tensor
    dropped_samples: int
    dropped_groups: int


def best_of_n(rewards: Tensor, group_ids: Tensor, *, k: int) -> Selection:
    """The k best and the k worst samples of every group (DanceGRPO's ``bestofn``, which is 2 k, there of a whole batch).

    A group of at most 2 k samples is kept whole. Equal rewards are told apart by position.

    Args:
        rewards, group_ids: [N].
        k: at least 1.

    Raises:
        ValueError: ``k`` below 1, non-finite rewards, shapes that differ.
    """
    check_rewards(rewards, group_ids)
    if k < 1:
        raise ValueError(f"best_of_n keeps the k best and k worst of a group: k must be at least 1, got {k}")
    keep = torch.zeros_like(rewards, dtype=torch.bool)
    for group in group_ids.unique():
        members = torch.nonzero(group_ids == group).flatten()
        order = members[torch.argsort(rewards[members], stable=True)]
        keep[torch.cat([order[:k], order[-k:]])] = True
    return _selection(keep, group_ids)


def spread_filter(rewards: Tensor, group_ids: Tensor, *, min_std: float, ddof: int = 0) -> Selection:
    """Only groups whose rewards differ by enough: their std is at least ``min_std``.

    What is left out would have got advantages that are 0, or noise of the reward blown up by a tiny std. (DAPO's dynamic
    sampling, arXiv 2503.14476, leaves out equal groups alone, and samples others instead; here nothing is re-sampled.)

    Args:
        rewards, group_ids: [N].
        min_std: above 0; groups of equal rewards, and groups of one, are dropped whatever it is.
        ddof: 0 divides by n, 1 by n - 1.

    Raises:
        ValueError: ``min_std`` not above 0, non-finite rewards, shapes that differ.
    """
    check_rewards(rewards, group_ids)
    if min_std <= 0:
        raise ValueError(f"min_std must be above 0, got {min_std}")
    keep = torch.zeros_like(rewards, dtype=torch.bool)
    for group in group_ids.unique():
        members = group_ids == group
        own = wide(rewards[members])
        keep[members] = not all_equal(own) and bool(std(own, ddof) >= min_std)
    return _selection(keep, group_ids)


def _selection(keep: Tensor, group_ids: Tensor) -> Selection:
    groups_before, groups_after = group_ids.unique().numel(), group_ids[keep].unique().numel()
    return Selection(torch.nonzero(keep).flatten(), int((~keep).sum()), groups_before - groups_after)
