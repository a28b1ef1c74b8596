"""GRPO-Guard centres the ratio, gives every step the same spread, and leaves out what was not sampled."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributions import Normal

from miles_wan.algorithms import PolicyLoss, guard_loss

SHAPE = (3, 2, 4, 2, 2)  # B, C, F, h, w
STD, D = torch.tensor([0.1, 0.3, 0.9]), torch.tensor([-0.04, -0.1, -0.2])


def guard(log_prob, old_log_prob, advantages, *, mean, old_mean, std=STD, d=D, clip=10.0, mask=None) -> PolicyLoss:
    return guard_loss(
        log_prob,
        old_log_prob,
        advantages,
        mean=mean,
        old_mean=old_mean,
        std=std,
        d=d,
        clip_low=clip,
        clip_high=clip,
        adv_clip=math.inf,
        mask=mask,
    )


def density(mean, std, y):
    return Normal(mean, std.reshape(-1, 1, 1, 1, 1)).log_prob(y).flatten(1).mean(1)


def moved_policy(shift: float, *, samples: int = 4000):
    """One step of std .1 and one of .9 whose mean moved by ``shift`` std, with their samples of the old policy: [2 n]."""
    generator = torch.Generator().manual_seed(0)
    std = torch.tensor([0.1] * samples + [0.9] * samples, dtype=torch.float64)
    old_mean = torch.zeros(2 * samples, 2, 1, 2, 2, dtype=torch.float64)
    wide = std.reshape(-1, 1, 1, 1, 1)
    y = wide * torch.randn(old_mean.shape, generator=generator, dtype=torch.float64)
    return old_mean + shift * wide, old_mean, std, y


def test_the_ratio_stays_centred_although_the_plain_one_drifts_below_one():
    mean, old_mean, std, y = moved_policy(1.0)
    new, old = density(mean, std, y), density(old_mean, std, y)
    policy = guard(new, old, torch.ones_like(std), mean=mean, old_mean=old_mean, std=std, d=-(std**2))
    standard_error = float((policy.ratio.log() / std).std() / len(std) ** 0.5)
    assert abs(float((policy.ratio.log() / std).mean())) < 4 * standard_error
    assert float((new - old).mean()) == pytest.approx(-0.5, abs=4 * standard_error)  # the KL of one std


def test_a_step_of_the_mean_gives_a_spread_that_does_not_depend_on_the_noise_of_the_step():
    """new - old + b = (mean - old_mean)(y - old_mean) / std^2: times std, its spread is that of the move itself."""
    generator = torch.Generator().manual_seed(0)
    _, old_mean, std, y = moved_policy(0.0)
    mean = old_mean + 0.05 * torch.ones_like(old_mean) * (1 + torch.rand(1, generator=generator))
    new, old = density(mean, std, y), density(old_mean, std, y)
    log_ratio = guard(new, old, torch.ones_like(std), mean=mean, old_mean=old_mean, std=std, d=-(std**2)).ratio.log()
    quiet, loud = log_ratio[: len(std) // 2].std(), log_ratio[len(std) // 2 :].std()
    assert float(quiet / loud) == pytest.approx(1.0, rel=0.05)
    plain = (new - old)[: len(std) // 2].std() / (new - old)[len(std) // 2 :].std()
    assert float(plain) == pytest.approx(9.0, rel=0.05)


def test_at_the_old_policy_it_is_the_plain_objective_weighted_by_std_over_minus_d():
    generator = torch.Generator().manual_seed(2)
    mean = torch.randn(SHAPE, generator=generator, dtype=torch.float64).requires_grad_()
    y = mean.detach() + torch.randn(SHAPE, generator=generator, dtype=torch.float64)
    advantages = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    log_prob = density(mean, STD, y)
    policy = guard(log_prob, log_prob.detach(), advantages, mean=mean, old_mean=mean.detach())
    (actual,) = torch.autograd.grad(policy.loss, mean, retain_graph=True)
    (expected,) = torch.autograd.grad(-(advantages * STD / -D * log_prob).mean(), mean)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(policy.ratio, torch.ones(3, dtype=torch.float64))


def test_a_sample_does_not_feel_the_others_of_its_micro_batch():
    generator = torch.Generator().manual_seed(3)
    mean, old_mean = torch.randn(SHAPE, generator=generator), torch.randn(SHAPE, generator=generator)
    new, old, advantages = (torch.randn(3, generator=generator) for _ in range(3))
    together = guard(new, old, advantages, mean=mean, old_mean=old_mean)
    for i in range(3):
        own = slice(i, i + 1)
        alone = guard(
            new[own], old[own], advantages[own], mean=mean[own], old_mean=old_mean[own], std=STD[own], d=D[own]
        )
        torch.testing.assert_close(alone.ratio[0], together.ratio[i])


def test_a_given_first_frame_is_outside_the_bias_even_if_it_is_not_a_number():
    generator = torch.Generator().manual_seed(4)
    mean = torch.randn(SHAPE, generator=generator)
    old_mean = mean + 0.1 * torch.randn(SHAPE, generator=generator)
    new, old, advantages = torch.tensor([0.1, -0.2, 0.3]), torch.zeros(3), torch.ones(3)
    mask = torch.ones(3, 1, 4, 2, 2)
    mask[:, :, 0] = 0
    expected = guard(new, old, advantages, mean=mean[:, :, 1:], old_mean=old_mean[:, :, 1:])
    mean[:, :, 0] = torch.nan
    mean.requires_grad_()
    policy = guard(new, old, advantages, mean=mean, old_mean=old_mean, mask=mask)
    torch.testing.assert_close(policy.ratio, expected.ratio)
    policy.loss.backward()
    assert torch.equal(mean.grad[:, :, 0], torch.zeros_like(mean.grad[:, :, 0]))
    assert bool((mean.grad[:, :, 1:] != 0).all())


def test_a_step_in_the_wrong_direction_is_refused():
    with pytest.raises(ValueError, match=r"d is sigma_next - sigma and must be below 0"):
        guard(torch.ones(3), torch.ones(3), torch.ones(3), mean=torch.ones(SHAPE), old_mean=torch.ones(SHAPE), d=-D)
