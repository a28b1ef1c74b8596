"""The sigma grid of training and validation alike: in closed form, or given number by number and checked."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from miles_wan.timesteps import NUM_TRAIN_TIMESTEPS

_SHORTEST_STEP = 1e-5


def shift_sigma(base: Tensor, shift: float) -> Tensor:
    """w(b) = shift b / (1 + (shift - 1) b), the time shift of flow-matching models (SD3, eq. 23)."""
    return shift * base / (1 + (shift - 1) * base)


def shifted_sigmas(num_steps: int, shift: float) -> Tensor:
    """Sigmas of a rollout: w(linspace(1, w(1 / 1000), num_steps)), then 0.

    This is what diffusers' ``FlowMatchEulerDiscreteScheduler(shift).set_timesteps`` and the engine's rollout use: the
    shift acts twice at the low end. The timestep of a step is 1000 sigma, not rounded (``timestep_of``).

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
    lowest = shift_sigma(torch.tensor(1 / NUM_TRAIN_TIMESTEPS, dtype=torch.float64), shift)
    base = torch.linspace(1.0, float(lowest), num_steps, dtype=torch.float64)
    return torch.cat([shift_sigma(base, shift), base.new_zeros(1)]).float()


def explicit_sigmas(sigmas: Sequence[float]) -> Tensor:
    """A grid given number by number, checked. No shift is applied to it.

    Args:
        sigmas: N + 1 values from pure noise down to the terminal 0, strictly falling.

    Returns:
        float32 tensor [N + 1].

    Raises:
        ValueError: with everything that is wrong with the list.
    """
    values = [float(sigma) for sigma in sigmas]
    faults = []
    if len(values) < 2:
        faults.append("it needs at least a first sigma and the terminal 0")
    # Solvers such as UniPC start a little below 1; from much below, unit noise would not be the state at sigma.
    if values and not 0.99 <= values[0] <= 1:
        faults.append(f"it starts at {values[0]}, not in [0.99, 1]: a rollout starts from pure noise")
    if values and values[-1] != 0:
        faults.append(f"it ends at {values[-1]}: append the terminal 0")
    grid = torch.tensor(values, dtype=torch.float32)
    rises = [k for k, falls in enumerate((grid.diff() < 0).tolist()) if not falls]
    if rises:
        faults.append(f"it does not fall (in float32) after the entries {rises}")
    short = [k for k, fall in enumerate((-grid.diff()).tolist()) if 0 < fall < _SHORTEST_STEP]
    if short:
        faults.append(
            f"it falls by less than {_SHORTEST_STEP:g} after the entries {short}: float32 cannot tell such states apart"
        )
    if faults:
        raise ValueError(f"sigmas {values} are no grid: {'; '.join(faults)}")
    return grid
