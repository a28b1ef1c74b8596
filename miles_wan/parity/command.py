"""Builds both sides in this process and compares them. In: a checked configuration, its model folder and requests. Out: the
report. One engine, one trainer without sharding; no Ray, no rewards, nothing written but the engine's log.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from miles_wan.config import Config
from miles_wan.errors import EngineError
from miles_wan.parity.comparison import compare, empty_report, refused
from miles_wan.parity.parts import (
    Adapter,
    EngineSide,
    LocalSide,
    ServerSide,
    Trainer,
    encode_references,
    held_adapter,
    random_adapter,
)
from miles_wan.parity.report import ParityReport
from miles_wan.records import Conditioning, RolloutRequest, derived_seed
from miles_wan.rollout.local import LocalEngine
from miles_wan.rollout.sglang.engine import SGLangEngine
from miles_wan.rollout.sglang.settings import engine_checkpoint, engine_settings
from miles_wan.wan.family import ModelFolder
from miles_wan.wan.lora import add_adapters
from miles_wan.wan.model import load_model
from miles_wan.weight_sync import choose_transport

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prepared:
    """All but the engine."""

    requests: Sequence[RolloutRequest]
    references: Sequence[Conditioning]
    trainer: Trainer
    adapters: tuple[Adapter, Adapter]


def check_parity(config: Config, folder: ModelFolder, requests: Sequence[RolloutRequest]) -> ParityReport:
    """Start the configured engine, compare, end it.

    Raises:
        InputError: an adapter or weights that do not fit, or a sampler that the engine lacks.
        EngineError: an image that cannot be read.
    """
    device = torch.device("cuda:0" if config.cluster.device == "cuda" else "cpu")
    prepared = prepare(config, folder, requests, device=device)
    if config.rollout.engine == "local":
        return _compare(local_side(folder, prepared.trainer, device=device), prepared, config)
    logs = Path(tempfile.mkdtemp(prefix="miles-wan-parity-"))
    served = engine_checkpoint(config, folder)
    engine = SGLangEngine(engine_settings(config, devices=_devices(config), log_dir=logs, checkpoint=served))
    try:
        with server_side(engine, config) as server:
            report = _compare(server, prepared, config)
    except EngineError as error:  # of the start; a later one is in the report already
        return refused(empty_report(config, requests), error)
    except KeyboardInterrupt:
        shutil.rmtree(logs, ignore_errors=True)
        raise
    if report.refused is None:
        shutil.rmtree(logs, ignore_errors=True)
    return report


@contextmanager
def server_side(engine: SGLangEngine, config: Config) -> Iterator[ServerSide]:
    """Start the engine and end it at last. Raises EngineError if it does not start."""
    with asyncio.Runner() as runner:
        try:
            engine.start()
            yield ServerSide(engine, runner, config, share_on=_share_on(config))
        finally:
            runner.run(engine.close())


def prepare(
    config: Config, folder: ModelFolder, requests: Sequence[RolloutRequest], *, device: torch.device
) -> Prepared:
    """Reference conditioning, the trainer's transformer, and the two adapters: a random one, then the run's own if it
    starts from one, else another random one (a zero adapter would prove no push)."""
    logger.info("encoding the conditioning of %d records", len(requests))
    references = encode_references(folder, requests, device=device)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the engine is another process
    settings = config.model
    model = load_model(folder, dtype=settings.dtype, quantization=settings.quantization)
    add_adapters(model, settings, names=folder.routing.chosen(settings.train_experts), seed=config.seed)
    previous, current = (
        random_adapter(
            model, seed=derived_seed(config.seed, "parity", number), alpha=settings.lora_alpha, rank=settings.lora_rank
        )
        for number in range(2)
    )
    if settings.init_adapter is not None:
        current = held_adapter(model)
    return Prepared(requests, references, Trainer(model.to(device), device=device), (previous, current))


def local_side(folder: ModelFolder, trainer: Trainer, *, device: torch.device) -> LocalSide:
    """The local engine over the trainer's own model, as in training."""
    return LocalSide(LocalEngine(folder, trainer.model, device=device), trainer.model)


def _compare(engine: EngineSide, prepared: Prepared, config: Config) -> ParityReport:
    return compare(
        engine,
        prepared.trainer,
        prepared.requests,
        references=prepared.references,
        adapters=prepared.adapters,
        config=config,
    )


def _devices(config: Config) -> list[str]:
    """Of one engine: the first of those that are visible."""
    count = config.rollout.tp_size * config.rollout.sp_size
    listed = os.environ.get("CUDA_VISIBLE_DEVICES", "") if config.cluster.device == "cuda" else ""
    named = [device.strip() for device in listed.split(",") if device.strip()]
    return (named or [str(index) for index in range(count)])[:count]


def _share_on(config: Config) -> torch.device:
    """Where adapters are put for the engine: as training does it, if its one device is this process's."""
    if config.cluster.device == "cpu":
        return torch.device("cpu")
    world = config.rollout.tp_size * config.rollout.sp_size
    uuids = [str(torch.cuda.get_device_properties(index).uuid) for index in range(world)]
    configured = config.sync.transport if world == 1 else "shared_memory"
    transport = choose_transport(configured, engine_uuids=uuids, trainer_uuids=uuids[:1])
    return torch.device("cuda:0" if transport == "cuda_ipc" else "cpu")
