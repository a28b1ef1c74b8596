"""The one contract for frames: uint8 [T, H, W, 3], T >= 1. In: what came as frames. Out: nothing, or a RewardError that
says what came instead. It knows no reward.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from miles_wan.errors import RewardError
from miles_wan.records import UInt8

CONTRACT = "uint8 [T, H, W, 3] with T >= 1"


def check_frames(frames: Any) -> None:
    """Raise RewardError unless ``frames`` is a numpy array uint8 [T, H, W, 3] with at least one frame."""
    fault = _fault(frames)
    if fault is not None:
        raise RewardError(f"frames are {fault}; a reward gets {CONTRACT}, RGB")


def uniform_frames(frames: UInt8, count: int) -> UInt8:
    """At most ``count`` frames [n, H, W, 3], evenly spaced from first to last; never one of them twice."""
    total = len(frames)
    chosen = np.linspace(0, total - 1, num=min(count, total)).round().astype(int)
    return frames[chosen]


def _fault(frames: Any) -> str | None:
    if not isinstance(frames, np.ndarray):
        return f"a {type(frames).__module__}.{type(frames).__name__}, not a numpy array"
    what = f"{frames.dtype} {list(frames.shape)}"
    if frames.ndim != 4:
        return f"{what}, which has {frames.ndim} axes, not 4"
    if frames.shape[3] != 3:
        return f"{what}, {_layout(frames.shape)}"
    if frames.dtype != np.uint8:
        return f"{what}, not uint8 (values in 0..255)"
    return f"{what}, which holds no pixel" if 0 in frames.shape else None


def _layout(shape: tuple[int, ...]) -> str:
    if shape[1] == 3:
        return "which looks like [T, C, H, W]"
    if shape[0] == 3:
        return "which looks like [C, T, H, W]"
    if shape[3] in (1, 4):
        return f"which has {shape[3]} colour channel(s), not 3"
    return "whose last axis is not RGB"
