"""Timesteps of supervised training. In: a law, a shift, a generator. Out: timesteps on the model's scale, already shifted: what
an expert is chosen by, and nothing is shifted afterwards. It knows no expert, only where the scale may be cut in two.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from miles_wan.flow.sigmas import shift_sigma

Law = Literal["uniform", "logit_normal"]
NUM_TRAIN_TIMESTEPS = 1000


def draw_timesteps(
    count: int,
    *,
    law: Law = "uniform",
    shift: float = 1.0,
    mean: float = 0.0,
    std: float = 1.0,
    cut: float | None = None,
    high_share: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw u by ``law`` on (0, 1), then shift it: t = 1000 w(u), w(u) = shift u / (1 + (shift - 1) u).

    Args:
        law: ``uniform``; or ``logit_normal``, u = sigmoid(mean + std z) (SD3, eq. 19).
        shift: time shift, above 0.
        mean, std: of the logit-normal law.
        cut: timestep that divides low noise (below) from high noise (from it on); only needed with ``high_share``.
        high_share: probability in [0, 1] of a draw with high noise, in place of the one that follows from law, shift and
            cut; on either side the draw keeps its law. 1 and 0 train one side only, without exception.
        generator: source of randomness (CPU).

    Returns:
        float32 timesteps [count] in [0, 1000].

    Raises:
        ValueError: arguments that give no timesteps.
    """
    _check(shift=shift, std=std, cut=cut, high_share=high_share)
    quantiles = torch.rand(count, generator=generator, dtype=torch.float64)
    if high_share is None or cut is None:
        return (NUM_TRAIN_TIMESTEPS * shift_sigma(_inverse(quantiles, law, mean, std), shift)).float()
    below = 1 - high_noise_share(cut, law=law, shift=shift, mean=mean, std=std)
    high = torch.rand(count, generator=generator, dtype=torch.float64) < high_share
    quantiles = torch.where(high, below + (1 - below) * quantiles, below * quantiles)
    timesteps = (NUM_TRAIN_TIMESTEPS * shift_sigma(_inverse(quantiles, law, mean, std), shift)).float()
    # Rounding may carry a draw across the cut.
    edge = torch.tensor(cut, dtype=torch.float32)
    largest_low = torch.nextafter(edge, edge.new_zeros(()))
    return torch.where(high, timesteps.clamp(min=edge), timesteps.clamp(max=largest_low))


def high_noise_share(
    cut: float, *, law: Law = "uniform", shift: float = 1.0, mean: float = 0.0, std: float = 1.0
) -> float:
    """Probability that a draw is at or above the timestep ``cut``, in closed form.

    With s = cut / 1000 and u = s / (shift - (shift - 1) s), which the shift takes to s: 1 - u for the uniform law,
    1 - Phi((logit(u) - mean) / std) for the logit-normal one.
    """
    sigma = cut / NUM_TRAIN_TIMESTEPS
    base = sigma / (shift - (shift - 1) * sigma)
    if law == "uniform":
        return 1 - base
    if base >= 1 or base <= 0:
        return float(base <= 0)
    standard = (math.log(base / (1 - base)) - mean) / std
    return 0.5 * math.erfc(standard / math.sqrt(2))


def _inverse(quantiles: Tensor, law: Law, mean: float, std: float) -> Tensor:
    """u of each quantile of the law."""
    if law == "uniform":
        return quantiles
    return torch.sigmoid(mean + std * torch.special.ndtri(quantiles))


def _check(*, shift: float, std: float, cut: float | None, high_share: float | None) -> None:
    faults = []
    if shift <= 0:
        faults.append(f"shift is {shift}; it must be above 0")
    if std <= 0:
        faults.append(f"std is {std}; it must be above 0")
    if high_share is not None and not 0 <= high_share <= 1:
        faults.append(f"high_share is {high_share}; it is a probability")
    if high_share is not None and cut is None:
        faults.append("high_share needs the timestep that divides high from low noise")
    if cut is not None and not 0 < cut < NUM_TRAIN_TIMESTEPS:
        faults.append(f"cut is {cut}; it lies between 0 and {NUM_TRAIN_TIMESTEPS}")
    if faults:
        raise ValueError("; ".join(faults))
