"""The training worker of one rank: loads, adapts and shards the transformer, then turns trajectories into updates.

In: ``TrainItem`` lists, already split by rank. Out: metrics (equal on all ranks), adapters, checkpoints. Knows nothing
of Ray, engines or rewards.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_scheduler

from miles_wan.config import Config
from miles_wan.errors import MilesWanError
from miles_wan.faults import reach
from miles_wan.records import TrainItem, derived_seed
from miles_wan.training import checkpoint
from miles_wan.training.ema import AdapterAverage
from miles_wan.training.forward_process import ForwardObjective
from miles_wan.training.mesh import MeshMemory, estimate, held_bytes
from miles_wan.training.passes import ForwardPasses, Passes, PolicyPasses
from miles_wan.training.policy import PolicyObjective
from miles_wan.training.sharding import (
    count_sharded_blocks,
    full_tensor,
    init_process_group,
    shard_transformer,
)
from miles_wan.training.statistics import Means
from miles_wan.training.velocity import VelocityModel
from miles_wan.wan.load import load_transformer
from miles_wan.wan.lora import ModelReport, inject_lora, load_adapter, report, save_adapter, trainable_parameters

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rank:
    """Who this worker is: its rank, the number of ranks, where they meet, and its device."""

    rank: int
    world_size: int
    init_method: str
    device: str


class TrainingWorker:
    """FSDP2 LoRA training of one Wan transformer.

    Args:
        config: the run's configuration.
        rank: this worker's place.
        model_path: local folder of the checkpoint.
        expand_timesteps: the checkpoint's flag: first-frame conditioning with per-token timesteps.
    """

    def __init__(self, config: Config, rank: Rank, *, model_path: Path, expand_timesteps: bool) -> None:
        self._config = config
        self.device = torch.device(rank.device)
        init_process_group(device=self.device, rank=rank.rank, world_size=rank.world_size, init_method=rank.init_method)
        model = config.model
        transformer = load_transformer(model_path, dtype=model.dtype)
        inject_lora(
            transformer,
            rank=model.lora_rank,
            alpha=model.lora_alpha,
            targets=model.lora_targets,
            seed=derived_seed(config.seed, "lora"),
        )
        if model.init_adapter is not None:
            load_adapter(transformer, Path(model.init_adapter), alpha=model.lora_alpha)
        self.report: ModelReport = report(transformer)
        memory = estimate(transformer, ranks=rank.world_size)
        shard_transformer(
            transformer, device=self.device, activation_checkpointing=config.training.activation_checkpointing
        )
        _check_sharded(transformer, memory, rank=rank.rank)
        self.transformer = transformer
        self.sharded_blocks = count_sharded_blocks(transformer)
        parameters = [parameter for _, parameter in trainable_parameters(transformer)]
        training = config.training
        self.average = (
            AdapterAverage(parameters, decay=training.ema_decay, rise=training.ema_rise)
            if training.ema_decay is not None
            else None
        )
        self.velocity = VelocityModel(transformer, self.average, config, expand_timesteps=expand_timesteps)
        settings = training.optimizer
        self.optimizer = torch.optim.AdamW(
            parameters,
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
        )
        self.scheduler: LRScheduler = get_scheduler(
            "constant_with_warmup" if settings.schedule == "constant" else settings.schedule,
            self.optimizer,
            num_warmup_steps=settings.warmup_steps,
            num_training_steps=config.num_rollouts * config.algorithm.optimizer_steps_per_rollout,
        )

    def update(self, steps: Sequence[Sequence[TrainItem]], *, rollout_id: int) -> dict[str, float]:
        """Train on one rollout.

        Args:
            steps: per optimizer step, this rank's items; every rank has equally many.

        Returns:
            Metrics ``train/...`` and ``parity/...``, reduced over all ranks.

        Raises:
            ParityError: engine and trainer disagree about a log-prob by more than ``algorithm.max_log_prob_gap``;
                raised on every rank before the first optimizer step, so that no weight has moved.
        """
        passes = self._passes(steps, rollout_id)
        means = Means()
        parity: dict[str, float] = {}
        grad_norms: list[float] = []
        learning_rate = 0.0
        for index in range(len(steps)):
            self._accumulate(passes, index, means, rollout_id=rollout_id)
            if index == 0:
                parity = passes.parity()
            learning_rate = float(self.scheduler.get_last_lr()[0])
            grad_norms.append(self._step(rollout_id))
        return {
            **means.reduced(self.device),
            **parity,
            "train/grad_norm": max(grad_norms),
            "train/lr": learning_rate,
            "train/optimizer_steps": float(len(steps)),
        }

    def _passes(self, steps: Sequence[Sequence[TrainItem]], rollout_id: int) -> Passes:
        if self._config.algorithm.loss == "nft":
            forward = ForwardObjective(self.velocity, self._config)
            return ForwardPasses(forward, self._config, steps, rollout_id=rollout_id, device=self.device)
        return PolicyPasses(PolicyObjective(self.velocity, self._config), self._config, steps, device=self.device)

    def _accumulate(self, passes: Passes, step: int, means: Means, *, rollout_id: int) -> None:
        """Forward and backward of one optimizer step; gradients are means over all ranks' pairs."""
        pairs, done = passes.pairs(step), 0
        losses = passes.losses(step)
        size = self._config.training.micro_batch_size
        while done < pairs:
            # FSDP2 reduces gradients of the frozen base never, of the adapters once: after the last micro-batch.
            self.transformer.set_requires_gradient_sync(done + size >= pairs)
            scored = next(losses)  # one at a time: they are large
            done += scored.size
            (scored.loss * (scored.size / pairs)).backward()
            means.add(scored)
            reach("train/micro_batch", rollout_id)

    def _step(self, rollout_id: int) -> float:
        parameters = [parameter for _, parameter in trainable_parameters(self.transformer)]
        norm = full_tensor(torch.nn.utils.clip_grad_norm_(parameters, self._config.training.optimizer.max_grad_norm))
        if not bool(torch.isfinite(norm)):
            raise MilesWanError(
                f"the gradient norm is {float(norm)} in rollout {rollout_id}: no weight was changed. "
                "Lower training.optimizer.lr or resume from the last checkpoint."
            )
        reach("train/before_step", rollout_id)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        if self.average is not None:
            self.average.update()
        return float(norm)

    def adapter(self, weights: str = "policy") -> dict[str, Tensor]:
        """The whole adapter on the CPU, on every rank (a collective), in the type the forward computes with.

        Args:
            weights: ``policy``, or ``ema`` for its average.
        """
        with self.using(weights):
            return {
                name: full_tensor(parameter.detach()).cpu()
                for name, parameter in trainable_parameters(self.transformer)
            }

    def using(self, weights: str) -> AbstractContextManager[None]:
        """The transformer computes with these ``weights`` inside this context: ``policy`` or ``ema``."""
        return self.velocity.averaged() if weights == "ema" else nullcontext()

    def check_ranks_agree(self, tensors: Mapping[str, Tensor], *, policy_version: int, weights: str = "policy") -> str:
        """Compare the digest of the gathered adapter over all ranks (a collective) and log it.

        Raises:
            MilesWanError: the ranks hold different adapters.
        """
        digest = hashlib.sha256()
        for name, tensor in tensors.items():
            digest.update(name.encode())
            digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        own = digest.hexdigest()
        gathered: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(gathered, own)
        if len(set(gathered)) != 1:
            raise MilesWanError(f"the ranks hold different adapters: {gathered}; training is not synchronised")
        if dist.get_rank() == 0:
            logger.info(
                "adapter version %d (%s): sha256 %s on all %d ranks", policy_version, weights, own[:16], len(gathered)
            )
        return own

    def save_checkpoint(self, directory: Path, *, rollout_id: int) -> None:
        """Write adapters, optimizer, schedule and random state of all ranks into ``directory`` (a collective)."""
        checkpoint.save(directory, self._state(), rollout_id=rollout_id)

    def load_checkpoint(self, directory: Path) -> None:
        """Restore what ``save_checkpoint`` wrote (a collective)."""
        checkpoint.load(directory, self._state())

    def _state(self) -> checkpoint.TrainingState:
        return checkpoint.TrainingState(self.transformer, self.optimizer, self.scheduler, self.average)

    def export(self, directory: Path, *, weights: str = "policy") -> None:
        """Write the adapter in diffusers format (a collective; rank 0 writes)."""
        tensors = self.adapter(weights)
        if dist.get_rank() == 0:
            model = self._config.model
            save_adapter(directory, tensors, rank=model.lora_rank, alpha=model.lora_alpha)
        dist.barrier()

    def close(self) -> None:
        """Leave the process group."""
        dist.destroy_process_group()


def _check_sharded(transformer: torch.nn.Module, memory: MeshMemory, *, rank: int) -> None:
    """Say what the mesh costs, and that this rank holds its share and not the whole.

    Raises:
        MilesWanError: the rank holds more than its share.
    """
    held = held_bytes(transformer)
    if held > memory.weight_bytes:
        raise MilesWanError(
            f"rank {rank} of {memory.ranks} holds {held} bytes of weights, its share is {memory.weight_bytes}: "
            "the mesh does not shard the model"
        )
    if rank == 0:
        logger.info("%s", memory.text)
