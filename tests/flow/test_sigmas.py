"""The sigma grid is the engine's and diffusers', in closed form, and its timesteps are not rounded."""

from __future__ import annotations

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from golden_data import cases, tensor

from miles_wan.flow import explicit_sigmas, shift_sigma, shifted_sigmas

# (flow shift, steps): released Wan2.2 models use shift 5 (ti2v, i2v) and 12 (t2v).
GRIDS = [(1.0, 4), (3.0, 10), (5.0, 6), (5.0, 40), (8.0, 16), (12.0, 40)]


def relative_error(actual, values):
    expected = torch.tensor(values, dtype=actual.dtype)
    return float((actual - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("case", cases("sigma_grids"), ids=lambda case: case["id"])
def test_grid_is_the_engines_rollout_grid(case, dtype):
    sigmas = shifted_sigmas(case["inputs"]["num_steps"], case["inputs"]["flow_shift"]).to(dtype)
    assert relative_error(sigmas, case["expected"]["rollout_sigmas"]) <= 1e-6
    assert relative_error(sigmas[:-1] * 1000, case["expected"]["rollout_timesteps"]) <= 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("case", cases("sigma_grids"), ids=lambda case: case["id"])
def test_the_engines_serving_grid_is_another_one_and_can_be_given_explicitly(case, dtype):
    shift, steps = case["inputs"]["flow_shift"], case["inputs"]["num_steps"]
    served, timesteps = case["expected"]["serving_unipc_sigmas"], case["expected"]["serving_unipc_timesteps"]
    first = shift_sigma(torch.tensor(0.999, dtype=dtype), shift)
    base = torch.linspace(float(first), 0, steps + 1, dtype=dtype)
    assert relative_error(shift_sigma(base, shift), served) <= 1e-5
    grid = explicit_sigmas(served)
    assert torch.equal(grid, torch.tensor(served))
    # Its timesteps are cut to integers, which is why the two grids are never mixed.
    assert (grid[:-1].double() * 1000).floor().tolist() == timesteps


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


def test_explicit_sigmas_are_taken_as_they_are():
    grid = explicit_sigmas([1, 0.75, 0.1, 0])
    assert grid.dtype == torch.float32
    assert torch.equal(grid, torch.tensor([1.0, 0.75, 0.1, 0.0]))
    assert torch.equal(explicit_sigmas(shifted_sigmas(10, 5.0).tolist()), shifted_sigmas(10, 5.0))


@pytest.mark.parametrize(
    ("sigmas", "message"),
    [
        ([], "at least a first sigma"),
        ([0.0], r"at least a first sigma.*not in \[0.99, 1\]"),
        ([1.0, 0.5], "append the terminal 0"),
        ([1000.0, 500.0, 0.0], r"starts at 1000.0, not in \[0.99, 1\]"),
        ([0.5, 0.2, 0.0], "pure noise"),
        ([1.0, 0.5, 0.5, 0.6, 0.0], r"does not fall .* \[1, 2\]"),
        ([1.0, 0.5, 0.5 - 1e-12, 0.0], r"in float32.* \[1\]"),
        ([1.0, float("nan"), 0.0], r"does not fall .* \[0, 1\]"),
        ([0.5, 0.7], "starts at 0.5.*ends at 0.7.*does not fall"),
    ],
)
def test_a_list_that_is_no_grid_is_refused_with_every_fault(sigmas, message):
    with pytest.raises(ValueError, match=message):
        explicit_sigmas(sigmas)


def test_a_step_that_float32_cannot_tell_from_none_is_refused():
    with pytest.raises(ValueError, match=r"it falls by less than 1e-05 after the entries \[0\]"):
        explicit_sigmas([1.0, 0.99999994, 0.6, 0.0])
