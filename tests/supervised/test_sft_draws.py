"""A batch is a function of seed and step; every sample goes to the expert of its timestep; all ranks run the same forwards."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest

from miles_wan.supervised.config import SftConfig
from miles_wan.supervised.draws import Draw, TrainingDraws, counts, micro_batches
from miles_wan.wan.experts import Experts

TWO = Experts(("transformer", "transformer_2"), 0.875)
ONE = Experts(("transformer",), None)


def source(experts: Experts = TWO, *, clips: int = 20, image_share: float = 0.0, **sections: Any) -> TrainingDraws:
    config = SftConfig.model_validate({"model": {"path": "m"}, "data": {"train": "t"}, **sections})
    trained = experts.chosen(config.model.train_experts)
    return TrainingDraws(config, clips, experts=experts, trained=trained, shift=5.0, image_share=image_share)


def test_a_batch_follows_from_seed_and_step_alone() -> None:
    training = {"batch_size": 64}
    one = source(training=training)
    assert one.batch(3) == source(training=training).batch(3)
    assert one.batch(3) != one.batch(4)
    assert one.batch(3) != source(training=training, seed=1).batch(3)
    # neither ranks nor micro-batches are in it
    assert one.batch(3) == source(training={**training, "dp_size": 4, "micro_batch_size": 8}).batch(3)


def test_noise_is_of_the_sample_and_each_epoch_takes_every_clip_once() -> None:
    batches = [draw for step in range(5) for draw in source(training={"batch_size": 8}).batch(step)]
    assert len({draw.noise_seed for draw in batches}) == 40
    assert Counter(draw.clip for draw in batches) == dict.fromkeys(range(20), 2)
    assert [source(training={"batch_size": 8}).epoch(step) for step in range(5)] == [0, 0, 0, 1, 1]


def test_every_sample_is_routed_by_the_inference_rule() -> None:
    draws = [draw for step in range(20) for draw in source(training={"batch_size": 500}).batch(step)]
    assert len(draws) == 10_000
    assert all((draw.expert == "transformer") == (int(draw.timestep) >= 875) for draw in draws)
    share = counts(draws, TWO)["transformer"] / len(draws)
    expected = 1 - 0.875 / (5 - 4 * 0.875)  # 41.7 %
    assert abs(share - expected) < 4 * math.sqrt(expected * (1 - expected) / len(draws))


@pytest.mark.parametrize(("which", "name"), [("high", "transformer"), ("low", "transformer_2")])
def test_one_trained_expert_gets_all_samples(which: str, name: str) -> None:
    draws = source(training={"batch_size": 2000}, model={"path": "m", "train_experts": which}).batch(0)
    assert {draw.expert for draw in draws} == {name}


def test_shares_of_images_and_of_samples_without_text() -> None:
    draws = source(
        ONE, image_share=0.25, training={"batch_size": 10_000}, data={"train": "t", "text_dropout": 0.1}
    ).batch(0)
    for found, share in ((sum(d.with_image for d in draws), 0.25), (sum(not d.with_text for d in draws), 0.1)):
        assert abs(found / 10_000 - share) < 4 * math.sqrt(share * (1 - share) / 10_000)
    assert not any(draw.with_image for draw in source(ONE, training={"batch_size": 100}).batch(0))
    assert all(draw.with_image for draw in source(ONE, image_share=1.0, training={"batch_size": 100}).batch(0))


def draw(position: int, expert: str, clip: int = 0) -> Draw:
    return Draw(position, clip, 900.0 if expert == "transformer" else 100.0, expert, position, False, True)


def plans(draws: list[Draw], sizes: list[tuple[int, int]], ranks: int, size: int) -> list[dict[str, Any]]:
    return [
        micro_batches(draws, sizes, experts=TWO, rank=rank, ranks=ranks, micro_batch_size=size) for rank in range(ranks)
    ]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_every_sample_is_computed_once_and_all_ranks_run_equally_many_forwards(ranks: int, size: int) -> None:
    sizes = [(64, 32), (32, 64), (32, 32)]
    draws = [draw(n, "transformer" if n % 5 < 2 else "transformer_2", clip=n % 3) for n in range(24)]
    planned = plans(draws, sizes, ranks, size)
    assert all(list(plan) == ["transformer", "transformer_2"] for plan in planned)
    for expert in TWO.names:
        assert len({len(plan[expert]) for plan in planned}) == 1
        for batch in (batch for plan in planned for batch in plan[expert]):
            assert {d.expert for d in batch.draws} == {expert}
            assert len({sizes[d.clip] for d in batch.draws}) == 1
            assert batch.size <= size
    computed = [d.position for plan in planned for batches in plan.values() for b in batches for d in b.draws[: b.size]]
    assert sorted(computed) == list(range(24))
    work = [sum(b.size for batches in plan.values() for b in batches) for plan in planned]
    assert max(work) == min(work)  # 24 samples divide by all of these ranks


def test_a_rank_without_samples_of_an_expert_fills_up() -> None:
    first, second = plans([draw(0, "transformer"), draw(1, "transformer_2")], [(32, 32)], 2, 1)
    assert [batch.size for batch in first["transformer"] + second["transformer"]] == [1, 0]
    assert [batch.size for batch in first["transformer_2"] + second["transformer_2"]] == [0, 1]


def test_an_expert_without_samples_runs_nowhere() -> None:
    for plan in plans([draw(0, "transformer_2"), draw(1, "transformer_2")], [(32, 32)], 2, 1):
        assert list(plan) == ["transformer_2"]
