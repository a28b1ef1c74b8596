"""The stochastic steps: inside the range, a function of seed or iteration, and never the last one."""

from __future__ import annotations

import math
from collections import Counter
from itertools import combinations

import pytest
import torch

from miles_wan.flow import STRATEGIES, select_steps, step_range


def draw(seed: int, **options) -> tuple[int, ...]:
    return select_steps(options.pop("strategy", "window"), 10, generator=torch.Generator().manual_seed(seed), **options)


def test_windows_are_contiguous_and_reach_every_place_of_the_range():
    windows = {draw(seed, size=3, window_range=(1, 7)) for seed in range(200)}
    assert windows == {(start, start + 1, start + 2) for start in range(1, 5)}


def test_the_last_step_is_never_stochastic_by_default():
    steps = {step for seed in range(200) for step in draw(seed, size=2)}
    assert steps == set(range(9))
    assert step_range(10, None) == (0, 9)


def test_a_window_is_one_draw_of_its_start():
    for seed in range(20):
        start = int(torch.randint(1, 8 - 3 + 1, (1,), generator=torch.Generator().manual_seed(seed)))
        assert draw(seed, size=3, window_range=(1, 8)) == (start, start + 1, start + 2)


def test_a_window_is_a_function_of_the_generator():
    assert draw(3, size=2) == draw(3, size=2)
    assert len({draw(seed, size=2) for seed in range(50)}) > 4


def test_all_takes_the_whole_range():
    assert draw(0, strategy="all") == tuple(range(9))
    assert draw(0, strategy="all", window_range=(2, 5)) == (2, 3, 4)


def test_a_subset_is_any_set_of_the_range_in_order():
    subsets = {draw(seed, strategy="subset", size=2, window_range=(3, 7)) for seed in range(200)}
    assert subsets == set(combinations(range(3, 7), 2))
    assert draw(5, strategy="subset", size=4) == draw(5, strategy="subset", size=4)
    assert draw(0, strategy="subset", size=9) == tuple(range(9))


def test_subsets_are_equally_likely():
    counts = Counter(draw(seed, strategy="subset", size=2, window_range=(0, 4)) for seed in range(3000))
    expected, share = 3000 / 6, 1 / 6
    assert all(abs(count - expected) < 4 * math.sqrt(3000 * share * (1 - share)) for count in counts.values())


def slide(iteration: int, **options) -> tuple[int, ...]:
    return draw(0, strategy="sliding", iteration=iteration, **{"size": 3, "interval": 2, **options})


def mixgrpo(iterations: int, *, first: int, last: int, size: int, interval: int, stride: int) -> list[tuple[int, ...]]:
    """Algorithm 1 of MixGRPO: after every ``interval`` iterations l <- min(l + s, last)."""
    left, windows = first, []
    for iteration in range(1, iterations + 1):
        windows.append(tuple(range(left, left + size)))
        if iteration % interval == 0:
            left = min(left + stride, last)
    return windows


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("window_range", [None, (2, 7)])
def test_the_sliding_window_has_the_schedule_of_mixgrpo(stride, window_range):
    first, end = step_range(10, window_range)
    expected = mixgrpo(30, first=first, last=end - 3, size=3, interval=2, stride=stride)
    assert [slide(k, stride=stride, window_range=window_range) for k in range(30)] == expected
    assert expected[-1] == (end - 3, end - 2, end - 1)


def test_a_wrapping_window_starts_again_after_the_last_full_one():
    starts = [slide(k, stride=4, wrap=True)[0] for k in range(0, 16, 2)]
    assert starts == [0, 4, 6, 0, 4, 6, 0, 4]
    assert {slide(k, size=9, wrap=True) for k in range(50)} == {tuple(range(9))}


def test_a_sliding_window_moves_every_25_iterations_by_one_step_unless_told_otherwise():
    windows = [draw(0, strategy="sliding", size=4, iteration=k) for k in (0, 24, 25, 49, 50)]
    assert [window[0] for window in windows] == [0, 0, 1, 1, 2]


def test_given_steps_are_taken_in_order():
    assert draw(0, strategy="given", steps=[6, 0, 3]) == (0, 3, 6)


@pytest.mark.parametrize(
    ("strategy", "options"),
    [("all", {}), ("given", {"steps": [1]}), ("sliding", {"size": 2, "iteration": 4})],
)
def test_choices_without_chance_leave_the_generator_alone(strategy, options):
    generator = torch.Generator().manual_seed(0)
    before = generator.get_state()
    select_steps(strategy, 10, generator=generator, **options)
    assert torch.equal(generator.get_state(), before)


def test_every_named_strategy_exists():
    options = {"size": 2, "iteration": 0, "steps": [1]}
    assert all(draw(0, strategy=strategy, **options) for strategy in STRATEGIES)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 2, "window_range": (0, 10)}, "last step is never stochastic"),
        ({"size": 2, "window_range": (5, 5)}, "never stochastic"),
        ({"size": 2, "window_range": (-1, 5)}, "never stochastic"),
        ({"size": 4, "window_range": (2, 5)}, "does not fit"),
        ({"size": 0}, "does not fit"),
        ({}, "does not fit"),
        ({"strategy": "some", "size": 2}, "unknown step selection 'some'; known: all, window, subset, sliding, given"),
        ({"strategy": "subset", "size": 10}, r"subset of 10 steps does not fit into steps \[0, 9\)"),
        ({"strategy": "sliding", "size": 10, "iteration": 0}, "does not fit"),
        ({"strategy": "sliding", "size": 2}, "iteration >= 0.*None"),
        ({"strategy": "sliding", "size": 2, "iteration": -1}, "iteration >= 0"),
        ({"strategy": "sliding", "size": 2, "iteration": 0, "interval": 0}, "interval >= 1"),
        ({"strategy": "sliding", "size": 2, "iteration": 0, "stride": 0}, "stride >= 1"),
        ({"strategy": "given"}, "needs steps"),
        ({"strategy": "given", "steps": []}, "needs steps"),
        ({"strategy": "given", "steps": [1, 1]}, "must be different"),
        ({"strategy": "given", "steps": [3, 9]}, r"lie in \[0, 9\)"),
        ({"strategy": "given", "steps": [1], "window_range": (2, 5)}, r"lie in \[2, 5\)"),
    ],
)
def test_impossible_choices_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        draw(0, **options)
