"""The velocity that training sees: the sharded transformers called as the engine calls them, under the trained adapters, their
average or none. In: noisy latents with their conditions, all of one expert. Out: the velocity and the model's input."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from torch import Tensor

from miles_wan.config import Config
from miles_wan.training.batch import ConditionBatch
from miles_wan.training.ema import AdapterAverage
from miles_wan.wan.conditioning import ModelInput
from miles_wan.wan.model import WanModel


class VelocityModel:
    """Calls the transformers.

    Args:
        model: sharded, with its adapters.
        average: of the adapters, if the run keeps one.
    """

    def __init__(self, model: WanModel, average: AdapterAverage | None, config: Config) -> None:
        self._model = model
        self._average = average
        rollout = config.rollout
        self._guidance = model.experts.guidance(rollout.guidance_scale, rollout.guidance_scale_2)

    def __call__(
        self, expert: str, latents: Tensor, timestep: Tensor, condition: ConditionBatch
    ) -> tuple[Tensor, ModelInput]:
        """Velocity [B, C, F, h, w] of one expert after guidance, in float32, at ``latents`` of ``timestep`` [B]."""
        inputs = self._model.input(latents, timestep, condition_latent=condition.latent, has_condition=condition.given)
        velocity = self._model.velocity(
            expert,
            inputs,
            prompt_embeds=condition.prompt_embeds,
            negative_prompt_embeds=condition.negative_prompt_embeds,
            guidance_scale=self._guidance[expert],
        )
        return velocity, inputs

    def base(self) -> AbstractContextManager[None]:
        """With the adapters off: the frozen base."""
        return self._model.without_adapters()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """With the averaged adapters. Not between a forward and its backward: that would see them, too."""
        if self._average is None:
            raise ValueError("this run keeps no average of the adapter: training.ema_decay is not set")
        with self._average.in_place():
            yield
