"""One engine's trajectory under the other side's model: the trainer's forward, or the velocities that an engine computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from miles_wan.flow import transition
from miles_wan.records import Conditioning, SamplingSettings, Trajectory
from miles_wan.wan.conditioning import ModelInput, build_model_input, sampled_mask
from miles_wan.wan.forward import guided_velocity


def relative(ours: NDArray[Any], theirs: NDArray[Any]) -> float:
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


@torch.no_grad()
def by_trainer(
    transformer: Any, trajectory: Trajectory, conditioning: Conditioning, sampling: SamplingSettings
) -> NDArray[Any]:
    """Log-probs [K] of the kept steps under the trainer's forward."""
    given = torch.tensor([trajectory.has_condition])

    def tensor(array: Any) -> Tensor | None:
        return None if array is None else torch.from_numpy(array)[None]

    def velocity(state: Tensor, step: int) -> Tensor:
        inputs: ModelInput = build_model_input(
            state,
            torch.tensor([1000 * float(trajectory.sigmas[step])]),
            condition_latent=tensor(conditioning.condition_latent),
            has_condition=given,
            expand_timesteps=True,
        )
        return guided_velocity(
            transformer,
            inputs,
            prompt_embeds=tensor(conditioning.prompt_embeds),
            negative_prompt_embeds=tensor(conditioning.negative_prompt_embeds),
            guidance_scale=sampling.guidance_scale,
            dtype=torch.float32,
        )

    return _scored(velocity, trajectory, sampling)


def by_velocities(velocities: NDArray[np.float32], trajectory: Trajectory, sampling: SamplingSettings) -> NDArray[Any]:
    """Log-probs [K] with ``velocities`` [N, C, F, h, w] of an engine that ran the same seed: at its own states, which are
    those of ``trajectory`` to float noise."""
    return _scored(lambda _, step: torch.from_numpy(velocities[step])[None], trajectory, sampling)


def _scored(
    velocity: Callable[[Tensor, int], Tensor], trajectory: Trajectory, sampling: SamplingSettings
) -> NDArray[Any]:
    values = []
    for pair, step in zip(torch.from_numpy(trajectory.latents), trajectory.steps, strict=True):
        state, after = pair[:1], pair[1:]
        scored = transition(
            sampling.kind,
            state,
            velocity(state, step),
            sigma=float(trajectory.sigmas[step]),
            sigma_next=float(trajectory.sigmas[step + 1]),
            sigma_max=float(trajectory.sigmas[1]),
            noise_level=sampling.noise_level,
            next_sample=after,
            mask=sampled_mask(state, torch.tensor([trajectory.has_condition])),
        )
        values.append(float(scored.log_prob))
    return np.array(values)
