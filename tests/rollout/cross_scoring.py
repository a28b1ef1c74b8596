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
from miles_wan.wan.conditioning import sampled_mask
from miles_wan.wan.model import WanModel


def relative(ours: NDArray[Any], theirs: NDArray[Any]) -> float:
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


@torch.no_grad()
def by_trainer(
    model: WanModel, trajectory: Trajectory, conditioning: Conditioning, sampling: SamplingSettings
) -> NDArray[Any]:
    """Log-probs [K] of the kept steps under the trainer's forward, each by the expert of its recorded timestep."""
    guidance = model.experts.guidance(sampling.guidance_scale, sampling.guidance_scale_2)

    def tensor(array: Any) -> Tensor | None:
        return None if array is None else torch.from_numpy(array)[None]

    def velocity(state: Tensor, position: int) -> Tensor:
        timestep = float(trajectory.timesteps[position])
        expert = model.experts.of(timestep)
        inputs = model.input(
            state,
            torch.tensor([timestep]),
            condition_latent=tensor(conditioning.condition_latent),
            has_condition=torch.tensor([trajectory.has_condition]),
        )
        prompt = tensor(conditioning.prompt_embeds)
        assert prompt is not None
        return model.velocity(
            expert,
            inputs,
            prompt_embeds=prompt,
            negative_prompt_embeds=tensor(conditioning.negative_prompt_embeds),
            guidance_scale=guidance[expert],
        )

    return _scored(velocity, trajectory, sampling, given=_given(model, trajectory))


def by_velocities(
    model: WanModel, velocities: NDArray[np.float32], trajectory: Trajectory, sampling: SamplingSettings
) -> NDArray[Any]:
    """Log-probs [K] with ``velocities`` [N, C, F, h, w] of an engine that ran the same seed: at its own states, which are
    those of ``trajectory`` to float noise."""

    def velocity(_: Tensor, position: int) -> Tensor:
        return torch.from_numpy(velocities[trajectory.steps[position]])[None]

    return _scored(velocity, trajectory, sampling, given=_given(model, trajectory))


def _given(model: WanModel, trajectory: Trajectory) -> bool:
    """Whether latent frame 0 was given: by an image of TI2V, not by one of I2V."""
    return trajectory.has_condition and model.image_conditioning == "first_frame"


def _scored(
    velocity: Callable[[Tensor, int], Tensor], trajectory: Trajectory, sampling: SamplingSettings, *, given: bool
) -> NDArray[Any]:
    values = []
    for position, (pair, step) in enumerate(zip(torch.from_numpy(trajectory.latents), trajectory.steps, strict=True)):
        state, after = pair[:1], pair[1:]
        scored = transition(
            sampling.kind,
            state,
            velocity(state, position),
            sigma=float(trajectory.sigmas[step]),
            sigma_next=float(trajectory.sigmas[step + 1]),
            sigma_max=float(trajectory.sigmas[1]),
            noise_level=sampling.noise_level,
            next_sample=after,
            mask=sampled_mask(state, torch.tensor([given])),
        )
        values.append(float(scored.log_prob))
    return np.array(values)
