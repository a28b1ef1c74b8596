"""The velocity that training sees: the sharded transformer called as the engine calls it, under the trained adapter, its
average or none. In: noisy latents with their conditions. Out: the velocity and the model's input."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from diffusers import WanTransformer3DModel
from torch import Tensor

from miles_wan.config import Config
from miles_wan.training.batch import ConditionBatch
from miles_wan.training.ema import AdapterAverage
from miles_wan.wan.conditioning import ModelInput, build_model_input
from miles_wan.wan.forward import guided_velocity
from miles_wan.wan.load import DTYPES


class VelocityModel:
    """Calls the transformer.

    Args:
        transformer: sharded, with its adapters.
        average: of the adapter, if the run keeps one.
        expand_timesteps: the checkpoint's flag.
    """

    def __init__(
        self,
        transformer: WanTransformer3DModel,
        average: AdapterAverage | None,
        config: Config,
        *,
        expand_timesteps: bool,
    ) -> None:
        self._transformer = transformer
        self._average = average
        self._guidance_scale = config.rollout.guidance_scale
        self._dtype = DTYPES[config.model.dtype]
        self._expand_timesteps = expand_timesteps

    def __call__(self, latents: Tensor, sigma: Tensor, condition: ConditionBatch) -> tuple[Tensor, ModelInput]:
        """Velocity [B, C, F, h, w] after guidance, in float32, at ``latents`` of noise level ``sigma`` [B]."""
        inputs = build_model_input(
            latents,
            sigma * 1000,
            condition_latent=condition.latent,
            has_condition=condition.given,
            expand_timesteps=self._expand_timesteps,
        )
        velocity = guided_velocity(
            self._transformer,
            inputs,
            prompt_embeds=condition.prompt_embeds,
            negative_prompt_embeds=condition.negative_prompt_embeds,
            guidance_scale=self._guidance_scale,
            dtype=self._dtype,
        )
        return velocity, inputs

    @contextmanager
    def base(self) -> Iterator[None]:
        """With the adapter off: the frozen base."""
        self._transformer.disable_adapters()
        try:
            yield
        finally:
            self._transformer.enable_adapters()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """With the averaged adapter. Not between a forward and its backward: that would see it, too."""
        if self._average is None:
            raise ValueError("this run keeps no average of the adapter: training.ema_decay is not set")
        with self._average.in_place():
            yield
