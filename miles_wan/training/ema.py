"""An exponential moving average of the trainable weights, shard by shard (torch's own averaging function)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import get_ema_multi_avg_fn


class AdapterAverage:
    """average <- d average + (1 - d) weight after every optimizer step, d = min(decay, rise x step).

    Args:
        parameters: trainable ones, sharded or not; the average begins with their values.
        rise: None for a constant decay.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], *, decay: float, rise: float | None) -> None:
        self._parameters = list(parameters)
        self._decay, self._rise = decay, rise
        # Clones keep the placement of their shards, so that a checkpoint saves and loads them like the weights.
        self.tensors = [parameter.detach().clone() for parameter in self._parameters]
        self.steps = 0

    @property
    def decay(self) -> float:
        """The decay of the last step."""
        return self._decay if self._rise is None else min(self._decay, self._rise * self.steps)

    def update(self) -> None:
        """Count one optimizer step."""
        self.steps += 1
        average = get_ema_multi_avg_fn(self.decay)
        average(_local(self.tensors), _local(self._parameters), 0)

    def load(self, tensors: Sequence[Tensor], *, steps: int) -> None:
        """Continue from what a checkpoint holds."""
        torch._foreach_copy_(_local(self.tensors), _local(tensors))
        self.steps = steps

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model computes with the average inside this context, with the trained weights after it."""
        weights = _local(self._parameters)
        trained = [weight.clone() for weight in weights]
        torch._foreach_copy_(weights, _local(self.tensors))
        try:
            yield
        finally:
            torch._foreach_copy_(weights, trained)


def _local(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The shards that this rank holds, as views."""
    return [tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach() for tensor in tensors]
