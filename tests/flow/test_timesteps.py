"""Timesteps are drawn, shifted, then routed by the inference rule; how many have high noise follows in closed form."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats

from miles_wan.flow import draw_timesteps, high_noise_share
from miles_wan.wan.experts import Experts

DRAWS = 10_000
# Percent of uniform draws at or above 875 after the shift: 1 - s / (shift - (shift - 1) s), s = 0.875.
KNOWN = {1: 12.5, 3: 30.0, 5: 41.7, 8: 53.3, 12: 63.2}
SHIFTS = (1, 3, 5, 8, 12)
BOUNDARIES = (0.875, 0.9)  # T2V-A14B, I2V-A14B


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def experts(boundary: float) -> Experts:
    return Experts(("transformer", "transformer_2"), boundary)


@pytest.mark.parametrize("boundary", BOUNDARIES)
@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("law", ["uniform", "logit_normal"])
def test_the_share_of_high_noise_is_the_closed_form(law: str, shift: float, boundary: float) -> None:
    timesteps = draw_timesteps(DRAWS, law=law, shift=shift, generator=seeded())
    names = [experts(boundary).of(float(timestep)) for timestep in timesteps]
    # the inference rule, written out: no exception among 10k draws
    assert names == ["transformer" if int(t) >= boundary * 1000 else "transformer_2" for t in timesteps.tolist()]
    share = names.count("transformer") / DRAWS
    base = boundary / (shift - (shift - 1) * boundary)
    expected = 1 - base if law == "uniform" else float(stats.norm.sf(math.log(base / (1 - base))))
    assert high_noise_share(boundary * 1000, law=law, shift=shift) == pytest.approx(expected, rel=1e-12)
    assert abs(share - expected) < 4 * math.sqrt(expected * (1 - expected) / DRAWS)


@pytest.mark.parametrize("shift", SHIFTS)
def test_the_shares_are_those_of_the_papers_table(shift: int) -> None:
    assert 100 * high_noise_share(875.0, shift=shift) == pytest.approx(KNOWN[shift], abs=0.05)


@pytest.mark.parametrize(("law", "distribution"), [("uniform", stats.uniform()), ("logit_normal", None)])
def test_draws_follow_their_law_before_the_shift(law: str, distribution: object) -> None:
    base = (draw_timesteps(DRAWS, law=law, mean=0.3, std=0.8, generator=seeded(1)) / 1000).double()
    if distribution is None:
        base, distribution = torch.logit(base), stats.norm(0.3, 0.8)
    assert stats.kstest(base.numpy(), distribution.cdf).pvalue > 0.01


@pytest.mark.parametrize("boundary", BOUNDARIES)
@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_a_given_share_replaces_the_natural_one_and_keeps_the_law_on_either_side(share: float, boundary: float) -> None:
    edge = experts(boundary).ranges()["transformer"][0]
    timesteps = draw_timesteps(DRAWS, shift=5.0, cut=edge, high_share=share, generator=seeded(2))
    high = torch.tensor([experts(boundary).of(float(timestep)) == "transformer" for timestep in timesteps])
    found = float(high.double().mean())
    assert abs(found - share) <= 4 * math.sqrt(share * (1 - share) / DRAWS)
    # on either side u is uniform between its ends; w(u) = s at u = s / (shift - (shift - 1) s)
    sigma = (timesteps / 1000).double()
    base = sigma / (5 - 4 * sigma)
    cut = edge / 1000 / (5 - 4 * edge / 1000)
    for side, low, size in ((high, cut, 1 - cut), (~high, 0.0, cut)):
        if side.any():
            assert stats.kstest(base[side].numpy(), stats.uniform(low, size).cdf).pvalue > 0.01


def test_one_sided_draws_never_cross_the_edge_by_rounding() -> None:
    # a cut whose quantile rounds, and a law that puts nearly everything at it
    for shift in (1.0, 3.0, 12.0):
        base = 0.875 / (shift - (shift - 1) * 0.875)
        law = {"law": "logit_normal", "mean": math.log(base / (1 - base)), "std": 1e-9, "shift": shift}
        for share, name in ((1.0, "transformer"), (0.0, "transformer_2")):
            timesteps = draw_timesteps(2000, cut=875.0, high_share=share, generator=seeded(3), **law)
            assert {experts(0.875).of(float(timestep)) for timestep in timesteps} == {name}


def test_draws_that_make_no_sense_are_refused_with_every_fault() -> None:
    with pytest.raises(ValueError, match=r"shift is 0; .*std is -1; .*high_share is 2; .*needs the timestep"):
        draw_timesteps(1, shift=0, std=-1, high_share=2)
