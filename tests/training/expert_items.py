"""Trajectories of a tiny A14B model, made by hand: what the ranks train on and what the reference is computed from."""

from __future__ import annotations

import numpy as np
import torch

from miles_wan.flow import shifted_sigmas
from miles_wan.records import Conditioning, TrainItem, Trajectory

STEPS = 10
SIGMAS = shifted_sigmas(STEPS, 5.0)
ETA = 0.7
GUIDANCE = {"transformer": 4.0, "transformer_2": 3.0}
SHAPE = (16, 2, 4, 4)

# By scenario and rank: (kept steps, advantage) of each item. Boundary .875 and shift 5: steps 0 to 3 are high noise.
HIGH, LOW = (0, 1, 2, 3), (4, 5, 6, 7, 8)
SCENARIOS = {
    "mixed": {0: [((2, 3, 4), 1.0), ((1, 2, 3), -0.5)], 1: [((3, 4, 5), 2.0), ((6, 7, 8), -1.5)]},
    "one side each": {0: [((0, 1), 1.0)], 1: [((5, 7), -1.0)]},
    "high alone": {0: [((0, 1), 1.0)], 1: [((2, 3), -1.0)]},
}


def item(steps: tuple[int, ...], advantage: float, *, number: int, channels: int = 0) -> TrainItem:
    """One item; ``channels`` further ones of an image."""
    draw = torch.Generator().manual_seed(1000 + number)
    latents = torch.randn(len(steps), 2, *SHAPE, generator=draw)
    texts = torch.randn(2, 7, 32, generator=draw)
    condition = torch.randn(channels, *SHAPE[1:], generator=draw).numpy() if channels else None
    return TrainItem(
        trajectory=Trajectory(
            latents=latents.numpy(),
            steps=steps,
            sigmas=SIGMAS.numpy(),
            timesteps=(SIGMAS[list(steps)] * 1000).numpy(),
            log_probs=np.zeros(len(steps), np.float32),
            has_condition=channels > 0,
            policy_version=0,
            seed=number,
        ),
        conditioning=Conditioning(texts[0].numpy(), texts[1].numpy(), condition),
        advantage=advantage,
        record_id=str(number),
        sample_index=0,
    )


def items(scenario: str, rank: int, *, channels: int = 0) -> list[TrainItem]:
    """A rank's items."""
    return [
        item(steps, advantage, number=10 * rank + place, channels=channels)
        for place, (steps, advantage) in enumerate(SCENARIOS[scenario][rank])
    ]
