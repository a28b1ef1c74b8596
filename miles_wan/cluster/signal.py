"""From scores to what is trained on. In: the scores of a rollout and the group of each sample. Out: an advantage for every
sample, and which of them are trained on, with the counts of what was left out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from miles_wan.algorithms import best_of_n, count_equal_groups, gdpo_advantages, group_advantages, spread_filter
from miles_wan.config import Config
from miles_wan.records import Score, TrainSignal

NORMALIZE = {"group": "group_std", "global": "global_std", "none": "none"}
_GDPO_FLOOR = 1e-6


def train_signal(config: Config, scores: Sequence[Score], group_ids: Sequence[int]) -> TrainSignal:
    """Advantages of all samples, made of whole groups, and then the selection."""
    algorithm = config.algorithm
    totals = torch.tensor([score.total for score in scores], dtype=torch.float64)
    groups = torch.tensor(group_ids)
    kept = torch.ones_like(groups, dtype=torch.bool)
    metrics = {"rollout/equal_groups": float(count_equal_groups(totals, groups))}
    if algorithm.min_group_std is not None:
        chosen = spread_filter(totals, groups, min_std=algorithm.min_group_std, ddof=algorithm.advantage_ddof)
        kept &= _mask(chosen.kept, kept)
        metrics["rollout/narrow_groups"] = float(chosen.dropped_groups)
    if algorithm.best_of_n is not None:
        chosen = best_of_n(totals, groups, k=algorithm.best_of_n)
        kept &= _mask(chosen.kept, kept)
    if not bool(kept.all()):
        metrics["rollout/left_out_samples"] = float((~kept).sum())
    return TrainSignal(_advantages(config, scores, totals, groups).tolist(), kept.tolist(), metrics)


def _advantages(config: Config, scores: Sequence[Score], totals: Tensor, groups: Tensor) -> Tensor:
    algorithm = config.algorithm
    if algorithm.combine_rewards == "gdpo":
        weights = {function.name: function.weight for function in config.reward.functions if function.weight}
        rewards = {name: torch.tensor([score.parts[name] for score in scores], dtype=torch.float64) for name in weights}
        return gdpo_advantages(
            rewards,
            groups,
            weights=weights,
            ddof=algorithm.advantage_ddof,
            floor=algorithm.advantage_floor or _GDPO_FLOOR,
            clip=algorithm.advantage_clip,
        )
    return group_advantages(
        totals,
        groups,
        normalize=NORMALIZE[algorithm.advantage_std],
        ddof=algorithm.advantage_ddof,
        eps=algorithm.advantage_eps,
        floor=algorithm.advantage_floor,
        clip=algorithm.advantage_clip,
    )


def _mask(positions: Tensor, like: Tensor) -> Tensor:
    mask = torch.zeros_like(like)
    mask[positions] = True
    return mask
