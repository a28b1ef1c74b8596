"""What every loss does to a tensor of elements: float32 or better, and given elements out of the way."""

from __future__ import annotations

import torch
from torch import Tensor


def wide(values: Tensor) -> Tensor:
    """``values`` in float32, or in float64 if they are."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def sampled(values: Tensor, mask: Tensor | None) -> Tensor:
    """``values`` with 0 where ``mask`` (broadcastable) is 0: a given element, also a NaN, moves neither value nor gradient."""
    return values if mask is None else torch.where(mask.expand_as(values) > 0, values, torch.zeros_like(values))
