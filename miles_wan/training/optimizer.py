"""One AdamW over all trained weights, with a group for each expert, its schedule, and the clip before a step. In: parameters by
expert and settings. Out: optimizer, scheduler and gradient norms. It knows no model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_scheduler

from miles_wan.config import OptimizerConfig
from miles_wan.errors import MilesWanError
from miles_wan.training.sharding import full_tensor


def build_optimizer(
    parameters: Mapping[str, Sequence[torch.nn.Parameter]], settings: OptimizerConfig, *, total_steps: int
) -> tuple[torch.optim.AdamW, LRScheduler]:
    """AdamW skips a parameter without a gradient: an expert without samples in a step gets no update and no decay.

    Args:
        parameters: trainable ones of each expert, sharded or not.
        total_steps: optimizer steps of the whole run.
    """
    optimizer = torch.optim.AdamW(
        [{"params": list(own), "expert": name} for name, own in parameters.items()],
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
    )
    # The moments that AdamW makes at a parameter's first step, now: else a checkpoint of a run whose expert has had no
    # step yet would lack them, and could not be loaded where it has.
    for own in parameters.values():
        for parameter in own:
            optimizer.state[parameter] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
    scheduler: LRScheduler = get_scheduler(
        "constant_with_warmup" if settings.schedule == "constant" else settings.schedule,
        optimizer,
        num_warmup_steps=settings.warmup_steps,
        num_training_steps=total_steps,
    )
    return optimizer, scheduler


def clip_gradients(
    parameters: Mapping[str, Sequence[torch.nn.Parameter]], max_norm: float, *, moment: str
) -> dict[str | None, float]:
    """Clip the gradients of all experts together (a collective when sharded).

    Args:
        parameters: as ``build_optimizer`` got them.
        moment: for the message: ``step 3``.

    Returns:
        Norms before the clip: under None of everything, and of each expert that has gradients.

    Raises:
        MilesWanError: the norm is not finite.
    """
    norms: dict[str | None, float] = {}
    for name, own in parameters.items():
        if gradients := [parameter.grad for parameter in own if parameter.grad is not None]:
            norms[name] = float(full_tensor(torch.nn.utils.get_total_norm(gradients)))
    everything = [parameter for own in parameters.values() for parameter in own]
    norm = float(full_tensor(torch.nn.utils.clip_grad_norm_(everything, max_norm)))
    if not math.isfinite(norm):
        raise MilesWanError(
            f"the gradient norm is {norm} in {moment}: no weight was changed. "
            "Lower training.optimizer.lr or resume from the last checkpoint."
        )
    return {None: norm, **norms}
