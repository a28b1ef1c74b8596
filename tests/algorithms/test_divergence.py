"""The closed-form divergence is the true one, over sampled elements only."""

from __future__ import annotations

import torch

from miles_wan.algorithms import gaussian_kl


def test_kl_is_the_gaussian_divergence_of_every_sample():
    mean, reference, std = torch.randn(3, 2, 4, 2, 2), torch.randn(3, 2, 4, 2, 2), torch.tensor([0.3, 0.7, 1.1])
    wide = std.reshape(-1, 1, 1, 1, 1)
    expected = torch.distributions.kl_divergence(
        torch.distributions.Normal(mean, wide), torch.distributions.Normal(reference, wide)
    )
    torch.testing.assert_close(gaussian_kl(mean, reference, std), expected.flatten(1).mean(1))


def test_a_given_first_frame_is_outside_the_kl():
    mean, reference = torch.randn(2, 3, 4, 2, 2).requires_grad_(), torch.randn(2, 3, 4, 2, 2)
    mask = torch.ones(2, 1, 4, 2, 2)
    mask[:, :, 0] = 0
    std = torch.full((2,), 0.5)
    kl = gaussian_kl(mean, reference, std, mask=mask)
    torch.testing.assert_close(kl, gaussian_kl(mean[:, :, 1:], reference[:, :, 1:], std))
    kl.sum().backward()
    assert torch.equal(mean.grad[:, :, 0], torch.zeros_like(mean.grad[:, :, 0]))


def test_a_given_element_that_is_not_a_number_stays_outside():
    mean, reference = torch.randn(2, 3, 4, 2, 2), torch.randn(2, 3, 4, 2, 2)
    expected = gaussian_kl(mean[:, :, 1:], reference[:, :, 1:], torch.ones(2))
    mask = torch.ones(2, 1, 4, 2, 2)
    mask[:, :, 0] = 0
    mean[:, :, 0] = torch.nan
    mean.requires_grad_()
    kl = gaussian_kl(mean, reference, torch.ones(2), mask=mask)
    torch.testing.assert_close(kl.detach(), expected)
    kl.sum().backward()
    assert torch.equal(mean.grad[:, :, 0], torch.zeros_like(mean.grad[:, :, 0]))
