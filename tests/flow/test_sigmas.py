"""The sigma grid is the engine's and diffusers', in closed form, and its timesteps are not rounded."""

from __future__ import annotations

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from golden_data import cases, tensor

from miles_wan.flow import shift_sigma, shifted_sigmas

# (flow shift, steps): released Wan2.2 models use shift 5 (ti2v, i2v) and 12 (t2v).
GRIDS = [(1.0, 4), (3.0, 10), (5.0, 6), (5.0, 40), (8.0, 16), (12.0, 40)]


@pytest.mark.parametrize("case", cases("sigma_grids"), ids=lambda case: case["id"])
def test_grid_is_the_engines_rollout_grid(case):
    sigmas = shifted_sigmas(case["inputs"]["num_steps"], case["inputs"]["flow_shift"])
    torch.testing.assert_close(sigmas, tensor(case["expected"]["rollout_sigmas"]), rtol=0, atol=2e-7)
    torch.testing.assert_close(sigmas[:-1] * 1000, tensor(case["expected"]["rollout_timesteps"]), rtol=0, atol=2e-4)


@pytest.mark.parametrize(("shift", "steps"), GRIDS)
def test_grid_is_that_of_diffusers(shift, steps):
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(steps)
    sigmas = shifted_sigmas(steps, shift)
    torch.testing.assert_close(sigmas, scheduler.sigmas, rtol=0, atol=2e-7)
    torch.testing.assert_close(sigmas[:-1] * 1000, scheduler.timesteps, rtol=0, atol=2e-4)


@pytest.mark.parametrize(("shift", "steps"), GRIDS)
def test_grid_is_the_closed_form_with_the_shift_twice_at_the_low_end(shift, steps):
    def shifted(base: float) -> float:
        return shift * base / (1 + (shift - 1) * base)

    lowest = shifted(0.001)
    base = [1 + (lowest - 1) * k / (steps - 1) for k in range(steps)]
    expected = [*(shifted(b) for b in base), 0.0]
    torch.testing.assert_close(shifted_sigmas(steps, shift), tensor(expected), rtol=0, atol=1e-7)


def test_grid_falls_from_one_to_zero_in_float32():
    sigmas = shifted_sigmas(16, 5.0)
    assert sigmas.dtype == torch.float32
    assert sigmas[0] == 1.0
    assert sigmas[-1] == 0.0
    assert bool((sigmas.diff() < 0).all())


def test_timesteps_are_floats_that_no_integer_holds():
    # Rounded to 858, step 3 of 10 at shift 3 would be another step: base (1 - 3 (1 - w(0.001)) / 9), shifted.
    base = 1 - 3 * (1 - 0.003 / 1.002) / 9
    timestep = float(shifted_sigmas(10, 3.0)[3] * 1000)
    assert timestep == pytest.approx(1000 * 3 * base / (1 + 2 * base), abs=1e-3)
    assert timestep == pytest.approx(857.69, abs=5e-3)


def test_shift_one_changes_nothing():
    base = torch.linspace(0, 1, 7)
    torch.testing.assert_close(shift_sigma(base, 1.0), base)


@pytest.mark.parametrize(("steps", "shift"), [(0, 5.0), (-1, 5.0), (4, 0.0), (4, -1.0)])
def test_impossible_grids_are_refused(steps, shift):
    with pytest.raises(ValueError, match=r"at least one step|above 0"):
        shifted_sigmas(steps, shift)
