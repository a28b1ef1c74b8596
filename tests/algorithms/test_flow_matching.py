"""The loss of supervised training is the mean square distance from noise - clean, over what was sampled."""

from __future__ import annotations

import math

import pytest
import torch
from diffusers.training_utils import compute_loss_weighting_for_sd3

from miles_wan.algorithms import flow_matching_losses, noised, timestep_weights

SHAPE = (3, 4, 3, 2, 2)


def parts(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    clean, noise, velocity = (torch.randn(SHAPE, generator=generator, dtype=torch.float64).to(dtype) for _ in range(3))
    return clean, noise, velocity


def test_the_noised_state_and_its_velocity_are_on_one_line() -> None:
    clean, noise, _ = parts(torch.float64)
    sigma = torch.tensor([0.0, 0.3, 1.0], dtype=torch.float64)
    state = noised(clean, noise, sigma)
    assert torch.equal(state[0], clean[0])
    assert torch.equal(state[2], noise[2])
    # x_s = x0 + s v with v = e - x0
    assert torch.allclose(state[1], clean[1] + 0.3 * (noise[1] - clean[1]))
    assert torch.allclose(flow_matching_losses(noise - clean, clean, noise), torch.zeros(3, dtype=torch.float64))


def test_the_loss_is_a_mean_over_the_sampled_elements() -> None:
    clean, noise, velocity = parts()
    mask = torch.ones(3, 1, 3, 2, 2)
    mask[1, :, 0] = 0
    losses = flow_matching_losses(velocity, clean, noise, mask=mask)
    for row in range(3):
        start = 1 if row == 1 else 0
        error = (velocity[row, :, start:] - noise[row, :, start:] + clean[row, :, start:]) ** 2
        assert float(losses[row]) == pytest.approx(float(error.double().mean()), rel=1e-6)


def test_a_given_first_frame_moves_neither_loss_nor_gradient() -> None:
    clean, noise, velocity = parts()
    mask = torch.ones(3, 1, 3, 2, 2)
    mask[:, :, 0] = 0
    velocity.requires_grad_()
    losses = flow_matching_losses(velocity, clean, noise, mask=mask)
    losses.sum().backward()
    assert velocity.grad is not None
    assert torch.equal(velocity.grad[:, :, 0], torch.zeros_like(velocity.grad[:, :, 0]))
    assert bool((velocity.grad[:, :, 1:] != 0).all())
    spoiled = velocity.detach().clone()
    spoiled[:, :, 0] = float("nan")
    assert torch.equal(flow_matching_losses(spoiled, clean, noise, mask=mask), losses)


def test_half_precision_velocities_are_compared_in_float32() -> None:
    clean, noise, velocity = parts()
    losses = flow_matching_losses(velocity.bfloat16(), clean, noise)
    assert losses.dtype == torch.float32
    assert torch.allclose(losses, flow_matching_losses(velocity.bfloat16().float(), clean, noise))


def test_weights_are_those_of_the_library_and_have_mean_one() -> None:
    sigma = torch.linspace(0, 1, 1001)
    assert torch.equal(timestep_weights("none", sigma), torch.ones(1001))
    library = compute_loss_weighting_for_sd3("cosmap", sigma)
    assert torch.allclose(timestep_weights("cosmap", sigma), library, rtol=1e-5)
    assert float(torch.trapezoid(timestep_weights("cosmap", sigma), sigma)) == pytest.approx(1, abs=1e-5)
    assert float(timestep_weights("cosmap", torch.tensor([0.5]))) == pytest.approx(4 / math.pi)
    with pytest.raises(ValueError, match="known are none, cosmap"):
        timestep_weights("other", sigma)
