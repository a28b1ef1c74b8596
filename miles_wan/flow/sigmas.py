"""The sigma grid of training and validation alike, in closed form."""

from __future__ import annotations

import torch
from torch import Tensor


def shift_sigma(base: Tensor, shift: float) -> Tensor:
    """w(b) = shift b / (1 + (shift - 1) b), the time shift of flow-matching models (SD3, eq. 23)."""
    return shift * base / (1 + (shift - 1) * base)


def shifted_sigmas(num_steps: int, shift: float, *, num_train_timesteps: int = 1000) -> Tensor:
    """Sigmas of a rollout: w(linspace(1, w(1 / num_train_timesteps), num_steps)), then 0.

    This is what diffusers' ``FlowMatchEulerDiscreteScheduler(shift).set_timesteps`` and the engine's rollout use: the
    shift acts twice at the low end. The timestep of a step is ``num_train_timesteps * sigma``, not rounded.

    Args:
        num_steps: denoising steps N, at least 1.
        shift: time shift, above 0.

    Returns:
        float32 tensor [N + 1], from 1 down to the terminal 0.
    """
    if num_steps < 1:
        raise ValueError(f"num_steps is {num_steps}; a sigma grid has at least one step")
    if shift <= 0:
        raise ValueError(f"shift is {shift}; it must be above 0")
    lowest = shift_sigma(torch.tensor(1 / num_train_timesteps, dtype=torch.float64), shift)
    base = torch.linspace(1.0, float(lowest), num_steps, dtype=torch.float64)
    return torch.cat([shift_sigma(base, shift), base.new_zeros(1)]).float()
