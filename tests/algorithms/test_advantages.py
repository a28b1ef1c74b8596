"""Advantages follow their formula, with every option; groups that teach nothing give exactly 0 and are counted."""

from __future__ import annotations

import itertools
import statistics

import pytest
import torch

from miles_wan.algorithms import count_equal_groups, group_advantages


def test_a_group_is_centred_and_divided_by_its_own_std():
    rewards, groups = torch.tensor([1.0, 2.0, 3.0, 10.0, 30.0]), torch.tensor([7, 7, 7, 2, 2])
    expected = torch.tensor([-1.0, 0.0, 1.0, 0.0, 0.0]) / ((2 / 3) ** 0.5 + 1e-4)
    expected[3:] = torch.tensor([-10.0, 10.0]) / (10 + 1e-4)
    torch.testing.assert_close(group_advantages(rewards, groups), expected)


def test_none_only_centres():
    rewards, groups = torch.tensor([1.0, 2.0, 3.0, 10.0, 30.0]), torch.tensor([0, 0, 0, 1, 1])
    torch.testing.assert_close(
        group_advantages(rewards, groups, normalize="none"), torch.tensor([-1.0, 0.0, 1.0, -10.0, 10.0])
    )


def test_every_option_of_the_denominator_is_its_formula():
    rewards, groups = torch.tensor([1.0, 2.0, 6.0, 10.0, 10.2], dtype=torch.float64), torch.tensor([0, 0, 0, 1, 1])
    centred = torch.tensor([-2.0, -1.0, 3.0, -0.1, 0.1], dtype=torch.float64)
    for normalize, ddof, eps, floor in itertools.product(("group_std", "global_std"), (0, 1), (0.0, 0.5), (0.0, 1.0)):
        everything = statistics.stdev(rewards.tolist()) if ddof else statistics.pstdev(rewards.tolist())
        own = [(14 / (3 - ddof)) ** 0.5] * 3 + [(0.02 / (2 - ddof)) ** 0.5] * 2
        stds = own if normalize == "group_std" else [everything] * 5
        expected = centred / torch.tensor([max(value, floor) + eps for value in stds], dtype=torch.float64)
        advantages = group_advantages(rewards, groups, normalize=normalize, ddof=ddof, eps=eps, floor=floor)
        torch.testing.assert_close(advantages, expected, rtol=1e-12, atol=0)


def test_half_precision_rewards_are_normalised_in_float32():
    rewards, groups = torch.tensor([1.0, 2.0, 4.0], dtype=torch.bfloat16), torch.zeros(3)
    advantages = group_advantages(rewards, groups)
    assert advantages.dtype == torch.float32
    torch.testing.assert_close(advantages, group_advantages(rewards.float(), groups), rtol=0, atol=0)


# 0.1 seven times: its float mean is not 0.1, so that centring leaves dust that a tiny std would blow up.
@pytest.mark.parametrize("normalize", ["group_std", "global_std", "none"])
@pytest.mark.parametrize("ddof", [0, 1])
def test_equal_groups_are_zero_never_nan_and_counted(normalize, ddof):
    rewards = torch.tensor([0.1] * 7 + [0.2, 0.4] + [5.0])
    groups = torch.tensor([0] * 7 + [1, 1] + [2])
    advantages = group_advantages(rewards, groups, normalize=normalize, ddof=ddof, eps=1e-12)
    assert torch.equal(advantages[:7], torch.zeros(7))
    assert advantages[9] == 0
    assert bool(torch.isfinite(advantages).all())
    assert bool((advantages[7:9] != 0).all())
    assert count_equal_groups(rewards, groups) == 2  # the seven equal ones, and the group of one


def test_all_rewards_equal_gives_zero_in_every_mode():
    for normalize in ("group_std", "global_std", "none"):
        advantages = group_advantages(
            torch.full((6,), 0.3), torch.tensor([0, 0, 0, 1, 1, 1]), normalize=normalize, eps=0.0
        )
        assert torch.equal(advantages, torch.zeros(6))


def test_advantages_are_clipped():
    rewards, groups = torch.tensor([0.0] * 99 + [1.0]), torch.zeros(100, dtype=torch.long)
    unclipped = group_advantages(rewards, groups)
    assert float(unclipped.max()) > 5
    torch.testing.assert_close(group_advantages(rewards, groups, clip=5.0), unclipped.clamp(-5, 5))
    assert float(group_advantages(-rewards, groups, clip=5.0).min()) == -5


def test_order_of_the_samples_does_not_matter():
    generator = torch.Generator().manual_seed(0)
    rewards, groups = torch.rand(24, generator=generator, dtype=torch.float64), torch.arange(24) % 4
    order = torch.randperm(24, generator=generator)
    torch.testing.assert_close(
        group_advantages(rewards[order], groups[order]), group_advantages(rewards, groups)[order]
    )


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_rewards_that_are_not_finite_are_refused_with_their_place(bad):
    with pytest.raises(ValueError, match=r"\[2\] are not finite"):
        group_advantages(torch.tensor([1.0, 2.0, bad]), torch.tensor([0, 0, 0]))


def test_unknown_modes_and_unequal_shapes_are_refused():
    with pytest.raises(ValueError, match="unknown normalization 'std'; known"):
        group_advantages(torch.ones(2), torch.zeros(2), normalize="std")
    with pytest.raises(ValueError, match="equal vectors"):
        group_advantages(torch.ones(2), torch.zeros(3))
