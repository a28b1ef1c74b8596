"""The divergence between two steps of one law. In: means [B, ...] and the std [B]. Out: one number a sample."""

from __future__ import annotations

from torch import Tensor

from miles_wan.algorithms.elements import sampled, wide
from miles_wan.flow.transitions import masked_mean


def gaussian_kl(mean: Tensor, reference_mean: Tensor, std: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """KL between two Gaussians of equal std, mean over the sampled elements: mean (mean - reference)^2 / (2 std^2).

    Args:
        mean, reference_mean: [B, ...].
        std: [B], above 0, of the noise actually added (g sqrt(-d) for an SDE step): only then is it a KL.
        mask: broadcastable to [B, ...], 1 on sampled elements.

    Returns:
        [B].
    """
    difference = sampled(wide(mean) - wide(reference_mean), mask)
    shape = (-1, *[1] * (mean.dim() - 1))
    return masked_mean(difference**2 / (2 * std.reshape(shape) ** 2), mask)
