"""One rank of a supervised run, from the data to the exported weights, under any launcher that sets torchrun's environment. In: a
checked configuration. Out: the output folder; rank 0 writes it.

    clips -> cache -> (step -> metrics -> validation -> checkpoint) ... -> export -> summary
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from miles_wan.cluster.checkpoints import CheckpointStore
from miles_wan.data.clips import counted
from miles_wan.errors import InputError, MilesWanError
from miles_wan.faults import reach
from miles_wan.supervised.config import SftConfig
from miles_wan.supervised.dataset import RunData
from miles_wan.supervised.draws import Draw, TrainingDraws, counts
from miles_wan.supervised.encode import ClipLibrary
from miles_wan.supervised.export import export_adapters, export_transformers
from miles_wan.supervised.log import RunLog
from miles_wan.supervised.resume import remembered, resume_faults
from miles_wan.supervised.settings import Plan, plan
from miles_wan.supervised.summary import loss_gain, write_supervised_summary
from miles_wan.supervised.throughput import Throughput
from miles_wan.supervised.trainer import Step, SupervisedTrainer
from miles_wan.supervised.validation import validation_draws, validation_metrics, validation_timesteps
from miles_wan.supervised.videos import SampleVideos
from miles_wan.tracking.failures import show_failure
from miles_wan.tracking.logs import configure_logging
from miles_wan.tracking.loss_plot import plot_loss_curves
from miles_wan.training import checkpoint
from miles_wan.training.sharding import BACKENDS
from miles_wan.wan.family import ModelFolder, load_family, resolve_model

logger = logging.getLogger(__name__)

BAD_RECORDS = "bad_records.jsonl"


@dataclass
class Progress:
    """How far the run is: ``finished`` optimizer steps, ``seconds`` of the loop, and the losses of the first validation."""

    finished: int = 0
    seconds: float = 0.0
    first_validation: list[float] | None = None
    last_validation: list[float] | None = None


class SupervisedRun:
    """The run on this rank.

    Args:
        config: checked settings.
        device: of this rank.
    """

    def __init__(self, config: SftConfig, *, device: torch.device) -> None:
        self._config = config
        self._device = device
        self._output = Path(config.output_dir)
        self._is_first = dist.get_rank() == 0
        self._folder: ModelFolder = load_family(resolve_model(config.model.path))
        self._plan: Plan = plan(config, self._folder)
        self._library = ClipLibrary(config.data.cache_dir, self._folder, self._plan.clip, device=device)
        self._data = RunData(config, self._library)
        self._trainer = SupervisedTrainer(
            config, self._folder, self._library, device=device, everything=config.eval.videos > 0
        )
        experts = self._folder.routing
        self._draws = TrainingDraws(
            config,
            len(self._data.train),
            experts=experts,
            trained=self._plan.trained,
            shift=self._plan.shift,
            image_share=self._plan.image_share,
        )
        self._validation: list[Draw] = validation_draws(
            len(self._data.evaluation),
            validation_timesteps(config.eval, experts, self._plan.trained),
            seed=config.eval.seed,
            experts=experts,
            image_share=self._plan.image_share,
        )
        self._videos = SampleVideos(config, self._plan, self._folder, self._library, self._trainer, device=device)
        self._throughput = Throughput(config, self._folder, device=device)
        self._store = CheckpointStore(self._output / "checkpoints", keep_last=config.checkpoint.keep_last, unit="step")
        self._settings = remembered(
            config,
            self._data.train,
            self._data.evaluation,
            weights=[self._folder.path / name for name in self._folder.experts],
        )

    def run(self) -> None:
        """Train to the end. Raises InputError where a checkpoint does not fit, MilesWanError for a fault of the run."""
        progress, resumed_from = self._resume()
        if self._is_first:
            self._tell()
        with (
            RunLog(self._output, num_steps=self._config.training.num_steps, resume_step=progress.finished or None)
            if self._is_first
            else _Nothing() as log
        ):
            if progress.finished == 0:
                self._validate(progress, log)
            while progress.finished < self._config.training.num_steps:
                self._advance(progress, log)
            self._finish(progress, resumed_from)

    def _tell(self) -> None:
        self._data.tell(self._output / BAD_RECORDS)
        report = self._trainer.report
        logger.info(
            "training %s of %s (%s): %s of %s parameters",
            "all weights" if self._trainer.is_full else "adapters",
            ", ".join(self._plan.trained),
            self._folder.family.name,
            f"{report.trainable_parameters:,}",
            f"{report.total_parameters:,}",
        )
        logger.info("%s", self._trainer.memory.text)

    def _advance(self, progress: Progress, log: RunLog | _Nothing) -> None:
        """One optimizer step, and what is due after it."""
        number, config = progress.finished, self._config
        started = time.monotonic()
        draws = self._draws.batch(number)
        step = self._trainer.step(draws, self._data.train, number=number)
        seconds = time.monotonic() - started
        progress.finished += 1
        progress.seconds += seconds
        metrics = self._step_metrics(draws, step, seconds)
        metrics["sft/epoch"] = float(self._draws.epoch(number))
        log.write(progress.finished, metrics)
        is_last = progress.finished == config.training.num_steps
        if config.eval.interval and (progress.finished % config.eval.interval == 0 or is_last):
            self._validate(progress, log)
        if config.checkpoint.interval and (progress.finished % config.checkpoint.interval == 0 or is_last):
            self._save(progress)
        reach("sft/after_step", progress.finished)

    def _step_metrics(self, draws: Sequence[Draw], step: Step, seconds: float) -> dict[str, float]:
        experts = self._folder.routing
        metrics = {
            "sft/loss": sum(step.losses) / len(step.losses),
            "sft/image_samples": float(sum(draw.with_image for draw in draws)),
            "sft/textless_samples": float(sum(not draw.with_text for draw in draws)),
            "sft/lr": step.learning_rate,
            **{
                "sft/grad_norm" + (f"/{experts.label(name)}" if name else ""): norm
                for name, norm in step.grad_norms.items()
            },
            **self._throughput.metrics(draws, self._data.train, seconds),
        }
        for name, count in counts(draws, experts).items():
            label = experts.label(name)
            metrics[f"sft/samples/{label}"] = float(count)
            if count:
                own = [loss for draw, loss in zip(draws, step.losses, strict=True) if draw.expert == name]
                metrics[f"sft/loss/{label}"] = sum(own) / count
        return metrics

    def _validate(self, progress: Progress, log: RunLog | _Nothing) -> None:
        if not self._validation or not self._config.eval.interval:
            return
        started = time.monotonic()
        losses = self._trainer.losses(self._validation, self._data.evaluation)
        if progress.first_validation is None:
            progress.first_validation = losses
        progress.last_validation = losses
        metrics = validation_metrics(self._validation, losses, self._folder.routing)
        shown = self._data.evaluation[: self._config.eval.videos]
        if shown:
            self._videos.write(shown, self._output / "videos" / f"step_{progress.finished:06d}")
        log.write(progress.finished, {**metrics, "validation/seconds": time.monotonic() - started})

    def _save(self, progress: Progress) -> None:
        """One checkpoint (a collective)."""
        state = self._trainer.state()

        def write(directory: str) -> None:
            _broadcast(directory)
            checkpoint.save(Path(directory), state, rollout_id=progress.finished)

        if self._is_first:
            kept = {"progress": asdict(progress), "settings": self._settings}
            self._store.save(progress.finished, kept, write)
        else:
            checkpoint.save(Path(_broadcast(None)), state, rollout_id=progress.finished)
        dist.barrier()

    def _resume(self) -> tuple[Progress, str | None]:
        """The state to go on from. Raises InputError when the checkpoint is another run's."""
        if self._config.resume is None:
            return Progress(), None
        if self._is_first:
            self._store.clean()
        dist.barrier()
        found = self._store.latest()
        if found is None:
            logger.warning("--resume: %s holds no complete checkpoint: the run starts from the beginning", self._output)
            return Progress(), None
        path, state = found
        try:
            progress = Progress(**state["progress"])
            faults = resume_faults(state["settings"], self._settings, finished=progress.finished)
        except (KeyError, TypeError) as error:
            faults = [
                f"--resume: {path / 'state.json'} is damaged ({error}); remove {path} to resume from the one before"
            ]
        if faults:
            raise InputError(faults)
        checkpoint.load(path, self._trainer.state())
        if self._is_first:
            logger.info("resumed from %s", path)
        return progress, str(path)

    def _finish(self, progress: Progress, resumed_from: str | None) -> None:
        """Weights, summary and picture."""
        config = self._config
        if self._trainer.is_full:
            places = export_transformers(
                self._output / "model", self._trainer.model, self._folder, config.model, names=self._plan.trained
            )
        else:
            places = export_adapters(
                self._output / "adapter", self._trainer.model, config.model, names=self._plan.trained
            )
        if not self._is_first:
            return
        report = self._trainer.report
        write_supervised_summary(
            self._output / "summary.json",
            {
                "steps": progress.finished,
                "seconds": progress.seconds,
                "seed": config.seed,
                "family": self._folder.family.name,
                "method": config.training.method,
                "dp_size": config.training.dp_size,
                "batch_size": config.training.batch_size,
                "trainable_parameters": report.trainable_parameters,
                "total_parameters": report.total_parameters,
                "lora_tensors": 0 if self._trainer.is_full else report.lora_tensors,
                "clips": len(self._data.train),
                "validation_clips": len(self._data.evaluation),
                "bad_records": {name: counted(bad) for name, bad in self._data.bad.items()},
                "notes": {name: counted(notes) for name, notes in self._data.notes.items()},
                "cache_entries": self._data.entries,
                "cache_entries_made": self._data.made,
                "exported": [str(place) for place in places],
                "resumed_from": resumed_from,
                **loss_gain(
                    self._validation, progress.first_validation, progress.last_validation, self._folder.routing
                ),
            },
        )
        plot_loss_curves(self._output / "metrics.jsonl", self._output / "loss.png")
        logger.info("done: %s", ", ".join(str(place) for place in places))


class _Nothing:
    """The log of a rank that writes none."""

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Rank 0 does."""


def _broadcast(value: Any) -> Any:
    """Rank 0's value on every rank (a collective)."""
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def run_rank(config: SftConfig) -> int:
    """One rank of the run, in the environment that torchrun sets. Exit code 0, 1 for a fault of the run, 2 for bad input (told
    by rank 0)."""
    rank, local = int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", "0"))
    configure_logging(f"sft-{rank}", level=logging.INFO if rank == 0 else logging.WARNING)
    device = torch.device("cuda", local) if config.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(BACKENDS[device.type])
    try:
        SupervisedRun(config, device=device).run()
    except InputError as error:
        return show_failure(error) if rank == 0 else 2
    except MilesWanError as error:
        return show_failure(error)
    dist.destroy_process_group()
    return 0
