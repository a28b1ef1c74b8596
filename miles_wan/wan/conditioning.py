"""The one builder of the transformer's input. In: noisy latents, timesteps, first-frame latents. Out: what the
transformer is called with, and the mask of the sampled elements (1) against the given first frame (0).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PATCH_H, PATCH_W = 2, 2


@dataclass(frozen=True)
class ModelInput:
    """``hidden_states`` [B, C, F, h, w]; ``timestep`` [B] or per token [B, F h/2 w/2]; ``mask`` [B, 1, F, h, w]."""

    hidden_states: Tensor
    timestep: Tensor
    mask: Tensor


def sampled_mask(latents: Tensor, has_condition: Tensor) -> Tensor:
    """1 on sampled elements, 0 on the given first latent frame.

    Args:
        latents: [B, C, F, h, w].
        has_condition: bool [B], whether latent frame 0 was given.

    Returns:
        [B, 1, F, h, w] in float32.
    """
    batch, _, frames, height, width = latents.shape
    mask = torch.ones(batch, 1, frames, height, width, device=latents.device)
    mask[has_condition.to(latents.device), :, 0] = 0
    return mask


def build_model_input(
    latents: Tensor, timestep: Tensor, *, condition_latent: Tensor | None, has_condition: Tensor, expand_timesteps: bool
) -> ModelInput:
    """Put the clean first frame in and give its tokens timestep 0 (Wan2.2-TI2V).

    Args:
        latents: noisy state x_t [B, C, F, h, w].
        timestep: [B] in [0, 1000], float32.
        condition_latent: normalised first-frame latents [B, C, 1, h, w]; rows without a condition are ignored.
        has_condition: bool [B].
        expand_timesteps: the checkpoint's flag (model_index.json): per-token timesteps.

    Raises:
        ValueError: a sample has a first frame but its latent is missing, or the checkpoint takes none.
    """
    mask = sampled_mask(latents, has_condition)
    timestep = timestep.float()
    if not bool(has_condition.any()):
        return ModelInput(latents, timestep, mask)
    if not expand_timesteps:
        raise ValueError("a first-frame condition needs a checkpoint with expand_timesteps (Wan2.2-TI2V)")
    if condition_latent is None:
        raise ValueError("a record with an image came without its first-frame latent: it would train as text-to-video")
    hidden_states = torch.where(mask > 0, latents, condition_latent.to(latents.dtype))
    per_token = mask[:, 0, :, ::PATCH_H, ::PATCH_W] * timestep[:, None, None, None]
    return ModelInput(hidden_states, per_token.flatten(1), mask)
