"""Several rewards become one signal before or after normalisation; the scale of one drowns the others only before."""

from __future__ import annotations

import pytest
import torch

from miles_wan.algorithms import gdpo_advantages, group_advantages, weighted_rewards

GROUPS = torch.tensor([3, 3, 3, 3, 8, 8, 8, 8])


def two_rewards(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(8, generator=generator, dtype=torch.float64).to(dtype) for name in ("clip", "motion")}


def test_sum_is_the_weighted_sum():
    rewards = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([10.0, 30.0])}
    assert weighted_rewards(rewards, {"b": 0.1, "a": 2.0}).tolist() == pytest.approx([3.0, 7.0])


def test_gdpo_of_one_reward_is_its_group_advantage_with_a_spread_of_one():
    clip = two_rewards()["clip"]
    single = group_advantages(clip, GROUPS, eps=0.0)
    advantages = gdpo_advantages({"clip": clip}, GROUPS, weights={"clip": 0.3})
    torch.testing.assert_close(advantages, single / single.std(correction=0))
    assert float(advantages.std(correction=0)) == pytest.approx(1.0)


def test_gdpo_does_not_depend_on_the_scale_of_a_reward_and_sum_does():
    rewards = two_rewards()
    scaled = {"clip": rewards["clip"], "motion": 1000 * rewards["motion"]}
    weights = {"clip": 1.0, "motion": 0.5}
    torch.testing.assert_close(
        gdpo_advantages(scaled, GROUPS, weights=weights), gdpo_advantages(rewards, GROUPS, weights=weights)
    )
    before = group_advantages(weighted_rewards(scaled, weights), GROUPS)
    motion_alone = group_advantages(rewards["motion"], GROUPS)
    torch.testing.assert_close(before, motion_alone, rtol=0, atol=0.02)


def test_gdpo_is_centred_in_every_group_and_spread_over_the_batch():
    advantages = gdpo_advantages(two_rewards(), GROUPS, weights={"clip": 1.0, "motion": 2.0})
    torch.testing.assert_close(advantages.reshape(2, 4).mean(1), torch.zeros(2, dtype=torch.float64))
    assert float(advantages.std(correction=0)) == pytest.approx(1.0)


def test_groups_that_teach_nothing_are_exactly_zero():
    rewards = two_rewards(torch.float32)
    rewards["clip"][:4], rewards["motion"][:4] = 0.1, 0.7
    weights = {"clip": 1.0, "motion": 0.5}
    advantages = gdpo_advantages(rewards, GROUPS, weights=weights)
    assert torch.equal(advantages[:4], torch.zeros(4))
    assert bool((advantages[4:] != 0).all())
    equal = {name: torch.full((8,), 0.1) for name in rewards}
    assert torch.equal(gdpo_advantages(equal, GROUPS, weights=weights), torch.zeros(8))
    alone = {name: values[:1] for name, values in rewards.items()}
    assert torch.equal(gdpo_advantages(alone, GROUPS[:1], weights=weights, ddof=1), torch.zeros(1))


def test_a_spread_below_the_floor_counts_as_the_floor():
    rewards = {"a": torch.tensor([0.0, 1e-9, 2e-9, 3e-9], dtype=torch.float64)}
    advantages = gdpo_advantages(rewards, torch.zeros(4), weights={"a": 1.0}, floor=1e-6)
    centred = rewards["a"] - rewards["a"].mean()
    torch.testing.assert_close(advantages, centred / 1e-6 / float((centred / 1e-6).std(correction=0)))
    tiny = gdpo_advantages(rewards, torch.zeros(4), weights={"a": 1e-6}, floor=1e-6)
    torch.testing.assert_close(tiny, centred / 1e-6 * 1e-6 / 1e-6)


def test_advantages_are_clipped():
    rewards = {"a": torch.tensor([0.0] * 99 + [1.0])}
    advantages = gdpo_advantages(rewards, torch.zeros(100), weights={"a": 1.0}, clip=5.0)
    assert float(advantages.max()) == 5.0


@pytest.mark.parametrize("weights", [{"clip": 1.0}, {"clip": 1.0, "motion": 1.0, "other": 1.0}, {}])
def test_rewards_and_weights_of_other_names_are_refused(weights):
    with pytest.raises(ValueError, match=r"rewards \['clip', 'motion'\] and weights .* must have the same names"):
        weighted_rewards(two_rewards(), weights)
    with pytest.raises(ValueError, match="must have the same names"):
        gdpo_advantages(two_rewards(), GROUPS, weights=weights)
    with pytest.raises(ValueError, match="at least one"):
        weighted_rewards({}, {})


def test_a_reward_that_is_not_finite_is_named():
    rewards = two_rewards()
    rewards["motion"][5] = torch.nan
    with pytest.raises(ValueError, match=r"motion at positions \[5\] are not finite"):
        gdpo_advantages(rewards, GROUPS, weights={"clip": 1.0, "motion": 1.0})
