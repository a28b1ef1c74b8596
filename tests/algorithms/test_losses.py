"""The clipped policy loss and the KL are those of Flow-GRPO, values and gradients."""

from __future__ import annotations

import math

import pytest
import torch
from golden_data import cases, tensor

from miles_wan.algorithms import clipped_policy_loss, gaussian_kl


@pytest.mark.parametrize("case", cases("loss_grpo"), ids=lambda case: case["id"])
def test_policy_loss_is_that_of_flow_grpo(case):
    inputs, expected = case["inputs"], case["expected"]
    log_prob = tensor(inputs["log_prob_new"]).requires_grad_()
    policy = clipped_policy_loss(
        log_prob,
        tensor(inputs["log_prob_old"]),
        tensor(inputs["advantages"]),
        clip_low=inputs["clip_range"],
        clip_high=inputs["clip_range"],
        adv_clip=inputs["adv_clip_max"],
    )
    policy.loss.backward()
    torch.testing.assert_close(policy.loss.detach(), tensor(expected["policy_loss"]), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(policy.ratio, tensor(expected["ratio"]), rtol=1e-6, atol=0)
    torch.testing.assert_close(log_prob.grad, tensor(expected["grad_wrt_log_prob_new"]), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(policy.clip_fraction, tensor(expected["clipfrac"]))
    torch.testing.assert_close(policy.approx_kl, tensor(expected["approx_kl"]), rtol=1e-5, atol=1e-16)


def loss_at(
    difference: float, advantage: float, *, clip_low: float = 0.1, clip_high: float = 0.2
) -> tuple[float, float]:
    log_prob = torch.tensor([difference], requires_grad=True)
    policy = clipped_policy_loss(
        log_prob, torch.zeros(1), torch.tensor([advantage]), clip_low=clip_low, clip_high=clip_high, adv_clip=5.0
    )
    policy.loss.backward()
    return float(policy.loss.detach()), float(log_prob.grad)


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected_loss", "moves"),
    [
        (1.0, 2.0, -2.0, True),
        (1.5, 2.0, -2.0 * 1.2, False),  # better than before and already far: no further
        (0.5, 2.0, -2.0 * 0.5, True),  # a good sample that became unlikely is pulled back
        (0.5, -2.0, 2.0 * 0.9, False),
        (1.5, -2.0, 2.0 * 1.5, True),
        (1.0, 9.0, -5.0, True),  # the advantage is clamped
    ],
)
def test_the_ratio_is_clipped_only_where_the_update_would_go_on(ratio, advantage, expected_loss, moves):
    loss, gradient = loss_at(math.log(ratio), advantage)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert (gradient != 0) == moves


@pytest.mark.parametrize(
    "case", [c for c in cases("loss_kl") if c["inputs"]["variant"] == "wan2_1"], ids=lambda c: c["id"]
)
def test_kl_is_that_of_flow_grpos_wan_script(case):
    inputs, expected = case["inputs"], case["expected"]
    mean = tensor(inputs["prev_sample_mean"]).requires_grad_()
    std = torch.full((len(mean),), inputs["std_dev_t"] * inputs["sqrt_minus_dt"])
    kl = gaussian_kl(mean, tensor(inputs["prev_sample_mean_ref"]), std).mean()
    kl.backward()
    torch.testing.assert_close(kl.detach(), tensor(expected["kl_loss"]), rtol=1e-5, atol=0)
    torch.testing.assert_close(mean.grad, tensor(expected["grad_wrt_mean"]), rtol=1e-5, atol=1e-9)


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
