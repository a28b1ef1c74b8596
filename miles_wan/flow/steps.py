"""Which denoising steps of a rollout are stochastic, kept and trained.

In: a strategy, the number of steps, a seeded generator or the rollout's number. Out: step indices. No state: a resumed
run chooses the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

STRATEGIES = ("all", "window", "subset", "sliding", "given")


def step_range(num_steps: int, window_range: tuple[int, int] | None) -> tuple[int, int]:
    """The steps [first, end) a window may lie in: by default all but the last, whose std is tiny."""
    return window_range if window_range is not None else (0, num_steps - 1)


def select_steps(
    strategy: str,
    num_steps: int,
    *,
    generator: torch.Generator,
    size: int | None = None,
    window_range: tuple[int, int] | None = None,
    iteration: int | None = None,
    interval: int = 25,
    stride: int = 1,
    wrap: bool = False,
    steps: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """Choose the stochastic steps. Each strategy reads the options named beside it, and no others.

    Args:
        strategy: ``all`` (every step of the range), ``window`` (``size`` neighbours from a random start,
            Flow-GRPO-Fast), ``subset`` (``size`` random steps), ``sliding`` (``size`` neighbours that move with
            training, MixGRPO; ``iteration``, ``interval``, ``stride``, ``wrap``) or ``given`` (``steps``).
        num_steps: denoising steps N.
        generator: CPU generator that ``window`` and ``subset`` are drawn from; the others leave it as it is.
        size: steps of a ``window``, ``subset`` or ``sliding`` window.
        window_range: steps [first, end) to choose from; by default [0, N - 1): the last step is never stochastic.
        iteration: number of the rollout, from 0.
        interval: rollouts that a ``sliding`` window stays where it is (MixGRPO's tau, 25 there).
        stride: steps that it then moves towards the clean end (MixGRPO's s, 1 there).
        wrap: at the last full window, start again from the first (MixGRPO's ``roll_back``) instead of staying there.
        steps: the list of ``given``.

    Returns:
        Step indices in increasing order.

    Raises:
        ValueError: unknown strategy, or steps that do not exist or do not fit.
    """
    first, end = step_range(num_steps, window_range)
    if not 0 <= first < end <= num_steps - 1:
        raise ValueError(
            f"steps [{first}, {end}) do not lie in [0, {num_steps - 1}): the last step is never stochastic"
        )
    if strategy == "all":
        return tuple(range(first, end))
    if strategy == "given":
        return _given(steps, first, end)
    if strategy not in STRATEGIES:
        raise ValueError(f"unknown step selection {strategy!r}; known: {', '.join(STRATEGIES)}")
    if size is None or not 1 <= size <= end - first:
        raise ValueError(f"{strategy} of {size} steps does not fit into steps [{first}, {end})")
    if strategy == "subset":
        return tuple(sorted(first + int(k) for k in torch.randperm(end - first, generator=generator)[:size]))
    if strategy == "window":
        start = int(torch.randint(first, end - size + 1, (1,), generator=generator))
    else:
        start = _sliding_start(first, end - size, iteration=iteration, interval=interval, stride=stride, wrap=wrap)
    return tuple(range(start, start + size))


def _given(steps: Sequence[int] | None, first: int, end: int) -> tuple[int, ...]:
    if not steps:
        raise ValueError("step selection 'given' needs steps, a list of at least one step index")
    if len(set(steps)) != len(steps) or not all(first <= step < end for step in steps):
        raise ValueError(f"given steps {list(steps)} must be different and lie in [{first}, {end})")
    return tuple(sorted(steps))


def _sliding_start(first: int, last: int, *, iteration: int | None, interval: int, stride: int, wrap: bool) -> int:
    """MixGRPO, algorithm 1: every ``interval`` iterations, start <- min(start + stride, last)."""
    if iteration is None or iteration < 0 or interval < 1 or stride < 1:
        raise ValueError(
            f"sliding steps need iteration >= 0, interval >= 1 and stride >= 1;"
            f" they are {iteration}, {interval} and {stride}"
        )
    moves = iteration // interval
    if wrap:
        # ceil: the last full window is visited even where the stride does not divide the way to it.
        moves %= -(-(last - first) // stride) + 1
    return min(first + moves * stride, last)
