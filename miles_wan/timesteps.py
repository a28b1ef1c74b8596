"""The timestep that a transformer is called with and an expert is chosen by. In: a sigma. Out: t = 1000 sigma. A leaf, like
``records``: it imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar, overload

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

    from miles_wan.records import Float32

    Sigmas = TypeVar("Sigmas", Float32, Tensor)

NUM_TRAIN_TIMESTEPS = 1000  # of the released models


@overload
def timestep_of(sigma: float | np.floating) -> float: ...
@overload
def timestep_of(sigma: Sigmas) -> Sigmas: ...
def timestep_of(sigma: float | np.floating | Sigmas) -> float | Sigmas:
    """The product in float32, as an engine computes it. In float64 it may lie beside the boundary of two experts:
    the float32 next to 0.9 gives 900, but 899.99998 there.

    Args:
        sigma: one, or several in float32.
    """
    if isinstance(sigma, float | np.floating):
        return float(np.float32(sigma) * np.float32(NUM_TRAIN_TIMESTEPS))
    return sigma * NUM_TRAIN_TIMESTEPS
