"""How much each step counts. In: the std of every kept step of a rollout. Out: their weights, 1 in the mean."""

from __future__ import annotations

from torch import Tensor

from miles_wan.algorithms.elements import wide


def noise_level_weights(std: Tensor, *, mean: float | None = None) -> Tensor:
    """Weights proportional to the noise of the step (TempFlow-GRPO, arXiv 2508.04324): w = std / mean(std).

    The gradient of a step's log-density goes as 1 / std: unweighted, the last steps, whose noise hardly moves the
    reward, get the largest updates. The authors' code multiplies the loss by c g sqrt(-d) with a constant c for its one
    grid (2.25 for SD3.5, 1.73 for FLUX); here c makes the mean weight 1, so that the learning rate keeps its meaning.

    Args:
        std: any shape, above 0: the noise actually added at every kept (sample, step) pair of one rollout. It follows
            from the sigmas alone, so that every rank can make it for all pairs. A micro-batch of its own would be
            normalised by itself, and a batch of equal steps would lose its weight.
        mean: mean of the std over the whole rollout, where ``std`` is a part of it.

    Returns:
        The shape of ``std``.

    Raises:
        ValueError: a std that is not above 0.
    """
    if not bool((std > 0).all()):
        raise ValueError(f"the std of a kept step must be above 0, got {std.flatten().tolist()}")
    values = wide(std)
    return values / (values.mean() if mean is None else mean)
