"""The check before anything starts. In: a configuration. Out: what was read on the way (data, model folder), or one
InputError with every fault of data, model, rewards, video size, devices and disk together. It starts nothing, loads no
weights and leaves no trace on disk.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from miles_wan.cluster.checkpoints import CheckpointStore
from miles_wan.cluster.resume import remembered, resume_faults
from miles_wan.config import Config
from miles_wan.configuration import check_config
from miles_wan.data import Dataset, crop_report, load_records
from miles_wan.doctor.machine import memory_warnings, training_memory
from miles_wan.doctor.model import family_faults, find_model, size_warnings, transformer_faults
from miles_wan.doctor.output import output_faults
from miles_wan.doctor.rewards import reward_faults
from miles_wan.errors import CheckpointError, InputError
from miles_wan.wan.family import ModelFolder

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Report:
    """What the check has read, so that nobody reads it twice. ``warnings`` were logged, too."""

    model: ModelFolder
    train: Dataset
    eval: Dataset | None
    warnings: tuple[str, ...]


def check(config: Config) -> Report:
    """Check everything that can be known before a process or a device is taken.

    A hub id of the main model is fetched here (its files are needed for the check); those of rewards are not looked up
    on the network. Warnings are logged.

    Raises:
        InputError: with all faults, each naming value, place and remedy.
    """
    faults = check_config(config)
    warnings: list[str] = []
    train = _dataset(config.data.train, "data.train", faults)
    evaluation = _dataset(config.data.eval, "data.eval", faults) if config.data.eval is not None else None
    model = find_model(config, faults)
    if model is not None:
        faults += family_faults(model, config, [data for data in (train, evaluation) if data is not None])
        warnings += size_warnings(model, config)
    device_bytes = training_memory(config, faults, warnings)
    if model is not None and len(model.experts) == 1:
        faults += transformer_faults(model, config, device_bytes)
    faults += _layout_faults(config)
    for function in config.reward.functions:
        faults += reward_faults(function)
    faults += output_faults(Path(config.output_dir), resume=config.resume is not None)
    if config.resume is not None and train is not None and model is not None:
        faults += _resume_faults(config, model, train, evaluation)
    if faults or model is None or train is None:
        raise InputError(list(dict.fromkeys(faults)))
    warnings += memory_warnings(config, model.family)
    if evaluation is not None:
        warnings += _overlap_warnings(train, evaluation)
    warnings += _crop_warnings(config, train, evaluation)
    for warning in warnings:
        logger.warning(warning)
    return Report(model, train, evaluation, tuple(warnings))


def _dataset(path: str | None, field: str, faults: list[str]) -> Dataset | None:
    try:
        return load_records(path) if path is not None else None
    except InputError as error:
        faults += [f"{field}: {fault}" for fault in error.faults]
        return None


def _layout_faults(config: Config) -> list[str]:
    from miles_wan.cluster.placement import plan_layout  # imports Ray

    try:
        plan_layout(config)
    except InputError as error:
        return list(error.faults)
    return []


def _resume_faults(config: Config, model: ModelFolder, train: Dataset, evaluation: Dataset | None) -> list[str]:
    store = CheckpointStore(Path(config.output_dir) / "checkpoints", keep_last=config.checkpoint.keep_last)
    try:
        found = store.latest()
    except CheckpointError as error:
        return [str(error)]
    if found is None:
        return [
            f"--resume: {path} lacks its state.json and there is no whole checkpoint; remove it to start from the beginning"
            for path in store.damaged()
        ]
    validated = evaluation.records[: config.eval.max_records] if evaluation is not None else ()
    return resume_faults(found[1], remembered(config, train.records, validated, weights=model.path / model.experts[0]))


def _overlap_warnings(train: Dataset, evaluation: Dataset) -> list[str]:
    trained = {record.record_id for record in train.records}
    seen = [record for record in evaluation.records if record.record_id in trained]
    if not seen:
        return []
    return [
        f"data.eval: {len(seen)} of {len(evaluation)} validation records are also training records (first {seen[0].source}): "
        "their gain says nothing about unseen prompts"
    ]


def _crop_warnings(config: Config, train: Dataset, evaluation: Dataset | None) -> list[str]:
    size = (config.rollout.width, config.rollout.height, config.data.crop_warning_ratio)
    named = {"data.train": train, "data.eval": evaluation}
    reports = {name: crop_report(data.records, *size) for name, data in named.items() if data is not None}
    return [f"{name}: {report.warning}" for name, report in reports.items() if report.warning is not None]
