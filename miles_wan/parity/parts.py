"""The two sides that are compared, each behind two or three calls: a trainer's transformer, and an engine that takes
adapters and answers requests. Nothing here compares anything.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from miles_wan.config import Config
from miles_wan.records import Conditioning, Float32, RolloutRequest, SamplingSettings
from miles_wan.rollout.base import Answer
from miles_wan.rollout.local import LocalEngine
from miles_wan.rollout.local.conditioning import encode_conditioning
from miles_wan.rollout.sglang.engine import SGLangEngine
from miles_wan.rollout.sglang.payload import serialize_update
from miles_wan.wan.conditioning import ModelInput
from miles_wan.wan.family import ModelFolder
from miles_wan.wan.lora import layer_prefix, trainable_parameters
from miles_wan.wan.model import WanModel
from miles_wan.wan.text import PromptEncoder
from miles_wan.wan.video import VideoCodec
from miles_wan.weight_sync import make_update, verify_reports

# Tensors by component of the model and by name.
Adapter = Mapping[str, Mapping[str, Tensor]]

# A random adapter moves the output of each of its layers by about this share of what the layer alone gives.
_STRENGTH = 0.1


class EngineSide(Protocol):
    """An engine as the comparison uses it."""

    def push(self, adapter: Adapter, *, policy_version: int) -> None:
        """Replace the adapter, verified. Raises WeightSyncError, EngineError."""

    def rollout(self, request: RolloutRequest, sample_indices: Sequence[int]) -> list[Answer]:
        """Samples of a request with what the engine did, the first with its conditioning. Raises EngineError."""


class Trainer:
    """The model with its adapters, called as training calls it.

    Args:
        model: with injected adapters, on ``device``.
    """

    def __init__(self, model: WanModel, *, device: torch.device) -> None:
        self.model = model
        self._device = device

    @torch.no_grad()
    def hold(self, adapter: Adapter) -> None:
        """Take over the adapter."""
        set_adapter(self.model, adapter)

    @torch.no_grad()
    def velocity(
        self,
        state: Float32,
        timestep: float,
        conditioning: Conditioning,
        *,
        has_condition: bool,
        sampling: SamplingSettings,
        scalar_timestep: bool = False,
        expert: str | None = None,
        unguided: bool = False,
    ) -> tuple[Tensor, ModelInput]:
        """Guided velocity [1, C, F, h, w] at ``state`` [C, F, h, w], and the model's input, both on the CPU.

        Args:
            scalar_timestep: give the tokens of a given first frame the timestep of the others (what is wrong).
            expert: with its guidance; by default that of the timestep (another is wrong).
            unguided: leave guidance out (wrong where it is on).
        """
        latent, negative = conditioning.condition_latent, conditioning.negative_prompt_embeds
        timesteps = torch.tensor([timestep], device=self._device)
        inputs = self.model.input(
            self._batch(state),
            timesteps,
            condition_latent=None if latent is None else self._batch(latent),
            has_condition=torch.tensor([has_condition]),
        )
        if scalar_timestep:
            inputs = replace(inputs, timestep=timesteps)
        experts = self.model.experts
        expert = experts.of(timestep) if expert is None else expert
        guidance = experts.guidance(sampling.guidance_scale, sampling.guidance_scale_2)
        velocity = self.model.velocity(
            expert,
            inputs,
            prompt_embeds=self._batch(conditioning.prompt_embeds),
            negative_prompt_embeds=None if negative is None else self._batch(negative),
            guidance_scale=1.0 if unguided else guidance[expert],
        )
        return velocity.cpu(), inputs.to("cpu")

    def base(self) -> AbstractContextManager[None]:
        """With the adapters off."""
        return self.model.without_adapters()

    def _batch(self, array: Float32) -> Tensor:
        return torch.from_numpy(array)[None].to(self._device)


class LocalSide:
    """The local engine. It generates with the weights of ``model``, in training the trainer's own."""

    def __init__(self, engine: LocalEngine, model: WanModel) -> None:
        self._engine = engine
        self._model = model

    def push(self, adapter: Adapter, *, policy_version: int) -> None:
        set_adapter(self._model, adapter)

    def rollout(self, request: RolloutRequest, sample_indices: Sequence[int]) -> list[Answer]:
        return self._engine.generate_debug(request, sample_indices)


class ServerSide:
    """A started SGLang engine, and the way on which adapters reach it.

    Args:
        runner: runs the engine's coroutines.
        share_on: device on which adapters are put for the server's workers to open.
    """

    def __init__(self, engine: SGLangEngine, runner: asyncio.Runner, config: Config, *, share_on: torch.device) -> None:
        self._engine = engine
        self._runner = runner
        self._config = config
        self._share_on = share_on

    def push(self, adapter: Adapter, *, policy_version: int) -> None:
        for module, tensors in adapter.items():
            self._push_module(module, tensors, policy_version=policy_version)

    def _push_module(self, module: str, tensors: Mapping[str, Tensor], *, policy_version: int) -> None:
        model, rollout = self._config.model, self._config.rollout
        update = make_update(
            tensors.items(),
            target_module=module,
            alpha=model.lora_alpha,
            rank=model.lora_rank,
            policy_version=policy_version,
        )
        consumers = rollout.tp_size * rollout.sp_size
        payload = serialize_update(update, self._share_on, consumers=consumers)
        push = payload.as_push()
        try:
            report = self._runner.run(self._engine.apply_weights(push))
        finally:
            payload.release()
        prefixes = len({layer_prefix(name) for name in push.digests})
        verify_reports([report], tensors=len(push.digests), layer_prefixes=prefixes, policy_version=policy_version)

    def rollout(self, request: RolloutRequest, sample_indices: Sequence[int]) -> list[Answer]:
        return self._runner.run(self._engine.generate_debug(request, sample_indices))


def adapter_parameters(model: WanModel) -> Iterator[tuple[str, str, torch.nn.Parameter]]:
    """(component, name, parameter) of every injected adapter tensor."""
    for module, transformer in model.items():
        for name, parameter in trainable_parameters(transformer):
            yield module, name, parameter


@torch.no_grad()
def set_adapter(model: WanModel, adapter: Adapter) -> None:
    """Copy ``adapter`` into the injected adapters."""
    for module, name, parameter in adapter_parameters(model):
        parameter.copy_(adapter[module][name])


def held_adapter(model: WanModel) -> dict[str, dict[str, Tensor]]:
    """The injected adapters as they are, on the CPU."""
    held: dict[str, dict[str, Tensor]] = {}
    for module, name, parameter in adapter_parameters(model):
        held.setdefault(module, {})[name] = parameter.detach().cpu().clone()
    return held


@torch.no_grad()
def random_adapter(model: WanModel, *, seed: int, alpha: int, rank: int) -> dict[str, dict[str, Tensor]]:
    """An adapter that is not zero, as strong in each layer as the layer's own weights allow."""
    generator = torch.Generator().manual_seed(seed)
    adapter: dict[str, dict[str, Tensor]] = {}
    for module, name, parameter in adapter_parameters(model):
        tensors = adapter.setdefault(module, {})
        draw = torch.randn(parameter.shape, generator=generator)
        if ".lora_A." in name:
            tensors[name] = draw / parameter.shape[1] ** 0.5
            continue
        weight = model[module].get_submodule(layer_prefix(name)).base_layer.weight
        # Of inputs x with |x| = 1 per element: |W x| per output element is ||W|| / sqrt(out), |A x| is 1.
        own = float(weight.float().norm()) / weight.shape[0] ** 0.5
        tensors[name] = draw * (_STRENGTH * own * rank / alpha / rank**0.5)
    return adapter


def encode_references(
    folder: ModelFolder, requests: Sequence[RolloutRequest], *, device: torch.device
) -> list[Conditioning]:
    """What the record of each request should condition on, encoded here. The encoders are gone when this returns.

    Raises:
        EngineError: an image that cannot be read.
    """
    text, codec = PromptEncoder(folder.path, device), VideoCodec(folder.path, device)
    return [
        encode_conditioning(
            request.record, request.sampling, text=text, codec=codec, image_conditioning=folder.image_conditioning
        )
        for request in requests
    ]
