"""Who sits on which device is a pure function of the configuration; impossible layouts are refused before Ray starts."""

from __future__ import annotations

from collections import Counter

import pytest

from miles_wan.cluster.placement import ENGINE_SHARE, REWARD_SHARE, TRAINER_SHARE, actor_options, plan_layout
from miles_wan.config import Config
from miles_wan.errors import InputError


def layout(*, devices: int = 4, engines: int = 1, tp: int = 1, sp: int = 1, ranks: int = 4, rewards: int = 1):
    return plan_layout(
        Config.model_validate(
            {
                "model": {"path": "m"},
                "data": {"train": "t"},
                "rollout": {"num_engines": engines, "tp_size": tp, "sp_size": sp},
                "training": {"dp_size": ranks},
                "reward": {"num_workers": rewards},
                "cluster": {"num_gpus": devices},
            }
        )
    )


def test_every_rank_has_a_device_of_its_own():
    assert layout(ranks=4).trainers == (0, 1, 2, 3)
    assert layout(ranks=2).trainers == (0, 1)


@pytest.mark.parametrize(
    ("engines", "tp", "sp", "expected"),
    [
        (1, 4, 1, ((0, 1, 2, 3),)),
        (2, 2, 1, ((0, 1), (2, 3))),
        (2, 1, 2, ((0, 1), (2, 3))),
        (4, 1, 1, ((0,), (1,), (2,), (3,))),
        (1, 2, 1, ((0, 1),)),
    ],
)
def test_engines_share_no_device_with_each_other(engines, tp, sp, expected):
    assert layout(engines=engines, tp=tp, sp=sp).engines == expected


@pytest.mark.parametrize("rewards", [1, 3, 4, 9])
def test_reward_workers_are_spread_evenly(rewards):
    counts = Counter(layout(rewards=rewards).rewards)
    assert sum(counts.values()) == rewards
    assert max(counts.values()) - min((counts[slot] for slot in range(4)), default=0) <= 1


def test_a_full_device_holds_what_is_asked_of_it():
    most = round((1 - TRAINER_SHARE - ENGINE_SHARE) / REWARD_SHARE)
    full = layout(devices=1, ranks=1, rewards=most)
    assert TRAINER_SHARE + ENGINE_SHARE + len(full.rewards) * REWARD_SHARE <= 1 + 1e-9
    with pytest.raises(
        InputError, match=f"reward.num_workers = {most + 1} puts {most + 1} on one device, at most {most} fit"
    ):
        layout(devices=1, ranks=1, rewards=most + 1)


@pytest.mark.parametrize(("device", "resource"), [("cuda", "num_gpus"), ("cpu", "resources")])
def test_actors_always_request_their_share_with_the_bundle(device, resource):
    options = actor_options(None, 2, share=0.4, device=device)
    assert options[resource] == (0.4 if device == "cuda" else {"worker_slot": 0.4})
    assert options["scheduling_strategy"].placement_group_bundle_index == 2
    assert options["max_restarts"] == 0
