"""The stochastic steps: contiguous, inside the range, seeded, and never the last one."""

from __future__ import annotations

import pytest
import torch

from miles_wan.flow import select_steps, step_range


def draw(seed: int, **options) -> tuple[int, ...]:
    return select_steps(options.pop("strategy", "window"), 10, generator=torch.Generator().manual_seed(seed), **options)


def test_windows_are_contiguous_and_reach_every_place_of_the_range():
    windows = {draw(seed, size=3, window_range=(1, 7)) for seed in range(200)}
    assert windows == {(start, start + 1, start + 2) for start in range(1, 5)}


def test_the_last_step_is_never_stochastic_by_default():
    steps = {step for seed in range(200) for step in draw(seed, size=2)}
    assert steps == set(range(9))
    assert step_range(10, None) == (0, 9)


def test_a_window_is_a_function_of_the_generator():
    assert draw(3, size=2) == draw(3, size=2)
    assert len({draw(seed, size=2) for seed in range(50)}) > 4


def test_all_takes_the_whole_range():
    assert draw(0, strategy="all") == tuple(range(9))
    assert draw(0, strategy="all", window_range=(2, 5)) == (2, 3, 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 2, "window_range": (0, 10)}, "last step is never stochastic"),
        ({"size": 2, "window_range": (5, 5)}, "never stochastic"),
        ({"size": 2, "window_range": (-1, 5)}, "never stochastic"),
        ({"size": 4, "window_range": (2, 5)}, "does not fit"),
        ({"size": 0}, "does not fit"),
        ({}, "does not fit"),
        ({"strategy": "some", "size": 2}, "unknown step selection"),
    ],
)
def test_impossible_choices_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        draw(0, **options)
