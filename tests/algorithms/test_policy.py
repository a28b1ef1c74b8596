"""The clipped objective holds a ratio back only where the update would go on, and weights count samples."""

from __future__ import annotations

import math

import pytest
import torch

from miles_wan.algorithms import clipped_policy_loss


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


def test_the_two_clip_ranges_are_independent():
    assert loss_at(math.log(1.15), 1.0, clip_low=0.1, clip_high=0.2)[1] != 0
    assert loss_at(math.log(1.15), 1.0, clip_low=0.2, clip_high=0.1)[1] == 0
    assert loss_at(math.log(0.85), -1.0, clip_low=0.1, clip_high=0.2)[1] == 0
    assert loss_at(math.log(0.85), -1.0, clip_low=0.2, clip_high=0.1)[1] != 0


def test_statistics_count_what_is_outside_either_range():
    ratio = torch.tensor([0.85, 0.95, 1.15, 1.25], dtype=torch.float64)
    policy = clipped_policy_loss(
        ratio.log(), torch.zeros(4), torch.tensor([1.0, -1.0, 1.0, -1.0]), clip_low=0.1, clip_high=0.2, adv_clip=5.0
    )
    assert float(policy.clip_fraction) == 0.5
    torch.testing.assert_close(policy.ratio, ratio)
    torch.testing.assert_close(policy.approx_kl, (ratio.log() ** 2).mean() / 2)


def test_a_weight_multiplies_its_own_sample():
    generator = torch.Generator().manual_seed(1)
    log_prob = (0.2 * torch.randn(5, generator=generator)).requires_grad_()
    old, advantages, weight = torch.zeros(5), torch.randn(5, generator=generator), torch.rand(5, generator=generator)
    knobs = {"clip_low": 0.1, "clip_high": 0.1, "adv_clip": 5.0}
    weighted = clipped_policy_loss(log_prob, old, advantages, **knobs, weight=weight)
    (gradient,) = torch.autograd.grad(weighted.loss, log_prob)
    (plain,) = torch.autograd.grad(clipped_policy_loss(log_prob, old, advantages, **knobs).loss, log_prob)
    torch.testing.assert_close(gradient, weight * plain)
    single = [
        clipped_policy_loss(log_prob[i : i + 1], old[:1], advantages[i : i + 1], **knobs).loss.detach()
        for i in range(5)
    ]
    torch.testing.assert_close(weighted.loss.detach(), (weight * torch.stack(single)).mean())
