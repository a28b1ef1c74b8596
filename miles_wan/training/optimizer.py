"""One AdamW over all trained weights, with a group for each expert, and its schedule. In: parameters by expert and settings.
Out: optimizer and scheduler. It knows no model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_scheduler

from miles_wan.config import OptimizerConfig


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
