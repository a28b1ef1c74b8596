"""The order of records is a function of seed and rollout alone, epoch after epoch."""

from __future__ import annotations

from collections import Counter

import pytest

from miles_wan.data import RecordOrder


def draws(order: RecordOrder, *, rollouts: int, n: int) -> list[tuple[int, int]]:
    return [draw for rollout in range(rollouts) for draw in order.batch(rollout, n)]


@pytest.mark.parametrize("shuffle", [True, False])
def test_every_record_is_drawn_once_an_epoch(shuffle: bool) -> None:
    order = RecordOrder(7, seed=3, shuffle=shuffle)
    drawn = draws(order, rollouts=7, n=3)  # 21 draws: three epochs that no rollout boundary respects
    for epoch in range(3):
        assert sorted(index for index, _ in drawn[7 * epoch : 7 * epoch + 7]) == list(range(7))


def test_occurrence_is_how_often_the_record_was_drawn_before() -> None:
    before: Counter[int] = Counter()
    for index, occurrence in draws(RecordOrder(5, seed=1), rollouts=9, n=4):
        assert occurrence == before[index]
        before[index] += 1


def test_no_two_draws_of_a_rollout_are_the_same_even_across_an_epoch_edge() -> None:
    order = RecordOrder(3, seed=0)
    for rollout in range(20):
        batch = order.batch(rollout, 5)  # longer than an epoch: every rollout repeats records
        assert len(set(batch)) == 5


def test_a_rollout_can_be_drawn_without_those_before_it() -> None:
    whole = draws(RecordOrder(11, seed=5), rollouts=10, n=4)
    assert RecordOrder(11, seed=5).batch(7, 4) == whole[28:32]


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    first, other = RecordOrder(50, seed=0), RecordOrder(50, seed=1)
    orders = [tuple(order.epoch(epoch)) for order in (first, other) for epoch in range(3)]
    assert len(set(orders)) == 6


def test_unshuffled_is_the_order_of_the_file() -> None:
    assert [index for index, _ in RecordOrder(4, seed=9, shuffle=False).batch(1, 4)] == [0, 1, 2, 3]


def test_an_order_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="num_records is 0"):
        RecordOrder(0, seed=0)
