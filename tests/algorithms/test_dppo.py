"""Flow-DPPO drops a sample only when it is beyond the divergence and the update would take it further."""

from __future__ import annotations

import math

import pytest
import torch

from miles_wan.algorithms import PolicyLoss, dppo_loss


def dppo(
    ratio, advantages, *, shift, kl_threshold=0.02, std=0.5, mask=None, weight=None
) -> tuple[PolicyLoss, torch.Tensor]:
    """The loss of samples whose mean moved by ``shift`` in every element, and its gradient by log-prob."""
    log_prob = torch.tensor(ratio, dtype=torch.float64).log().requires_grad_()
    mean = torch.tensor(shift, dtype=torch.float64).reshape(-1, 1, 1).expand(-1, 2, 3)
    policy = dppo_loss(
        log_prob,
        torch.zeros(len(ratio)),
        torch.tensor(advantages),
        mean=mean,
        old_mean=torch.zeros_like(mean),
        std=torch.full((len(ratio),), std),
        kl_threshold=kl_threshold,
        mask=mask,
        weight=weight,
    )
    policy.loss.backward()
    return policy, log_prob.grad


@pytest.mark.parametrize(
    ("ratio", "advantage", "moves_on"),
    [(1.5, 2.0, True), (0.5, -2.0, True), (0.5, 2.0, False), (1.5, -2.0, False), (1.0, 2.0, False), (1.0, -2.0, False)],
)
@pytest.mark.parametrize("beyond", [True, False])
def test_a_sample_is_dropped_beyond_the_threshold_where_the_update_would_move_it_on(ratio, advantage, moves_on, beyond):
    shift = math.sqrt(2 * 0.5**2 * (0.03 if beyond else 0.01))  # KL = shift^2 / (2 std^2)
    policy, gradient = dppo([ratio], [advantage], shift=[shift])
    if beyond and moves_on:
        assert (float(policy.loss.detach()), float(gradient), float(policy.clip_fraction)) == (0.0, 0.0, 1.0)
    else:
        assert float(policy.loss.detach()) == pytest.approx(-advantage * ratio)
        assert float(gradient) == pytest.approx(-advantage * ratio)
        assert float(policy.clip_fraction) == 0.0


def test_dropped_samples_stay_in_the_denominator():
    policy, gradient = dppo([1.5, 1.5], [1.0, 1.0], shift=[1.0, 0.0])
    assert float(policy.loss.detach()) == pytest.approx(-0.75)
    assert gradient.tolist() == pytest.approx([0.0, -0.75])
    assert float(policy.clip_fraction) == 0.5


def test_a_ratio_that_overflows_beyond_the_threshold_leaves_no_trace():
    policy, gradient = dppo([math.inf, 1.0], [1.0, 1.0], shift=[9.0, 0.0])
    assert float(policy.loss.detach()) == pytest.approx(-0.5)
    assert bool(torch.isfinite(gradient[1]))


def test_only_sampled_elements_count_in_the_divergence():
    mask = torch.ones(1, 2, 3)
    mask[:, 0] = 0
    mean = torch.zeros(1, 2, 3)
    mean[:, 0] = 100.0
    arguments = {"mean": mean, "old_mean": torch.zeros(1, 2, 3), "std": torch.ones(1), "kl_threshold": 0.1}
    moved = (torch.tensor([0.1]), torch.zeros(1), torch.ones(1))
    assert float(dppo_loss(*moved, **arguments).clip_fraction) == 1.0
    assert float(dppo_loss(*moved, **arguments, mask=mask).clip_fraction) == 0.0


def test_a_weight_multiplies_its_own_sample():
    weight = torch.tensor([0.5, 1.5])
    policy, gradient = dppo([1.2, 0.7], [1.0, 3.0], shift=[0.0, 0.0], weight=weight)
    expected = torch.tensor([-0.5 * 1.2, -1.5 * 3.0 * 0.7], dtype=torch.float64) / 2
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=0)
    assert float(policy.loss.detach()) == pytest.approx(float(expected.sum()))


def test_the_divergence_carries_no_gradient():
    mean = torch.full((1, 2, 3), 0.05, requires_grad=True)
    log_prob = torch.zeros(1, requires_grad=True)
    policy = dppo_loss(
        log_prob,
        torch.zeros(1),
        torch.ones(1),
        mean=mean,
        old_mean=torch.zeros(1, 2, 3),
        std=torch.ones(1),
        kl_threshold=1.0,
    )
    policy.loss.backward()
    assert mean.grad is None
    assert log_prob.grad is not None
