"""On Gaussian data, whose exact velocity is known: which transitions keep the marginals of the flow as steps shrink.

Mean and variance are propagated exactly (every transition is affine in the state there), so nothing is estimated.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

_SPEC = importlib.util.spec_from_file_location(
    "marginals", Path(__file__).resolve().parents[2] / "benchmarks" / "marginals.py"
)
assert _SPEC is not None
assert _SPEC.loader is not None
marginals = importlib.util.module_from_spec(_SPEC)
sys.modules["marginals"] = marginals
_SPEC.loader.exec_module(marginals)

DATA = marginals.GaussianData(mean=0.8, std=0.5)
COUNTS = (50, 100, 200, 400)
ETA = 0.7


def final_biases(kind: str, *, noise_level: float = ETA, **grid) -> list[float]:
    return [marginals.final_bias(kind, n, noise_level=noise_level, data=DATA, **grid) for n in COUNTS]


def slopes(biases: list[float]) -> list[float]:
    """Orders p of a bias N^-p, from each doubling of N."""
    return [math.log2(abs(coarse / fine)) for coarse, fine in pairwise(biases)]


@pytest.mark.parametrize("sigma", [1.0, 0.7, 0.2, 0.0])
def test_the_velocity_is_the_conditional_mean_of_noise_minus_data(sigma):
    # (x, e - x0) = A (x0, e) with x0 ~ N(m, c^2), e ~ N(0, 1): jointly Gaussian, so
    # E[e - x0 | x] = E[e - x0] + Cov(e - x0, x) / Var(x) (x - E[x]).
    a = torch.tensor([[1 - sigma, sigma], [-1.0, 1.0]], dtype=torch.float64)
    means = a @ torch.tensor([DATA.mean, 0.0], dtype=torch.float64)
    covariance = a @ torch.diag(torch.tensor([DATA.std**2, 1.0], dtype=torch.float64)) @ a.T
    x = torch.linspace(-3, 3, 7, dtype=torch.float64)
    expected = means[1] + covariance[1, 0] / covariance[0, 0] * (x - means[0])
    s = torch.tensor(sigma, dtype=torch.float64)
    torch.testing.assert_close(DATA.velocity(x, s), expected)
    torch.testing.assert_close(torch.stack(DATA.marginal(s)), torch.stack([means[0], covariance[0, 0]]))


@pytest.mark.parametrize("kind", ["ode", "dance_sde", "flow_sde", "flow_grpo_wan", "cps"])
@pytest.mark.parametrize("shift", [1.0, 5.0])
def test_every_law_keeps_the_mean_of_gaussian_data_exactly(kind, shift):
    sigmas = marginals.grid(50, shift=shift)
    means, _ = marginals.propagate(kind, sigmas, noise_level=ETA, data=DATA)
    torch.testing.assert_close(means, (1 - sigmas) * DATA.mean, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["ode", "dance_sde", "flow_grpo_wan"])
@pytest.mark.parametrize("shift", [1.0, 5.0])
def test_the_variance_is_kept_with_a_bias_of_order_one_over_n(kind, shift):
    biases = final_biases(kind, shift=shift)
    assert slopes(biases) == pytest.approx([1, 1, 1], abs=0.1)
    assert abs(biases[-1]) < 0.025


@pytest.mark.parametrize("noise_level", [0.3, 1.0])
def test_dance_sde_keeps_it_at_other_noise_levels(noise_level):
    assert slopes(final_biases("dance_sde", noise_level=noise_level)) == pytest.approx([1, 1, 1], abs=0.15)


def test_dance_sde_keeps_the_variance_all_along_the_way():
    worst = [
        float(marginals.variance_bias("dance_sde", marginals.grid(n), noise_level=ETA, data=DATA).abs().max())
        for n in COUNTS
    ]
    assert slopes(worst) == pytest.approx([1, 1, 1], abs=0.1)


@pytest.mark.parametrize("noise_level", [0.3, 0.7, 1.0])
def test_the_rule_of_flow_sde_at_sigma_one_adds_a_quarter_of_eta_to_the_fourth(noise_level):
    # Step 1: g^2 (-d) = eta^2 at any N, so variance (1 - eta^2 / 2)^2 + eta^2 = 1 + eta^4 / 4, apart from O(1/N).
    after_step_one = [
        float(marginals.variance_bias("flow_sde", marginals.grid(n)[:3], noise_level=noise_level, data=DATA)[1])
        for n in (100, 400, 1600)
    ]
    gaps = [abs(bias - noise_level**4 / 4) for bias in after_step_one]
    assert gaps[2] < 0.03 * noise_level**4 / 4
    assert gaps[0] / gaps[1] == pytest.approx(4, rel=0.1)
    assert gaps[1] / gaps[2] == pytest.approx(4, rel=0.1)


def test_that_bias_decays_along_the_rollout_and_with_more_steps():
    halfway = []
    for n in (50, 200, 800):
        bias = marginals.variance_bias("flow_sde", marginals.grid(n), noise_level=ETA, data=DATA)
        # Step 2 still has g^2 (-d) of about eta^2; from there on the excess only falls.
        assert bool((bias[2 : n // 2].diff() < 0).all())
        halfway.append(float(bias[n // 2]))
    assert halfway[0] > 1.8 * halfway[1] > 1.8**2 * halfway[2] > 0
    assert abs(marginals.final_bias("flow_sde", 400, noise_level=ETA, data=DATA)) < 0.1 * ETA**4 / 4


@pytest.mark.parametrize("first", [0.9, 0.5])
def test_apart_from_that_rule_flow_sde_keeps_the_variance_to_order_one_over_n(first):
    assert slopes(final_biases("flow_sde", first=first)) == pytest.approx([1, 1, 1], abs=0.1)


@pytest.mark.parametrize("noise_level", [0.3, 0.7, 1.0])
def test_cps_does_not_converge_to_the_marginals(noise_level):
    # Each step replaces the share sin^2 of the noise, however small it is. In the limit of many steps the variance is
    # the fixed point of one such replacement as sigma -> 0: c^2 (1 + cos(eta pi / 2)) / 2.
    limit = -(1 - math.cos(noise_level * math.pi / 2)) / 2
    few, many = (marginals.final_bias("cps", n, noise_level=noise_level, data=DATA) for n in (50, 800))
    assert few < many < limit
    assert many == pytest.approx(limit, abs=0.01)
