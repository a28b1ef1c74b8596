"""The transformers of one checkpoint as one model: loaded, called as the engine calls them, each with its own guidance. In: a
model folder, then states with their conditions. Out: inputs and velocities. It knows no sharding, no optimizer and no files
but the checkpoint's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from diffusers import WanTransformer3DModel
from torch import Tensor, nn

from miles_wan.wan.conditioning import ModelInput, build_model_input
from miles_wan.wan.experts import Experts
from miles_wan.wan.facts import ImageConditioning
from miles_wan.wan.family import ModelFolder
from miles_wan.wan.forward import guided_velocity
from miles_wan.wan.load import DTYPES, load_transformer, meta_transformer
from miles_wan.wan.quantization import Quantization


class WanModel(nn.Module):
    """The transformers of a checkpoint by component name, all of them or a part.

    Args:
        transformers: plain or sharded, in the order of ``experts``.
        experts: of the checkpoint, those that are not loaded included.
        image_conditioning: how a first image enters (``ModelFolder.image_conditioning``).
        dtype: compute type of the transformers; timesteps and states stay float32.
    """

    def __init__(
        self,
        transformers: Mapping[str, WanTransformer3DModel],
        *,
        experts: Experts,
        image_conditioning: ImageConditioning,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self._transformers = nn.ModuleDict(transformers)
        self.experts = experts
        self.image_conditioning = image_conditioning
        self.dtype = dtype

    def __getitem__(self, name: str) -> WanTransformer3DModel:
        transformer = self._transformers[name]
        assert isinstance(transformer, WanTransformer3DModel)
        return transformer

    @property
    def names(self) -> tuple[str, ...]:
        """The transformers that are loaded, that of the high noise first."""
        return tuple(name for name in self.experts.names if name in self._transformers)

    def items(self) -> Iterator[tuple[str, WanTransformer3DModel]]:
        """(component name, transformer) of those that are loaded."""
        for name in self.names:
            yield name, self[name]

    def input(
        self, latents: Tensor, timestep: Tensor, *, condition_latent: Tensor | None, has_condition: Tensor
    ) -> ModelInput:
        """What a transformer is called with (``build_model_input``)."""
        return build_model_input(
            latents,
            timestep,
            condition_latent=condition_latent,
            has_condition=has_condition,
            image_conditioning=self.image_conditioning,
        )

    def velocity(
        self,
        expert: str,
        inputs: ModelInput,
        *,
        prompt_embeds: Tensor,
        negative_prompt_embeds: Tensor | None,
        guidance_scale: float,
    ) -> Tensor:
        """Velocity [B, C, F, h, w] of one expert after guidance, in float32. It does not ask whether the timesteps are the
        expert's: who routes, routes (``experts``)."""
        return guided_velocity(
            self[expert],
            inputs,
            prompt_embeds=prompt_embeds,
            negative_prompt_embeds=negative_prompt_embeds,
            guidance_scale=guidance_scale,
            dtype=self.dtype,
        )

    @contextmanager
    def without_adapters(self) -> Iterator[None]:
        """The frozen base computes inside this context."""
        # diffusers sets peft_config with the first adapter; an expert that is not trained has none.
        adapted = [transformer for _, transformer in self.items() if getattr(transformer, "peft_config", None)]
        for transformer in adapted:
            transformer.disable_adapters()
        try:
            yield
        finally:
            for transformer in adapted:
                transformer.enable_adapters()


def load_model(
    folder: ModelFolder, *, dtype: str, names: Sequence[str] | None = None, quantization: Quantization = "none"
) -> WanModel:
    """The transformers of a checkpoint in evaluation mode on the CPU.

    Args:
        dtype: ``bf16`` or ``fp32``.
        names: components to load; by default all.
        quantization: how the linear layers of their blocks are stored.

    Raises:
        InputError: weights that do not fit their configuration.
    """
    wanted = [name for name in folder.experts if names is None or name in names]
    loaded = {
        name: load_transformer(folder.path, dtype=dtype, subfolder=name, quantization=quantization) for name in wanted
    }
    return _model(folder, loaded, dtype)


def meta_model(
    folder: ModelFolder, *, dtype: str, names: Sequence[str] | None = None, quantization: Quantization = "none"
) -> WanModel:
    """As ``load_model`` on the meta device: names, shapes and types, no memory. Raises InputError."""
    wanted = [name for name in folder.experts if names is None or name in names]
    built = {name: meta_transformer(folder.transformer, dtype=dtype, quantization=quantization) for name in wanted}
    return _model(folder, built, dtype)


def _model(folder: ModelFolder, transformers: Mapping[str, WanTransformer3DModel], dtype: str) -> WanModel:
    return WanModel(
        transformers,
        experts=folder.routing,
        image_conditioning=folder.image_conditioning,
        dtype=DTYPES[dtype],
    )
