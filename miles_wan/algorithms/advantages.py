"""Group-relative advantages (Flow-GRPO, arXiv 2505.05470, eq. 3). In: rewards and group ids. Out: one number a sample."""

from __future__ import annotations

import torch
from torch import Tensor

from miles_wan.algorithms.elements import wide

NORMALIZATIONS = ("group_std", "global_std", "none")


def group_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    normalize: str = "group_std",
    ddof: int = 0,
    eps: float = 1e-4,
    floor: float = 0.0,
    clip: float | None = None,
) -> Tensor:
    """A = (r - mean of the group) / (max(std, floor) + eps).

    Args:
        rewards: [N].
        group_ids: [N] integers; samples of one prompt share one.
        normalize: ``group_std`` or ``global_std`` (std of the group or of all rewards), ``none`` (Dr.GRPO).
        ddof: 0 divides by n, 1 by n - 1.
        eps: added to the std.
        floor: a smaller std counts as this. The field has one or the other: Flow-GRPO and verl-omni eps 1e-4, DanceGRPO
            eps 1e-8, Flow-Factory floor 1e-6 with eps 0.
        clip: advantages are clamped to +- this.

    Returns:
        [N] float64 if the rewards are, else float32. Groups of one or of equal rewards give exactly 0.

    Raises:
        ValueError: non-finite rewards, shapes that differ, unknown ``normalize``.
    """
    if normalize not in NORMALIZATIONS:
        raise ValueError(f"unknown normalization {normalize!r}; known: {', '.join(NORMALIZATIONS)}")
    check_rewards(rewards, group_ids)
    values = wide(rewards)
    advantages = torch.zeros_like(values)
    for group in group_ids.unique():
        members = group_ids == group
        own = values[members]
        if all_equal(own):
            continue
        centred = own - own.mean()
        if normalize != "none":
            spread = std(own if normalize == "group_std" else values, ddof)
            centred = centred / (spread.clamp(min=floor) + eps)
        advantages[members] = centred
    return advantages if clip is None else advantages.clamp(-clip, clip)


def count_equal_groups(rewards: Tensor, group_ids: Tensor) -> int:
    """Groups whose rewards are all equal: they teach nothing."""
    return sum(all_equal(rewards[group_ids == group]) for group in group_ids.unique())


def check_rewards(rewards: Tensor, group_ids: Tensor, *, name: str = "rewards") -> None:
    """Raises ValueError unless both are vectors of one length and the rewards are finite."""
    if rewards.shape != group_ids.shape or rewards.dim() != 1:
        raise ValueError(f"{name} {tuple(rewards.shape)} and group ids {tuple(group_ids.shape)} must be equal vectors")
    strange = torch.nonzero(~torch.isfinite(rewards)).flatten().tolist()
    if strange:
        raise ValueError(f"{name} at positions {strange} are not finite")


def all_equal(values: Tensor) -> bool:
    """Whether ``values`` [n] are one number; one value is."""
    return bool((values == values[0]).all())


def std(values: Tensor, ddof: int) -> Tensor:
    """The std of ``values`` [n], 0 where ``ddof`` leaves nothing to divide by."""
    return values.std(correction=ddof) if values.numel() > ddof else values.new_zeros(())
