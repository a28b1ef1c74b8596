"""What is trained is chosen inside each group, in a fixed way, and what is dropped is counted."""

from __future__ import annotations

import pytest
import torch

from miles_wan.algorithms import best_of_n, count_equal_groups, spread_filter

REWARDS = torch.tensor([5.0, 1.0, 3.0, 2.0, 4.0, 50.0, 30.0, 40.0])
GROUPS = torch.tensor([7, 7, 7, 7, 7, 2, 2, 2])


def test_the_best_and_the_worst_of_every_group_are_kept():
    selection = best_of_n(REWARDS, GROUPS, k=1)
    assert selection.kept.tolist() == [0, 1, 5, 6]
    assert (selection.dropped_samples, selection.dropped_groups) == (4, 0)
    assert best_of_n(REWARDS, GROUPS, k=2).kept.tolist() == [0, 1, 3, 4, 5, 6, 7]


def test_a_group_of_at_most_twice_k_is_kept_whole():
    selection = best_of_n(REWARDS, GROUPS, k=3)
    assert selection.kept.tolist() == list(range(8))
    assert selection.dropped_samples == 0


def test_groups_may_be_interleaved_and_equal_rewards_are_told_apart_by_position():
    order = torch.tensor([3, 7, 0, 5, 1, 6, 4, 2])
    kept = best_of_n(REWARDS[order], GROUPS[order], k=1).kept
    assert sorted(order[kept].tolist()) == [0, 1, 5, 6]
    assert best_of_n(torch.ones(5), torch.zeros(5), k=1).kept.tolist() == [0, 4]


def test_keeping_the_extremes_raises_the_spread_of_a_group():
    rewards = torch.randn(64, generator=torch.Generator().manual_seed(0))
    groups = torch.arange(64) // 16
    kept = best_of_n(rewards, groups, k=4).kept
    assert len(kept) == 32
    for group in range(4):
        assert float(rewards[kept][groups[kept] == group].std()) > float(rewards[groups == group].std())


def test_groups_of_a_small_spread_are_dropped_whole_and_counted():
    rewards = torch.tensor([1.0, 3.0, 0.50, 0.52, 2.0, 2.0])  # std of the groups: 1, .01, 0
    groups = torch.tensor([0, 0, 1, 1, 4, 4])
    selection = spread_filter(rewards, groups, min_std=0.1)
    assert selection.kept.tolist() == [0, 1]
    assert (selection.dropped_samples, selection.dropped_groups) == (4, 2)
    assert spread_filter(rewards, groups, min_std=0.001).kept.tolist() == [0, 1, 2, 3]
    assert spread_filter(rewards, groups, min_std=2.0).dropped_groups == 3


def test_the_std_is_compared_with_its_own_divisor():
    rewards, groups = torch.tensor([1.0, 3.0]), torch.zeros(2)  # population std 1, sample std sqrt 2
    assert len(spread_filter(rewards, groups, min_std=1.2).kept) == 0
    assert len(spread_filter(rewards, groups, min_std=1.2, ddof=1).kept) == 2


def test_equal_rewards_are_dropped_whatever_dust_their_std_has():
    rewards, groups = torch.tensor([0.1] * 7 + [0.3]), torch.tensor([0] * 7 + [1])
    selection = spread_filter(rewards, groups, min_std=1e-30)
    assert len(selection.kept) == 0
    assert selection.dropped_groups == count_equal_groups(rewards, groups) == 2


def test_senseless_knobs_and_rewards_are_refused():
    with pytest.raises(ValueError, match="k must be at least 1, got 0"):
        best_of_n(REWARDS, GROUPS, k=0)
    with pytest.raises(ValueError, match="min_std must be above 0, got 0"):
        spread_filter(REWARDS, GROUPS, min_std=0.0)
    for select in (lambda r: best_of_n(r, GROUPS, k=1), lambda r: spread_filter(r, GROUPS, min_std=0.1)):
        with pytest.raises(ValueError, match=r"\[0\] are not finite"):
            select(torch.tensor([torch.nan, *REWARDS[1:].tolist()]))
        with pytest.raises(ValueError, match="equal vectors"):
            select(REWARDS[1:])
