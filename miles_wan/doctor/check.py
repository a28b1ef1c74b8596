"""The check before anything starts. In: a configuration. Out: what was read on the way (data, model folder), or one
InputError with every fault of data, model, rewards, video size, devices and disk together. It starts nothing, loads no
weights and leaves no trace on disk.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from miles_wan.config import Config
from miles_wan.configuration import check_config
from miles_wan.data import Dataset, crop_report, load_records
from miles_wan.doctor.machine import memory_warnings, training_memory
from miles_wan.doctor.model import family_faults, find_model, size_warnings, transformer_faults
from miles_wan.doctor.output import output_faults
from miles_wan.doctor.rewards import reward_faults
from miles_wan.errors import InputError
from miles_wan.wan.family import ModelFolder

logger = logging.getLogger(__name__)

Further = Callable[[ModelFolder, Dataset, Dataset | None], list[str]]


@dataclass(frozen=True)
class Report:
    """What the check has read, so that nobody reads it twice. ``warnings`` were logged, too."""

    model: ModelFolder
    train: Dataset
    eval: Dataset | None
    warnings: tuple[str, ...]


def check(config: Config, further: Further | None = None) -> Report:
    """Check everything that can be known before a process or a device is taken.

    A hub id of the main model is fetched here (its files are needed for the check); those of rewards are not looked up
    on the network. Warnings are logged.

    Args:
        further: the caller's own faults of what was read, told with the others.

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
    if model is not None:
        faults += transformer_faults(model, config, device_bytes)
    for function in config.reward.functions:
        faults += reward_faults(function)
    faults += output_faults(Path(config.output_dir), resume=config.resume is not None)
    if further is not None and train is not None and model is not None:
        faults += further(model, train, evaluation)
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
