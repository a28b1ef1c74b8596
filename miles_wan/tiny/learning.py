"""How the parts of the toy world learn within minutes. In: a module, learning rates, a number of steps. Out: an optimizer with
its schedule, and a block in which the same seed gives the same weights. It knows no data and no particular model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

WARM_UP = 10
MAX_NORM = 1.0


@contextmanager
def reproducible(seed: int, *, threads: int = 1) -> Iterator[None]:
    """A block whose numbers follow from ``seed`` alone. Random state and number of threads are put back after it.

    Sums depend on how many threads share them, hence a fixed number, whatever the machine has; small modules are fastest with one.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(before)


class FastOptimizer:
    """Muon (Jordan et al. 2024) for the weights of linear and convolution layers, Adam for everything else; both rates rise over
    ten steps and then fall linearly to zero at the last. On these small networks Muon needs a fraction of Adam's steps.

    Args:
        module: what learns.
        matrix_lr: peak rate of Muon. A convolution is the matrix [out, in * kernel].
        lr: peak rate of Adam.
        steps: how often :meth:`step` will be called.
    """

    def __init__(self, module: nn.Module, *, matrix_lr: float, lr: float, steps: int) -> None:
        layers = (nn.Linear, nn.Conv2d, nn.Conv3d)
        self._weights = [layer.weight for layer in module.modules() if isinstance(layer, layers)]
        # torch's Muon takes matrices only: views that share the storage of the weights.
        self._matrices = [nn.Parameter(weight.detach().flatten(1)) for weight in self._weights]
        of_muon = {id(weight) for weight in self._weights}
        self._others = [each for each in module.parameters() if id(each) not in of_muon]
        self._muon = torch.optim.Muon(self._matrices, lr=matrix_lr, momentum=0.9, weight_decay=0.0)
        self._adam = torch.optim.Adam(self._others, lr=lr, betas=(0.9, 0.99))
        self._schedules = [
            torch.optim.lr_scheduler.LambdaLR(each, lambda done: _share(done, steps))
            for each in (self._muon, self._adam)
        ]

    def step(self, loss: Tensor) -> float:
        """One update down the gradient of ``loss`` (a scalar), whose value is returned."""
        parameters = [*self._weights, *self._others]
        for parameter in parameters:
            parameter.grad = None
        loss.backward()
        clip_grad_norm_(parameters, MAX_NORM)
        for matrix, weight in zip(self._matrices, self._weights, strict=True):
            matrix.grad = None if weight.grad is None else weight.grad.flatten(1)
        self._muon.step()
        self._adam.step()
        for schedule in self._schedules:
            schedule.step()
        return loss.item()


def _share(done: int, steps: int) -> float:
    """The share of the peak rate after ``done`` of ``steps`` steps."""
    return min(1.0, (done + 1) / WARM_UP) * max(0.0, 1 - done / steps)
