"""The velocity of a Wan transformer with classifier-free guidance, as the engine computes it."""

from __future__ import annotations

import torch
from diffusers import WanTransformer3DModel
from torch import Tensor

from miles_wan.wan.conditioning import ModelInput


def guided_velocity(
    transformer: WanTransformer3DModel,
    inputs: ModelInput,
    *,
    prompt_embeds: Tensor,
    negative_prompt_embeds: Tensor | None,
    guidance_scale: float,
    dtype: torch.dtype,
) -> Tensor:
    """v = v_neg + w (v_pos - v_neg); one forward where w is at most 1.

    Args:
        transformer: ``WanTransformer3DModel``, plain or sharded.
        inputs: from ``build_model_input``.
        prompt_embeds, negative_prompt_embeds: [B, L, D].
        guidance_scale: w.
        dtype: the transformer's compute type; timesteps stay float32.

    Returns:
        float32 velocity [B, C, F, h, w].

    Raises:
        ValueError: guidance is on and there is no negative prompt.
    """

    def velocity(embeds: Tensor) -> Tensor:
        output = transformer(
            hidden_states=inputs.hidden_states.to(dtype),
            timestep=inputs.timestep,
            encoder_hidden_states=embeds.to(dtype),
            return_dict=False,
        )
        return output[0].float()

    positive = velocity(prompt_embeds)
    if guidance_scale <= 1:
        return positive
    if negative_prompt_embeds is None:
        raise ValueError(f"guidance_scale {guidance_scale} needs negative prompt embeddings, and the rollout kept none")
    negative = velocity(negative_prompt_embeds)
    return negative + guidance_scale * (positive - negative)
