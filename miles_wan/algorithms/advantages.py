"""Group-relative advantages (Flow-GRPO, arXiv 2505.05470, eq. 3). In: rewards and group ids. Out: one number a sample."""

from __future__ import annotations

import torch
from torch import Tensor

NORMALIZATIONS = ("group_std", "global_std", "none")


def group_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    normalize: str = "group_std",
    ddof: int = 0,
    eps: float = 1e-4,
    clip: float | None = None,
) -> Tensor:
    """A = (r - mean of the group) / (std + eps).

    Args:
        rewards: [N].
        group_ids: [N] integers; samples of one prompt share one.
        normalize: ``group_std`` or ``global_std`` (std of the group or of all rewards), ``none`` (Dr.GRPO).
        ddof: 0 divides by n, 1 by n - 1.
        eps: added to the std.
        clip: advantages are clamped to +- this.

    Returns:
        [N] float64 if the rewards are, else float32. Groups of one or of equal rewards give exactly 0.

    Raises:
        ValueError: non-finite rewards, shapes that differ, unknown ``normalize``.
    """
    if normalize not in NORMALIZATIONS:
        raise ValueError(f"unknown normalization {normalize!r}; known: {', '.join(NORMALIZATIONS)}")
    if rewards.shape != group_ids.shape or rewards.dim() != 1:
        raise ValueError(f"rewards {tuple(rewards.shape)} and group ids {tuple(group_ids.shape)} must be equal vectors")
    if not bool(torch.isfinite(rewards).all()):
        raise ValueError(
            f"rewards at positions {torch.nonzero(~torch.isfinite(rewards)).flatten().tolist()} are not finite"
        )
    values = rewards if rewards.dtype == torch.float64 else rewards.float()
    advantages = torch.zeros_like(values)
    global_std = _std(values, ddof)
    for group in group_ids.unique():
        members = group_ids == group
        own = values[members]
        if _all_equal(own):
            continue
        centred = own - own.mean()
        if normalize == "group_std":
            centred = centred / (_std(own, ddof) + eps)
        elif normalize == "global_std":
            centred = centred / (global_std + eps)
        advantages[members] = centred
    return advantages if clip is None else advantages.clamp(-clip, clip)


def count_equal_groups(rewards: Tensor, group_ids: Tensor) -> int:
    """Groups whose rewards are all equal: they teach nothing."""
    return sum(_all_equal(rewards[group_ids == group]) for group in group_ids.unique())


def _all_equal(values: Tensor) -> bool:
    return bool((values == values[0]).all())


def _std(values: Tensor, ddof: int) -> Tensor:
    return values.std(correction=ddof) if values.numel() > ddof else values.new_zeros(())
