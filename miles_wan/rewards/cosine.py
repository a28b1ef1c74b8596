"""What the rewards of the CLIP family share. In: videos, and how to encode frames and prompts. Out: the cosines of each
video's frames with its prompt. It knows no model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from miles_wan.records import RewardInput, UInt8
from miles_wan.rewards.frames import check_frames, uniform_frames


def frame_cosines(
    batch: Sequence[RewardInput],
    num_frames: int,
    *,
    encode_frames: Callable[[Sequence[UInt8]], Tensor],
    encode_prompts: Callable[[Sequence[str]], Tensor],
) -> tuple[Tensor, ...]:
    """For each video the cosines [n] of its n = min(num_frames, T) evenly spaced frames with its prompt.

    Args:
        encode_frames: frames uint8 [H, W, 3] to unit vectors [n, D].
        encode_prompts: prompts to unit vectors [B, D].

    Raises:
        RewardError: frames are not uint8 [T, H, W, 3].
    """
    if not batch:
        return ()
    for item in batch:
        check_frames(item.frames)
    videos = [uniform_frames(item.frames, num_frames) for item in batch]
    counts = [len(video) for video in videos]
    images = encode_frames([frame for video in videos for frame in video])
    texts = encode_prompts([item.prompt for item in batch])
    texts = texts.repeat_interleave(torch.tensor(counts, device=texts.device), dim=0)
    return (texts * images).sum(dim=-1).split(counts)
