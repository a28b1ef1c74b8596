"""The Ray actors: thin shells around an engine, a training worker and the rewards. They add process identity (logging,
device, threads) and resolve object references; the work is in the rooms.

Each is built by ``start``, not by its constructor: an error in a constructor reaches the driver as text only.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from miles_wan.config import Config
from miles_wan.records import PromptRecord, RewardInput, RolloutOutput, RolloutRequest, Score, TrainItem
from miles_wan.rollout.base import EngineInfo, SyncReport, WeightPush
from miles_wan.tracking.logs import configure_logging
from miles_wan.wan.family import ModelFolder

if TYPE_CHECKING:
    from miles_wan.rollout.sglang.payload import SharedPayload
    from miles_wan.wan.lora import ModelReport


@dataclass(frozen=True)
class TrainerInfo:
    """What a started rank says: counts of the model, FSDP2-wrapped blocks, UUID of its device (None on a CPU)."""

    report: ModelReport
    fsdp_blocks: int
    device_uuid: str | None


@ray.remote
class EngineActor:
    """Owns one SGLang server. An async actor: requests overlap, the engine's client bounds them."""

    def __init__(self, index: int) -> None:
        configure_logging(f"engine-{index}")

    async def start(self, config: Config, devices: Sequence[str], log_dir: str, checkpoint: str) -> EngineInfo:
        from miles_wan.rollout.sglang.engine import SGLangEngine
        from miles_wan.rollout.sglang.settings import engine_settings

        self._engine = SGLangEngine(engine_settings(config, devices, log_dir, checkpoint=Path(checkpoint)))
        # Blocking on purpose: the server must be a child of this long-lived thread, since it dies with its parent thread.
        return self._engine.start()

    async def generate(self, request: RolloutRequest, sample_indices: Sequence[int]) -> tuple[Any, ...]:
        """Frames of each sample, trajectory of each, the record's conditioning (with the group's first sample) and
        seconds: 2 n + 2 objects."""
        keep = sample_indices[0] == 0 and request.keeps_trajectory
        outputs = await self._engine.generate(request, sample_indices, return_conditioning=keep)
        return flat_outputs(outputs)

    async def apply_weights(self, push: WeightPush) -> SyncReport:
        return await self._engine.apply_weights(push)

    async def close(self) -> None:
        await self._engine.close()


@ray.remote
class TrainerActor:
    """One FSDP2 rank."""

    def __init__(self, rank: int) -> None:
        configure_logging(f"trainer-{rank}")
        self._rank = rank
        self._published: list[SharedPayload] = []

    def start(self, config: Config, init_method: str, folder: ModelFolder) -> TrainerInfo:
        """Build the worker (a collective) and describe it."""
        import torch

        from miles_wan.training.worker import Rank, TrainingWorker

        _prepare_process(config, processes=config.training.dp_size)
        device = "cuda:0" if config.cluster.device == "cuda" else "cpu"
        self._config = config
        self._worker = TrainingWorker(
            config,
            Rank(self._rank, config.training.dp_size, init_method, device),
            folder=folder,
        )
        if config.rollout.engine == "local":
            from miles_wan.rollout.local.engine import LocalEngine

            self._local = LocalEngine(folder, self._worker.model, device=self._worker.device)
        on_cuda = self._worker.device.type == "cuda"
        uuid = f"GPU-{torch.cuda.get_device_properties(self._worker.device).uuid}" if on_cuda else None
        return TrainerInfo(self._worker.report, self._worker.sharded_blocks, uuid)

    def hold(self, policy_version: int, weights: str) -> list[str]:
        """Generate with these weights from now on, if all ranks hold the same (a collective); the tensors' names."""
        adapters = self._worker.adapters(weights)
        self._worker.check_ranks_agree(adapters, policy_version=policy_version, weights=weights)
        self._generating = weights
        return [f"{module}.{name}" for module, tensors in adapters.items() for name in tensors]

    def prepare(self, records: Sequence[PromptRecord], guidance_scale: float) -> None:
        """Encode the prompts of the coming calls together: on a GPU the text encoder moves there once, not for each."""
        self._local.prepare(records, guidance_scale=guidance_scale)

    def generate(self, request: RolloutRequest, sample_indices: Sequence[int]) -> tuple[Any, ...]:
        """As ``EngineActor.generate``, by the local engine (a collective: every rank makes a call of this shape)."""
        keep = sample_indices[0] == 0 and request.keeps_trajectory
        with self._worker.using(self._generating):
            outputs = self._local.generate(request, sample_indices, return_conditioning=keep)
        return flat_outputs(outputs)

    def update(self, steps: Sequence[Sequence[TrainItem]], rollout_id: int) -> dict[str, float]:
        return self._worker.update([_resolved(items) for items in steps], rollout_id=rollout_id)

    def publish(self, policy_version: int, transport: str, consumers: int, weights: str) -> list[WeightPush]:
        """Gather the adapters or their average (every rank takes part) and put them where ``consumers`` engine workers can
        read them, one push for each trained expert; a rank with 0 consumers sends nothing."""
        from miles_wan.rollout.sglang.payload import serialize_update
        from miles_wan.weight_sync.update import make_update

        adapters = self._worker.adapters(weights)
        self._worker.check_ranks_agree(adapters, policy_version=policy_version, weights=weights)
        if consumers == 0:
            return []
        model = self._config.model
        device = self._worker.device if transport == "cuda_ipc" else "cpu"
        for module, tensors in adapters.items():
            update = make_update(
                tensors.items(),
                target_module=module,
                alpha=model.lora_alpha,
                rank=model.lora_rank,
                policy_version=policy_version,
            )
            self._published.append(serialize_update(update, device, consumers=consumers))
        return [payload.as_push() for payload in self._published]

    def release(self) -> None:
        """The engines have read the last publication: free it."""
        for payload in self._published:
            payload.release()
        self._published.clear()

    def save_checkpoint(self, directory: str, rollout_id: int) -> None:
        self._worker.save_checkpoint(Path(directory), rollout_id=rollout_id)

    def load_checkpoint(self, directory: str) -> None:
        self._worker.load_checkpoint(Path(directory))

    def export(self, directory: str, weights: str) -> None:
        self._worker.export(Path(directory), weights=weights)


@ray.remote
class RewardActor:
    """All rewards of the run on one device."""

    def __init__(self, index: int) -> None:
        configure_logging(f"reward-{index}")

    def start(self, config: Config) -> None:
        """Load the rewards."""
        from miles_wan.rewards.composite import RewardModel

        _prepare_process(config, processes=config.reward.num_workers)
        self._model = RewardModel(config.reward, "cuda:0" if config.cluster.device == "cuda" else "cpu")

    def score(self, batch: Sequence[RewardInput], validation: bool) -> tuple[list[Score], float]:
        """Scores in order, and the seconds this took. ``frames`` of each input is an object reference."""
        started = time.monotonic()
        frames = ray.get([item.frames for item in batch])
        resolved = [replace(item, frames=value) for item, value in zip(batch, frames, strict=True)]
        return self._model.score(resolved, validation=validation), time.monotonic() - started


def _resolved(items: Sequence[TrainItem]) -> list[TrainItem]:
    trajectories = ray.get([item.trajectory for item in items])
    conditionings = ray.get([item.conditioning for item in items])
    return [
        replace(item, trajectory=trajectory, conditioning=conditioning)
        for item, trajectory, conditioning in zip(items, trajectories, conditionings, strict=True)
    ]


def flat_outputs(outputs: Sequence[RolloutOutput]) -> tuple[Any, ...]:
    """The results of one call as Ray objects of their own: frames, trajectories, conditioning, seconds."""
    frames = [output.frames for output in outputs]
    trajectories = [output.trajectory for output in outputs]
    return *frames, *trajectories, outputs[0].conditioning, sum(output.seconds for output in outputs)


def _prepare_process(config: Config, *, processes: int) -> None:
    """Share the cores, or every process starts a thread for each and they slow each other down; and be deterministic if
    that is asked for, before anything is computed."""
    import torch

    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // processes))
    if config.deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # what cuBLAS needs to be it
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(True)
