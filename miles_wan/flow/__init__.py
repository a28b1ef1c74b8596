"""Flow-matching mathematics on tensors: sigma grids, transitions with their likelihood, choice of stochastic steps.

Convention: x_s = (1 - s) x0 + s e with sigma s in [0, 1], velocity v = e - x0, sampling runs from s = 1 to s = 0.
This room imports torch alone.
"""

from miles_wan.flow.sigmas import explicit_sigmas, shift_sigma, shifted_sigmas
from miles_wan.flow.steps import STRATEGIES, select_steps, step_range
from miles_wan.flow.timesteps import draw_timesteps, high_noise_share
from miles_wan.flow.transitions import KINDS, Transition, masked_mean, step_std, transition

__all__ = [
    "KINDS",
    "STRATEGIES",
    "Transition",
    "draw_timesteps",
    "explicit_sigmas",
    "high_noise_share",
    "masked_mean",
    "select_steps",
    "shift_sigma",
    "shifted_sigmas",
    "step_range",
    "step_std",
    "transition",
]
