"""The two sides that are compared, each behind two or three calls: a trainer's transformer, and an engine that takes
adapters and answers requests. Nothing here compares anything.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from diffusers import WanTransformer3DModel
from torch import Tensor

from miles_wan.config import Config
from miles_wan.records import Conditioning, Float32, RolloutRequest
from miles_wan.rollout.base import Answer
from miles_wan.rollout.local import LocalEngine
from miles_wan.rollout.local.conditioning import encode_conditioning
from miles_wan.rollout.sglang.engine import SGLangEngine
from miles_wan.rollout.sglang.payload import serialize_update
from miles_wan.wan.conditioning import ModelInput, build_model_input
from miles_wan.wan.family import ModelFolder
from miles_wan.wan.forward import guided_velocity
from miles_wan.wan.load import DTYPES
from miles_wan.wan.lora import layer_prefix, trainable_parameters
from miles_wan.wan.text import PromptEncoder
from miles_wan.wan.video import VideoCodec
from miles_wan.weight_sync import make_update, verify_reports

Adapter = Mapping[str, Tensor]

# A random adapter moves the output of each of its layers by about this share of what the layer alone gives.
_STRENGTH = 0.1


class EngineSide(Protocol):
    """An engine as the comparison uses it."""

    def push(self, adapter: Adapter, *, policy_version: int) -> None:
        """Replace the adapter, verified. Raises WeightSyncError, EngineError."""

    def rollout(self, request: RolloutRequest, sample_indices: Sequence[int]) -> list[Answer]:
        """Samples of a request with what the engine did, the first with its conditioning. Raises EngineError."""


class Trainer:
    """The transformer with its adapters, called as training calls it.

    Args:
        transformer: with injected adapters, on ``device``.
        dtype: its compute type.
        expand_timesteps: the checkpoint's flag.
    """

    def __init__(
        self, transformer: WanTransformer3DModel, *, dtype: str, expand_timesteps: bool, device: torch.device
    ) -> None:
        self.transformer = transformer
        self._dtype = DTYPES[dtype]
        self._expand_timesteps = expand_timesteps
        self._device = device

    @torch.no_grad()
    def hold(self, adapter: Adapter) -> None:
        """Take over the adapter."""
        set_adapter(self.transformer, adapter)

    @torch.no_grad()
    def velocity(
        self,
        state: Float32,
        sigma: float,
        conditioning: Conditioning,
        *,
        has_condition: bool,
        guidance_scale: float,
        scalar_timestep: bool = False,
    ) -> tuple[Tensor, ModelInput]:
        """Guided velocity [1, C, F, h, w] at ``state`` [C, F, h, w], and the model's input, both on the CPU.

        Args:
            scalar_timestep: give the tokens of a given first frame the timestep of the others (what is wrong).
        """
        inputs = build_model_input(
            self._batch(state),
            torch.tensor([sigma * 1000], device=self._device),
            condition_latent=None
            if conditioning.condition_latent is None
            else self._batch(conditioning.condition_latent),
            has_condition=torch.tensor([has_condition]),
            expand_timesteps=self._expand_timesteps,
        )
        if scalar_timestep:
            timestep = torch.tensor([sigma * 1000], device=self._device)
            inputs = ModelInput(inputs.hidden_states, timestep, inputs.mask)
        negative = conditioning.negative_prompt_embeds
        velocity = guided_velocity(
            self.transformer,
            inputs,
            prompt_embeds=self._batch(conditioning.prompt_embeds),
            negative_prompt_embeds=None if negative is None else self._batch(negative),
            guidance_scale=guidance_scale,
            dtype=self._dtype,
        )
        return velocity.cpu(), ModelInput(inputs.hidden_states.cpu(), inputs.timestep.cpu(), inputs.mask.cpu())

    @contextmanager
    def base(self) -> Iterator[None]:
        """With the adapter off."""
        self.transformer.disable_adapters()
        try:
            yield
        finally:
            self.transformer.enable_adapters()

    def _batch(self, array: Float32) -> Tensor:
        return torch.from_numpy(array)[None].to(self._device)


class LocalSide:
    """The local engine. It generates with the weights of ``transformer``, in training the trainer's own."""

    def __init__(self, engine: LocalEngine, transformer: WanTransformer3DModel) -> None:
        self._engine = engine
        self._transformer = transformer

    def push(self, adapter: Adapter, *, policy_version: int) -> None:
        set_adapter(self._transformer, adapter)

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
        model, rollout = self._config.model, self._config.rollout
        update = make_update(
            adapter.items(),
            target_module="transformer",
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


@torch.no_grad()
def set_adapter(transformer: WanTransformer3DModel, adapter: Adapter) -> None:
    """Copy ``adapter`` into the injected adapters."""
    for name, parameter in trainable_parameters(transformer):
        parameter.copy_(adapter[name])


def held_adapter(transformer: WanTransformer3DModel) -> dict[str, Tensor]:
    """The injected adapters as they are, on the CPU."""
    return {name: parameter.detach().cpu().clone() for name, parameter in trainable_parameters(transformer)}


@torch.no_grad()
def random_adapter(transformer: WanTransformer3DModel, *, seed: int, alpha: int, rank: int) -> dict[str, Tensor]:
    """An adapter that is not zero, as strong in each layer as the layer's own weights allow."""
    generator = torch.Generator().manual_seed(seed)
    adapter = {}
    for name, parameter in trainable_parameters(transformer):
        draw = torch.randn(parameter.shape, generator=generator)
        if ".lora_A." in name:
            adapter[name] = draw / parameter.shape[1] ** 0.5
            continue
        weight = transformer.get_submodule(layer_prefix(name)).base_layer.weight
        # Of inputs x with |x| = 1 per element: |W x| per output element is ||W|| / sqrt(out), |A x| is 1.
        own = float(weight.float().norm()) / weight.shape[0] ** 0.5
        adapter[name] = draw * (_STRENGTH * own * rank / alpha / rank**0.5)
    return adapter


def encode_references(
    folder: ModelFolder, requests: Sequence[RolloutRequest], *, device: torch.device
) -> list[Conditioning]:
    """What the record of each request should condition on, encoded here. The encoders are gone when this returns.

    Raises:
        EngineError: an image that cannot be read.
    """
    text, codec = PromptEncoder(folder.path, device), VideoCodec(folder.path, device)
    return [encode_conditioning(request.record, request.sampling, text=text, codec=codec) for request in requests]
