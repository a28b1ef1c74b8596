"""What the scores of a rollout say: advantages of whole groups, the selection, and how items are dealt to ranks."""

from __future__ import annotations

import math
from statistics import fmean, pstdev, stdev
from typing import Any

import pytest

from miles_wan.cluster.pools import deal
from miles_wan.cluster.signal import train_signal
from miles_wan.config import Config
from miles_wan.records import Score, TrainItem

GROUPS = [0] * 4 + [1] * 4 + [2] * 4
REWARDS = [0.1, 0.4, 0.2, 0.9, 0.50, 0.51, 0.52, 0.50, 0.3, 0.3, 0.3, 0.3]
OTHER = [5.0, -3.0, 0.0, 2.0, 1.0, 2.0, 4.0, 3.0, 7.0, 7.0, 7.0, 8.0]


def config(*, functions: Any = None, **algorithm: Any) -> Config:
    tree: dict[str, Any] = {"model": {"path": "m"}, "data": {"train": "t"}, "algorithm": algorithm}
    if functions is not None:
        tree["reward"] = {"functions": functions}
    return Config.model_validate(tree)


def scores(rewards: list[float] = REWARDS) -> list[Score]:
    return [Score(reward, {"pickscore": reward}) for reward in rewards]


def test_advantages_are_those_of_the_group():
    signal = train_signal(config(), scores(), GROUPS)
    own = REWARDS[:4]
    expected = [(reward - fmean(own)) / (pstdev(own) + 1e-4) for reward in own]
    assert signal.advantages[:4] == pytest.approx(expected)
    assert signal.advantages[8:] == [0, 0, 0, 0]
    assert signal.metrics == {"rollout/equal_groups": 1}
    assert all(signal.kept)


def test_the_options_of_the_std_reach_the_formula():
    signal = train_signal(config(advantage_ddof=1, advantage_eps=0.0, advantage_floor=0.1), scores(), GROUPS)
    own, narrow = REWARDS[:4], REWARDS[4:8]
    assert stdev(narrow) < 0.1
    assert signal.advantages[:4] == pytest.approx([(reward - fmean(own)) / stdev(own) for reward in own])
    assert signal.advantages[4:8] == pytest.approx([(reward - fmean(narrow)) / 0.1 for reward in narrow])


def test_dr_grpo_does_not_divide():
    signal = train_signal(config(advantage_std="none"), scores(), GROUPS)
    assert signal.advantages[:4] == pytest.approx([reward - fmean(REWARDS[:4]) for reward in REWARDS[:4]])


def test_gdpo_takes_every_trained_reward_by_itself():
    functions = [{"name": "pickscore", "weight": 2.0}, {"name": "a:b", "weight": 0.5}, {"name": "c:d", "weight": 0.0}]
    both = [Score(2 * a + 0.5 * b, {"pickscore": a, "a:b": b}) for a, b in zip(REWARDS, OTHER, strict=True)]
    signal = train_signal(config(functions=functions, combine_rewards="gdpo"), both, GROUPS)

    def normalised(values: list[float]) -> list[float]:
        parts = []
        for start in (0, 4, 8):
            own = values[start : start + 4]
            parts += [(value - fmean(own)) / max(pstdev(own), 1e-6) for value in own]
        return parts

    total = [2 * a + 0.5 * b for a, b in zip(normalised(REWARDS), normalised(OTHER), strict=True)]
    assert signal.advantages == pytest.approx([value / pstdev(total) for value in total])


def test_best_and_worst_are_trained_with_the_advantages_of_the_whole_group():
    whole = train_signal(config(), scores(), GROUPS)
    signal = train_signal(config(best_of_n=1), scores(), GROUPS)
    assert signal.advantages == whole.advantages
    assert [place for place, kept in enumerate(signal.kept) if kept] == [0, 3, 4, 6, 8, 11]
    assert signal.metrics["rollout/left_out_samples"] == 6


def test_groups_of_little_spread_are_left_out_and_counted():
    signal = train_signal(config(min_group_std=0.05), scores(), GROUPS)
    assert list(signal.kept) == [True] * 4 + [False] * 8
    assert signal.metrics["rollout/narrow_groups"] == 2
    assert signal.metrics["rollout/left_out_samples"] == 8


def items(count: int) -> list[TrainItem]:
    return [TrainItem(f"trajectory{n}", None, float(n), f"r{n}", 0) for n in range(count)]


@pytest.mark.parametrize(("count", "steps", "ranks"), [(12, 2, 3), (12, 1, 2), (8, 4, 2)])
def test_items_that_divide_are_dealt_once_each(count, steps, ranks):
    dealt = deal(items(count), steps=steps, ranks=ranks)
    in_order = [item for step in range(steps) for rank in range(ranks) for item in dealt[rank][step]]
    assert in_order == items(count)


@pytest.mark.parametrize(("count", "steps", "ranks"), [(7, 2, 3), (5, 1, 4), (3, 3, 2), (1, 1, 4), (11, 2, 2)])
def test_items_that_do_not_divide_keep_the_mean_of_their_step(count, steps, ranks):
    dealt = deal(items(count), steps=steps, ranks=ranks)
    seen: list[str] = []
    for step in range(steps):
        shares = [dealt[rank][step] for rank in range(ranks)]
        assert len({len(share) for share in shares}) == 1
        own = [item for share in shares for item in share]
        real = [item for item in own if item.weight > 0]
        seen += [item.record_id for item in real]
        mean = sum(item.weight * item.advantage for item in own) / len(own)
        assert math.isclose(mean, fmean(item.advantage for item in real))
    assert seen == [item.record_id for item in items(count)]
