"""The training worker of one rank: loads, adapts and shards the transformers, then turns trajectories into updates.

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

from miles_wan.config import Config
from miles_wan.errors import MilesWanError
from miles_wan.faults import reach
from miles_wan.records import TrainItem
from miles_wan.training import checkpoint
from miles_wan.training.ema import AdapterAverage
from miles_wan.training.forward_process import ForwardObjective
from miles_wan.training.mesh import MeshMemory, estimate, held_bytes
from miles_wan.training.optimizer import build_optimizer, clip_gradients
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
from miles_wan.wan.family import ModelFolder
from miles_wan.wan.lora import (
    ModelReport,
    adapter_folder,
    add_adapters,
    report,
    save_adapter,
    trainable_parameters,
)
from miles_wan.wan.model import WanModel, load_model

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rank:
    """Who this worker is: its rank, the number of ranks, where they meet, and its device."""

    rank: int
    world_size: int
    init_method: str
    device: str


class TrainingWorker:
    """FSDP2 LoRA training of the transformers of a Wan checkpoint, all of them under one optimizer.

    Args:
        config: the run's configuration.
        rank: this worker's place.
        folder: the checkpoint.
    """

    def __init__(self, config: Config, rank: Rank, *, folder: ModelFolder) -> None:
        self._config = config
        self.device = torch.device(rank.device)
        init_process_group(device=self.device, rank=rank.rank, world_size=rank.world_size, init_method=rank.init_method)
        self.trained = folder.routing.chosen(config.model.train_experts)
        # A frozen expert is needed where this process generates, too.
        held = folder.experts if config.rollout.engine == "local" else self.trained
        self.model = load_model(folder, dtype=config.model.dtype, names=held, quantization=config.model.quantization)
        add_adapters(self.model, config.model, names=self.trained, seed=config.seed)
        self.report: ModelReport = report(*(transformer for _, transformer in self.model.items()))
        memory = estimate(self.model, ranks=rank.world_size)
        for _, transformer in self.model.items():
            shard_transformer(
                transformer, device=self.device, activation_checkpointing=config.training.activation_checkpointing
            )
        _check_sharded(self.model, memory, rank=rank.rank)
        self.sharded_blocks = sum(count_sharded_blocks(transformer) for _, transformer in self.model.items())
        parameters = {name: self._parameters(name) for name in self.trained}
        training = config.training
        self.average = (
            AdapterAverage(
                [parameter for own in parameters.values() for parameter in own],
                decay=training.ema_decay,
                rise=training.ema_rise,
            )
            if training.ema_decay is not None
            else None
        )
        self.velocity = VelocityModel(self.model, self.average, config)
        self.optimizer, self.scheduler = build_optimizer(
            parameters,
            training.optimizer,
            total_steps=config.num_rollouts * config.algorithm.optimizer_steps_per_rollout,
        )

    def _parameters(self, name: str) -> list[torch.nn.Parameter]:
        return [parameter for _, parameter in trainable_parameters(self.model[name])]

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
        means = Means(self.model.experts)
        parity: dict[str, float] = {}
        grad_norms: dict[str, float] = {}
        learning_rate = 0.0
        for index in range(len(steps)):
            self._accumulate(passes, index, means, rollout_id=rollout_id)
            if index == 0:
                parity = passes.parity()
            learning_rate = float(self.scheduler.get_last_lr()[0])
            for name, norm in self._step(rollout_id).items():
                grad_norms[name] = max(norm, grad_norms.get(name, 0.0))
        return {
            **means.reduced(self.device),
            **parity,
            **grad_norms,
            "train/lr": learning_rate,
            "train/optimizer_steps": float(len(steps)),
        }

    def _passes(self, steps: Sequence[Sequence[TrainItem]], rollout_id: int) -> Passes:
        if self._config.algorithm.loss == "nft":
            return ForwardPasses(
                ForwardObjective(self.velocity, self._config),
                self._config,
                steps,
                rollout_id=rollout_id,
                experts=self.model.experts,
                trained=self.trained,
                device=self.device,
            )
        objective = PolicyObjective(self.velocity, self._config)
        return PolicyPasses(objective, self._config, steps, experts=self.model.experts, device=self.device)

    def _accumulate(self, passes: Passes, step: int, means: Means, *, rollout_id: int) -> None:
        """Forward and backward of one optimizer step; gradients are means over all ranks' pairs, of all experts."""
        pairs, losses = passes.pairs(step), passes.losses(step)
        for name, count in passes.counts(step).items():
            for number in range(count):
                # FSDP2 reduces gradients of the frozen base never, of the adapters once: after the last micro-batch.
                self.model[name].set_requires_gradient_sync(number == count - 1)
                scored = next(losses)  # one at a time: they are large
                (scored.loss * (scored.size / pairs)).backward()
                means.add(scored)
                reach("train/micro_batch", rollout_id)

    def _step(self, rollout_id: int) -> dict[str, float]:
        """Clip, step, and the gradient norms before that as metrics: of everything, and with two experts of each."""
        norms = clip_gradients(
            {name: self._parameters(name) for name in self.trained},
            self._config.training.optimizer.max_grad_norm,
            moment=f"rollout {rollout_id}",
        )
        reach("train/before_step", rollout_id)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        if self.average is not None:
            self.average.update()
        experts, total = self.model.experts, norms.pop(None)
        each = {f"train/grad_norm/{experts.label(str(name))}": norm for name, norm in norms.items()}
        return {"train/grad_norm": total, **(each if len(experts.names) > 1 else {})}

    def adapters(self, weights: str = "policy") -> dict[str, dict[str, Tensor]]:
        """The whole adapter of each trained expert (by component name) on the CPU, on every rank (a collective), in the
        type the forward computes with.

        Args:
            weights: ``policy``, or ``ema`` for the average.
        """
        with self.using(weights):
            return {
                expert: {
                    name: full_tensor(parameter.detach()).cpu()
                    for name, parameter in trainable_parameters(self.model[expert])
                }
                for expert in self.trained
            }

    def using(self, weights: str) -> AbstractContextManager[None]:
        """The transformers compute with these ``weights`` inside this context: ``policy`` or ``ema``."""
        return self.velocity.averaged() if weights == "ema" else nullcontext()

    def check_ranks_agree(
        self, adapters: Mapping[str, Mapping[str, Tensor]], *, policy_version: int, weights: str = "policy"
    ) -> str:
        """Compare the digest of the gathered adapters over all ranks (a collective) and log it.

        Raises:
            MilesWanError: the ranks hold different adapters.
        """
        digest = hashlib.sha256()
        for expert, tensors in adapters.items():
            for name, tensor in tensors.items():
                digest.update(f"{expert}.{name}".encode())
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
        return checkpoint.TrainingState(self.model, self.optimizer, self.scheduler, self.average)

    def export(self, directory: Path, *, weights: str = "policy") -> None:
        """Write the adapters in diffusers format (a collective; rank 0 writes): into ``directory``, with two experts each
        into a folder with its component's name."""
        adapters = self.adapters(weights)
        if dist.get_rank() == 0:
            settings = self._config.model
            for name, tensors in adapters.items():
                place = adapter_folder(directory, name, self.model.experts)
                save_adapter(place, tensors, rank=settings.lora_rank, alpha=settings.lora_alpha)
        dist.barrier()

    def close(self) -> None:
        """Leave the process group."""
        dist.destroy_process_group()


def _check_sharded(model: WanModel, memory: MeshMemory, *, rank: int) -> None:
    """Say what the mesh costs, and that this rank holds its share and not the whole.

    Raises:
        MilesWanError: the rank holds more than its share.
    """
    held = held_bytes(model)
    if held > memory.weight_bytes:
        raise MilesWanError(
            f"rank {rank} of {memory.ranks} holds {held} bytes of weights, its share is {memory.weight_bytes}: "
            "the mesh does not shard the model"
        )
    if rank == 0:
        logger.info("%s", memory.text)
