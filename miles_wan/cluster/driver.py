"""The driver of a run: builds the actors, hands them to the controller, and writes what remains.

In: a checked configuration and a Ray cluster to connect to. Out: the exit of the run; in the output folder metrics,
videos, checkpoints, the adapter, ``reward.png`` and ``summary.json``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ray

from miles_wan.cluster.actors import EngineActor, RewardActor, TrainerActor, TrainerInfo
from miles_wan.cluster.checkpoints import CheckpointStore
from miles_wan.cluster.local_pool import LocalRollouts, LocalWeights
from miles_wan.cluster.placement import (
    ENGINE_SHARE,
    REWARD_SHARE,
    TRAINER_SHARE,
    Layout,
    actor_options,
    plan_layout,
    reserve,
)
from miles_wan.cluster.pools import EnginePool, RewardPool, TrainerGroup, WeightSync, gather
from miles_wan.cluster.requests import RequestPlanner
from miles_wan.cluster.resume import remembered, resume_faults
from miles_wan.combinations import batch_equation
from miles_wan.config import Config
from miles_wan.controller import Controller, Parts, Rollouts, RunState, Weights
from miles_wan.data import load_records
from miles_wan.errors import InputError
from miles_wan.records import Sample
from miles_wan.rollout.sglang.settings import engine_checkpoint
from miles_wan.tracking.media import write_video
from miles_wan.tracking.plot import plot_reward_curve
from miles_wan.tracking.summary import mean_ci95, paired_gain, write_summary
from miles_wan.tracking.tracker import Tracker
from miles_wan.wan.family import load_family, resolve_model
from miles_wan.weight_sync import choose_transport, device_numbers, sharing_ranks

logger = logging.getLogger(__name__)


class Actors:
    """The actors of a run on its placement group; ``close`` ends what they started."""

    def __init__(self, config: Config, layout: Layout, *, init_method: str) -> None:
        device = config.cluster.device
        folder = load_family(resolve_model(config.model.path))
        group = reserve(layout, device=device)
        slots = _slot_devices(layout, group, device=device)
        log_dir = str(Path(config.output_dir).resolve() / "logs")
        served = str(engine_checkpoint(config, folder).resolve()) if layout.engines else ""
        self.engines = [
            EngineActor.options(  # type: ignore[attr-defined]
                **actor_options(group, members[0], share=ENGINE_SHARE, device=device),
                max_concurrency=config.rollout.concurrency + 4,
            ).remote(index)
            for index, members in enumerate(layout.engines)
        ]
        self.trainers = [
            TrainerActor.options(  # type: ignore[attr-defined]
                **actor_options(group, slot, share=TRAINER_SHARE, device=device)
            ).remote(rank)
            for rank, slot in enumerate(layout.trainers)
        ]
        self.rewards = [
            RewardActor.options(  # type: ignore[attr-defined]
                **actor_options(group, slot, share=REWARD_SHARE, device=device)
            ).remote(index)
            for index, slot in enumerate(layout.rewards)
        ]
        engines = [
            engine.start.remote(config, [slots.numbers[slot] for slot in members], log_dir, served)
            for engine, members in zip(self.engines, layout.engines, strict=True)
        ]
        trainers = [trainer.start.remote(config, init_method, folder) for trainer in self.trainers]
        results = gather([*engines, *trainers, *(reward.start.remote(config) for reward in self.rewards)])
        self.trainer_infos: list[TrainerInfo] = results[len(engines) : len(engines) + len(trainers)]
        for index, info in enumerate(results[: len(engines)]):
            logger.info(
                "engine %d: %s, %s, started in %.0f s", index, info.pipeline_config, info.url, info.start_seconds
            )
        engine_uuids = [slots.uuids[slot] for members in layout.engines for slot in members if slots.uuids]
        trainer_uuids = [info.device_uuid for info in self.trainer_infos]
        self.transport = choose_transport(
            config.sync.transport,
            engine_uuids=engine_uuids,
            trainer_uuids=[uuid for uuid in trainer_uuids if uuid is not None],
        )
        self.sharing = sharing_ranks(self.transport, engine_uuids=engine_uuids, trainer_uuids=trainer_uuids)

    def close(self) -> None:
        """End the engines' servers; Ray ends the actors."""
        if not self.engines:
            return
        ray.wait([engine.close.remote() for engine in self.engines], num_returns=len(self.engines), timeout=30)


class _Track:
    """The tracker and its clock, as the controller wants them."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self.phase = tracker.phase
        self.advance = tracker.advance
        self.lap = tracker.clock.lap
        self.overlap = tracker.clock.add_overlap

    def log(self, step: int, metrics: Mapping[str, object]) -> None:
        self._tracker.log(step, metrics)

    def interval(self, values: Sequence[float]) -> float:
        return mean_ci95(values).ci95


class _Keep:
    """Checkpoints and validation videos in the output folder."""

    def __init__(
        self,
        config: Config,
        store: CheckpointStore,
        trainer: TrainerGroup,
        tracker: Tracker,
        *,
        settings: Mapping[str, Any],
    ) -> None:
        self._config = config
        self._store = store
        self._settings = settings
        self._trainer = trainer
        self._tracker = tracker

    def save(self, state: RunState) -> None:
        content = {"run": asdict(state), "clock": self._tracker.clock.state(), "settings": self._settings}
        path = self._store.save(
            state.finished, content, lambda folder: self._trainer.save_checkpoint(folder, rollout_id=state.finished)
        )
        logger.info("checkpoint %s", path)

    def videos(self, step: int, samples: Sequence[Sample]) -> None:
        folder = Path(self._config.output_dir) / "videos" / f"rollout_{step:06d}"
        folder.mkdir(parents=True, exist_ok=True)
        for number, sample in enumerate(samples):
            name = f"{number:02d}-{sample.record.record_id}.mp4"
            write_video(folder / name, ray.get(sample.frames), self._config.rollout.fps)


def run(config: Config) -> None:
    """Train from the start or from the newest checkpoint, to the end.

    Raises:
        MilesWanError: bad input, or a fault of the run; its message says what to do.
    """
    logger.info("%s", batch_equation(config))
    output_dir = Path(config.output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    store = CheckpointStore(output_dir / "checkpoints", keep_last=config.checkpoint.keep_last)
    store.clean()
    found = store.latest() if config.resume is not None else None
    if config.resume is not None and found is None:
        logger.info("no complete checkpoint in %s: starting from the beginning", output_dir)
    train = load_records(config.data.train).records
    validation = load_records(config.data.eval).records if config.data.eval is not None else ()
    model = load_family(resolve_model(config.model.path))
    settings = remembered(config, train, validation[: config.eval.max_records], weights=model.transformer_folders)
    if found and (faults := resume_faults(found[1], settings)):
        raise InputError(faults)
    state = RunState(**found[1]["run"]) if found else RunState()
    resume_step = state.finished if found else None
    with Tracker(output_dir, total_rollouts=config.num_rollouts, resume_step=resume_step) as tracker:
        actors = Actors(config, plan_layout(config), init_method=f"file://{_rendezvous(output_dir)}")
        try:
            trainer = TrainerGroup(actors.trainers, config)
            if found:
                tracker.clock.restore(found[1]["clock"])
                trainer.load_checkpoint(str(found[0]))
                logger.info(
                    "resumed from %s: %d of %d rollouts finished", found[0], state.finished, config.num_rollouts
                )
            keep = _Keep(config, store, trainer, tracker, settings=settings)
            track = _Track(tracker)
            rollouts, weights = _generation(config, actors)
            parts = Parts(
                requests=RequestPlanner(config, train, validation),
                rollouts=rollouts,
                scorer=RewardPool(actors.rewards, batch_size=config.reward.batch_size, fps=config.rollout.fps),
                trainer=trainer,
                weights=weights,
                track=track,
                keep=keep,
            )
            controller = Controller(config, parts, state)
            controller.run()
            wall = tracker.clock.wall
            trainer.export(str(output_dir / "adapter"))
            if config.training.ema_decay is not None:
                trainer.export(str(output_dir / "adapter_ema"), weights="ema")
        finally:
            actors.close()
        plot_reward_curve(tracker.metrics_path, output_dir / "reward.png")
        resumed_from = str(found[0]) if found else None
        summary = summarise(config, controller.state, actors, tracker, wall=wall, resumed_from=resumed_from)
        write_summary(output_dir / "summary.json", summary)
        if summary["eval_gain_mean"] is not None:
            logger.info(
                "validation reward %.4f -> %.4f: gain %+.4f ± %.4f (95 %%, paired over %d records)",
                summary["eval_reward_before"], summary["eval_reward_after"], summary["eval_gain_mean"],
                summary["eval_gain_ci95"], summary["eval_records"],
            )  # fmt: skip
        if summary["max_log_prob_gap"] is not None:
            logger.info("largest engine-trainer log-prob gap before an update: %.1e", summary["max_log_prob_gap"])
        logger.info("done: adapter/, videos/, reward.png and summary.json are in %s", output_dir)


def _generation(config: Config, actors: Actors) -> tuple[Rollouts, Weights]:
    """Who generates, and how it gets the weights."""
    rollout = config.rollout
    if rollout.engine == "local":
        return (
            LocalRollouts(actors.trainers, samples_per_call=rollout.samples_per_call),
            LocalWeights(actors.trainers),
        )
    pool = EnginePool(actors.engines, concurrency=rollout.concurrency, samples_per_call=rollout.samples_per_call)
    sync = WeightSync(
        actors.trainers,
        actors.engines,
        workers_per_engine=rollout.tp_size * rollout.sp_size,
        transport=actors.transport,
        sharing=actors.sharing,
    )
    return pool, sync


def summarise(
    config: Config, state: RunState, actors: Actors, tracker: Tracker, *, wall: float, resumed_from: str | None
) -> dict[str, Any]:
    """The content of ``summary.json``. Validation numbers are null for a run without validation."""
    info = actors.trainer_infos[0]
    evaluated, compared = bool(state.eval_first), state.log_prob_pairs_compared > 0
    servers = config.rollout.engine == "sglang"
    gain = paired_gain(state.eval_first, state.eval_last) if evaluated else None
    return {
        "rollouts": state.finished,
        "seconds": wall,
        "seconds_by_phase": tracker.clock.seconds,
        "overlapped_seconds": tracker.clock.overlap,
        "eval_reward_before": sum(state.eval_first) / len(state.eval_first) if evaluated else None,
        "eval_reward_after": sum(state.eval_last) / len(state.eval_last) if evaluated else None,
        "eval_gain_mean": gain.mean if gain else None,
        "eval_gain_ci95": gain.ci95 if gain else None,
        "eval_rewards_before": state.eval_first,
        "eval_rewards_after": state.eval_last,
        "eval_records": len(state.eval_last),
        "engine": config.rollout.engine,
        "tp_size": config.rollout.tp_size if servers else None,
        "sp_size": config.rollout.sp_size if servers else None,
        "dp_size": config.training.dp_size,
        "num_engines": len(actors.engines),
        "fsdp_blocks": info.fsdp_blocks,
        "trainable_parameters": info.report.trainable_parameters,
        "total_parameters": info.report.total_parameters,
        "lora_tensors": state.lora_tensors,
        "layer_prefixes": state.layer_prefixes,
        "unmapped": state.unmapped,
        "max_log_prob_gap": state.max_log_prob_gap if compared else None,
        "log_prob_pairs_compared": state.log_prob_pairs_compared,
        "max_ratio_minus_one_before_update": state.max_ratio_minus_one_before_update if compared else None,
        "sync_seconds_mean": state.sync_seconds / max(1, state.syncs),
        "videos_scored": state.videos_scored,
        "dropped_samples": state.dropped_samples,
        "resumed_from": resumed_from,
        "seed": config.seed,
    }


def _rendezvous(output_dir: Path) -> Path:
    """A fresh file for the ranks to meet in: no port to collide on."""
    path = (output_dir / ".rendezvous").resolve()
    path.unlink(missing_ok=True)
    return path


@dataclass(frozen=True)
class SlotDevices:
    """The device behind each slot: its ``numbers`` as the engine takes them, and ``uuids`` (none on a CPU)."""

    numbers: list[str]
    uuids: list[str]


def _slot_devices(layout: Layout, group: Any, *, device: str) -> SlotDevices:
    if device == "cpu":
        return SlotDevices([str(slot) for slot in range(layout.slots)], [])

    def ask() -> tuple[str, list[str]]:
        """UUID of the slot's device, and those of all devices of the node in NVML's order."""
        import pynvml
        import torch

        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return f"GPU-{torch.cuda.get_device_properties(0).uuid}", [pynvml.nvmlDeviceGetUUID(one) for one in handles]

    # A process that has seen one device cannot be used for another slot: every probe gets its own.
    probe = ray.remote(num_gpus=REWARD_SHARE, max_calls=1)(ask)
    answers = gather([probe.options(**_task_options(group, slot)).remote() for slot in range(layout.slots)])
    uuids = [uuid for uuid, _ in answers]
    return SlotDevices(device_numbers(uuids, answers[0][1]), uuids)


def _task_options(group: Any, slot: int) -> dict[str, Any]:
    options = actor_options(group, slot, share=REWARD_SHARE, device="cuda")
    options.pop("max_restarts")
    return options
