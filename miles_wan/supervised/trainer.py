"""Both experts under one optimizer: the model of one rank, and its losses and steps. In: draws and the library of clips. Out:
losses of every sample of the batch, equal on all ranks, and weights that moved. It knows no file of a run and no schedule of
validation; it runs inside a process group.

    draws of a mixed batch -> by expert -> micro-batches (with fillers) -> forward, backward -> one clip, one AdamW step
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from miles_wan.algorithms import flow_matching_losses, noised, timestep_weights
from miles_wan.faults import reach
from miles_wan.supervised.config import SftConfig
from miles_wan.supervised.draws import Draw, MicroBatch, micro_batches
from miles_wan.supervised.encode import ClipLibrary, ClipTensors, EncodedClip
from miles_wan.timesteps import NUM_TRAIN_TIMESTEPS
from miles_wan.training.checkpoint import TrainingState
from miles_wan.training.mesh import MeshMemory, estimate
from miles_wan.training.optimizer import build_optimizer, clip_gradients
from miles_wan.training.sharding import shard_transformer
from miles_wan.wan.family import ModelFolder
from miles_wan.wan.lora import ModelReport, add_adapters, report, trainable_parameters
from miles_wan.wan.model import WanModel, load_model

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Step:
    """What one optimizer step was: ``losses`` [N] of the batch's samples in the order of their positions, before weighting;
    gradient norms before clipping, of everything (``None``) and of each expert that had samples."""

    losses: list[float]
    grad_norms: Mapping[str | None, float]
    learning_rate: float


class SupervisedTrainer:
    """Loads, adapts and shards the transformers, and steps them together.

    Args:
        config: the run's configuration.
        folder: the checkpoint.
        library: where the tensors of clips come from.
        device: of this rank.
        loaded: components to load, the trained ones among them.
    """

    def __init__(
        self,
        config: SftConfig,
        folder: ModelFolder,
        library: ClipLibrary,
        *,
        device: torch.device,
        loaded: Sequence[str],
    ) -> None:
        self._config = config
        self._library = library
        self._device = device
        self.is_full = config.training.method == "full"
        self.trained = folder.routing.chosen(config.model.train_experts)
        self.model = _load(config, folder, names=loaded, trained=self.trained)
        self.report: ModelReport = report(*(transformer for _, transformer in self.model.items()))
        self.memory: MeshMemory = estimate(self.model, ranks=dist.get_world_size())
        for _, transformer in self.model.items():
            shard_transformer(
                transformer, device=device, activation_checkpointing=config.training.activation_checkpointing
            )
        self.optimizer, self.scheduler = build_optimizer(
            {name: self._parameters(name) for name in self.trained},
            config.training.optimizer,
            total_steps=config.training.num_steps,
        )

    def step(self, draws: Sequence[Draw], clips: Sequence[EncodedClip], *, number: int) -> Step:
        """One optimizer step over a whole mixed batch (a collective). The loss is the mean over its samples; an expert without
        any gets no gradient, hence no update and no decay.

        Args:
            draws: of the whole batch, the same on all ranks.
            clips: what their clip indices mean.
            number: of the step, for messages.

        Raises:
            MilesWanError: the gradient is not finite; no weight was changed.
        """
        ranks, losses = dist.get_world_size(), torch.zeros(len(draws), dtype=torch.float64)
        for expert, batches in self._plan(draws, clips).items():
            for place, batch in enumerate(batches):
                # The gradients of adapters are small: reduced once, after the last micro-batch. Those of whole
                # transformers are kept in shards instead of being held whole.
                last = place == len(batches) - 1
                self.model[expert].set_requires_gradient_sync(self.is_full or last)
                values, weights = self._losses(expert, batch, clips)
                # FSDP2 takes the mean over the ranks.
                scale = ranks / len(draws) if batch.size else 0.0
                ((values * weights).sum() * scale).backward()
                _note(losses, batch, values)
                reach("sft/micro_batch", number)
        learning_rate = float(self.scheduler.get_last_lr()[0])
        norms = self._update(number)
        return Step(_summed(losses, self._device), norms, learning_rate)

    @torch.no_grad()
    def losses(self, draws: Sequence[Draw], clips: Sequence[EncodedClip]) -> list[float]:
        """Loss of every draw, without weights (a collective)."""
        losses = torch.zeros(len(draws), dtype=torch.float64)
        for expert, batches in self._plan(draws, clips).items():
            for batch in batches:
                _note(losses, batch, self._losses(expert, batch, clips)[0])
        return _summed(losses, self._device)

    def state(self) -> TrainingState:
        """What a checkpoint holds of this trainer."""
        return TrainingState(self.model, self.optimizer, self.scheduler, None)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """The precision of every forward: whole transformers are float32 weights and compute in ``model.dtype``. Casts of
        weights are not kept: those of gathered blocks would add up to the whole transformer, unsharded, on every rank."""
        with torch.autocast(
            self._device.type,
            torch.bfloat16,
            enabled=self.is_full and self._config.model.dtype == "bf16",
            cache_enabled=False,
        ):
            yield

    def _plan(self, draws: Sequence[Draw], clips: Sequence[EncodedClip]) -> dict[str, list[MicroBatch]]:
        return micro_batches(
            draws,
            [clip.size for clip in clips],
            experts=self.model.experts,
            rank=dist.get_rank(),
            ranks=dist.get_world_size(),
            micro_batch_size=self._config.training.micro_batch_size,
        )

    def _losses(self, expert: str, batch: MicroBatch, clips: Sequence[EncodedClip]) -> tuple[Tensor, Tensor]:
        """Losses and weights [B] of one micro-batch."""
        loaded = [self._library.load(clips[draw.clip], with_text=draw.with_text) for draw in batch.draws]
        clean = torch.stack([tensors.latent for tensors in loaded]).to(self._device)
        noise = torch.stack([_noise(draw, tensors) for draw, tensors in zip(batch.draws, loaded, strict=True)])
        noise = noise.to(self._device)
        timestep = torch.tensor([draw.timestep for draw in batch.draws], dtype=torch.float32, device=self._device)
        sigma = timestep / NUM_TRAIN_TIMESTEPS
        given = torch.tensor([draw.with_image for draw in batch.draws])
        inputs = self.model.input(
            noised(clean, noise, sigma),
            timestep,
            condition_latent=self._conditions(loaded) if bool(given.any()) else None,
            has_condition=given.to(self._device),
        )
        with self.computing():
            velocity = self.model.velocity(
                expert,
                inputs,
                prompt_embeds=torch.stack([tensors.prompt_embeds for tensors in loaded]).to(self._device),
                negative_prompt_embeds=None,
                guidance_scale=1.0,
            )
        losses = flow_matching_losses(velocity, clean, noise, mask=inputs.mask)
        return losses, timestep_weights(self._config.timesteps.weighting, sigma)

    def _conditions(self, loaded: Sequence[ClipTensors]) -> Tensor:
        conditions = [tensors.condition for tensors in loaded if tensors.condition is not None]
        return torch.stack(conditions).to(self._device)

    def _update(self, number: int) -> dict[str | None, float]:
        """Clip, step, and the gradient norms before that."""
        norms = clip_gradients(
            {name: self._parameters(name) for name in self.trained},
            self._config.training.optimizer.max_grad_norm,
            moment=f"step {number + 1}",
        )
        reach("sft/before_step", number)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return norms

    def _parameters(self, name: str) -> list[nn.Parameter]:
        return [parameter for _, parameter in trainable_parameters(self.model[name])]


def _load(config: SftConfig, folder: ModelFolder, *, names: Sequence[str], trained: Sequence[str]) -> WanModel:
    """The transformers with what is trained of them: adapters, or all weights in float32."""
    if config.training.method == "lora":
        model = load_model(folder, dtype=config.model.dtype, names=names, quantization=config.model.quantization)
        add_adapters(model, config.model, names=trained, seed=config.seed)
        return model
    model = load_model(folder, dtype="fp32", names=names)
    for name, transformer in model.items():
        transformer.requires_grad_(name in trained)
        if config.model.dtype == "bf16":
            _keep_in_float32(transformer.condition_embedder.time_embedder)
    return model


def _keep_in_float32(module: Any) -> None:
    """Autocast leaves this module alone, as the released models are loaded (``_keep_in_fp32_modules``); their norms and
    modulation tables it computes in float32 by itself."""
    for device in ("cpu", "cuda"):
        module.forward = torch.autocast(device, enabled=False)(module.forward)


def _noise(draw: Draw, tensors: ClipTensors) -> Tensor:
    return torch.randn(tensors.latent.shape, generator=torch.Generator().manual_seed(draw.noise_seed))


def _note(losses: Tensor, batch: MicroBatch, values: Tensor) -> None:
    for draw, value in zip(batch.draws[: batch.size], values.detach().tolist(), strict=False):
        losses[draw.position] = value


def _summed(losses: Tensor, device: torch.device) -> list[float]:
    """Every position was filled in by one rank."""
    total = losses.to(device)
    dist.all_reduce(total)
    values: list[float] = total.tolist()
    return values
