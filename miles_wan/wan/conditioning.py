"""The one builder of the transformer's input. In: noisy latents, timesteps, latents of first images. Out: what the
transformer is called with, and the mask of the sampled elements (1) against the given first frame (0).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from miles_wan.wan.facts import ImageConditioning

PATCH_H, PATCH_W = 2, 2
MASK_CHANNELS = 4  # of I2V: one for each pixel frame of a latent frame


@dataclass(frozen=True)
class ModelInput:
    """``hidden_states`` [B, C_in, F, h, w]; ``state`` [B, C, F, h, w], the noisy latents with the given first frame put in;
    ``timestep`` [B] or per token [B, F h/2 w/2]; ``mask`` [B, 1, F, h, w]."""

    hidden_states: Tensor
    state: Tensor
    timestep: Tensor
    mask: Tensor

    def to(self, device: torch.device | str) -> ModelInput:
        return ModelInput(*(part.to(device) for part in (self.hidden_states, self.state, self.timestep, self.mask)))


def sampled_mask(latents: Tensor, given: Tensor) -> Tensor:
    """1 on sampled elements, 0 on the given first latent frame.

    Args:
        latents: [B, C, F, h, w].
        given: bool [B], whether latent frame 0 was given.

    Returns:
        [B, 1, F, h, w] in float32.
    """
    batch, _, frames, height, width = latents.shape
    mask = torch.ones(batch, 1, frames, height, width, device=latents.device)
    mask[given.to(latents.device), :, 0] = 0
    return mask


def build_model_input(
    latents: Tensor,
    timestep: Tensor,
    *,
    condition_latent: Tensor | None,
    has_condition: Tensor,
    image_conditioning: ImageConditioning,
) -> ModelInput:
    """Put what a first image gives into the input.

    ``first_frame`` (Wan2.2-TI2V): it is the clean first latent frame, whose tokens have timestep 0. ``channels``
    (Wan2.2-I2V): its latents and their mask are further channels; every frame is sampled.

    Args:
        latents: noisy state x_t [B, C, F, h, w].
        timestep: [B] in [0, 1000], float32.
        condition_latent: of the images: [B, C, 1, h, w], rows without an image are ignored; for ``channels``
            [B, 4 + C, F, h, w] (``image_channels``).
        has_condition: bool [B], whether a sample has a first image.
        image_conditioning: of the checkpoint.

    Raises:
        ValueError: a sample has an image and its latent is missing, the checkpoint takes none, or it needs one.
    """
    timestep = timestep.float()
    if image_conditioning == "channels":
        if condition_latent is None or not bool(has_condition.all()):
            raise ValueError("this checkpoint (Wan2.2-I2V) needs the latents of a first image for every sample")
        hidden_states = torch.cat([latents, condition_latent.to(latents.dtype)], dim=1)
        nothing_given = torch.zeros_like(has_condition)
        return ModelInput(hidden_states, latents, timestep, sampled_mask(latents, nothing_given))
    mask = sampled_mask(latents, has_condition)
    if not bool(has_condition.any()):
        return ModelInput(latents, latents, timestep, mask)
    if image_conditioning == "none":
        raise ValueError("a first-frame condition needs a checkpoint with expand_timesteps (Wan2.2-TI2V)")
    if condition_latent is None:
        raise ValueError("a record with an image came without its first-frame latent: it would train as text-to-video")
    state = torch.where(mask > 0, latents, condition_latent.to(latents.dtype))
    per_token = mask[:, 0, :, ::PATCH_H, ::PATCH_W] * timestep[:, None, None, None]
    return ModelInput(state, state, per_token.flatten(1), mask)


def image_channels(latent: Tensor) -> Tensor:
    """The further input channels of Wan2.2-I2V.

    Args:
        latent: normalised latent [C, F, h, w] of the image followed by grey frames.

    Returns:
        [4 + C, F, h, w]: the mask, 1 in latent frame 0, then the latent.
    """
    mask = latent.new_zeros(MASK_CHANNELS, *latent.shape[1:])
    mask[:, 0] = 1
    return torch.cat([mask, latent])
