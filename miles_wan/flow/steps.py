"""Which denoising steps of a rollout are stochastic, kept and trained."""

from __future__ import annotations

import torch


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
) -> tuple[int, ...]:
    """Choose the stochastic steps.

    Args:
        strategy: ``window`` (contiguous, random start, Flow-GRPO-Fast) or ``all`` (every step of the range).
        num_steps: denoising steps N.
        generator: CPU generator that the choice is drawn from.
        size: steps of a ``window``.
        window_range: steps [first, end) to choose from; by default [0, N - 1): the last step is never stochastic.

    Returns:
        Step indices in increasing order.
    """
    first, end = step_range(num_steps, window_range)
    if not 0 <= first < end <= num_steps - 1:
        raise ValueError(
            f"steps [{first}, {end}) do not lie in [0, {num_steps - 1}): the last step is never stochastic"
        )
    if strategy == "all":
        return tuple(range(first, end))
    if strategy != "window":
        raise ValueError(f"unknown step selection {strategy!r}; known: window, all")
    if size is None or not 1 <= size <= end - first:
        raise ValueError(f"window of {size} steps does not fit into steps [{first}, {end})")
    start = int(torch.randint(first, end - size + 1, (1,), generator=generator))
    return tuple(range(start, start + size))
