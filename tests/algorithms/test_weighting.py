"""Weights follow the noise of the step and leave the mean update as it was."""

from __future__ import annotations

import pytest
import torch

from miles_wan.algorithms import noise_level_weights
from miles_wan.flow import shifted_sigmas


def test_weights_are_proportional_to_the_noise_and_one_in_the_mean():
    sigmas = shifted_sigmas(10, 3.0)
    s, n = sigmas[1:6], sigmas[2:7]
    std = 0.7 * torch.sqrt(s / (1 - s)) * torch.sqrt(s - n)
    weights = noise_level_weights(std)
    assert float(weights.mean()) == pytest.approx(1.0)
    torch.testing.assert_close(weights / weights[0], std / std[0])


def test_windows_of_different_records_are_weighted_over_the_whole_rollout():
    std = torch.tensor([[0.6, 0.4], [0.2, 0.4]])
    torch.testing.assert_close(noise_level_weights(std), torch.tensor([[1.5, 1.0], [0.5, 1.0]]))


def test_equal_steps_are_not_weighted():
    assert torch.equal(noise_level_weights(torch.full((4,), 0.25)), torch.ones(4))


def test_a_step_without_noise_is_refused():
    with pytest.raises(ValueError, match=r"std of a kept step must be above 0, got \[0.5, 0.0\]"):
        noise_level_weights(torch.tensor([0.5, 0.0]))
