"""The check before anything starts. In: a configuration. Out: what was read on the way (data, model folder), or one
InputError with every fault of data, model, rewards, video size, devices and disk together. It starts nothing, loads no
weights and leaves no trace on disk.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.constants import is_offline_mode

from miles_wan.config import Config, RewardFunction
from miles_wan.configuration import check_config
from miles_wan.data import Dataset, crop_report, load_records
from miles_wan.errors import InputError
from miles_wan.rewards.registry import BUILT_IN, user_function
from miles_wan.wan.family import (
    ModelFolder,
    WanFamily,
    legal_frames,
    legal_size,
    load_family,
    looks_like_hub_id,
    resolve_model,
)

logger = logging.getLogger(__name__)

GIB = 2**30
_MIN_FREE_DISK = 1 * GIB
_SHARED_MEMORY = Path("/dev/shm")
_ADAPTER_FILE = "pytorch_lora_weights.safetensors"
_COUNT_DEVICES = "import torch; print(torch.cuda.device_count())"


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
    model = _model(config, faults)
    if model is not None:
        faults += _family_faults(model, config, [data for data in (train, evaluation) if data is not None])
        warnings += _size_warnings(model, config)
    for function in config.reward.functions:
        faults += _reward_faults(function)
    faults += _device_faults(config, warnings)
    faults += output_faults(Path(config.output_dir), resume=config.resume is not None)
    if faults or model is None or train is None:
        raise InputError(list(dict.fromkeys(faults)))
    warnings += _memory_warnings(config, model.family)
    if evaluation is not None:
        warnings += _overlap_warnings(train, evaluation)
    for warning in warnings:
        logger.warning(warning)
    return Report(model, train, evaluation, tuple(warnings + _crop_warnings(config, train, evaluation)))


def output_faults(folder: Path, *, resume: bool) -> list[str]:
    """Faults of the output folder: not writable (a file is really written), nearly full, or holding another run."""
    faults = _write_faults(folder)
    if faults:
        return faults
    free = shutil.disk_usage(_nearest_existing(folder)).free
    if free < _MIN_FREE_DISK:
        faults.append(
            f"output_dir: {folder}: only {free / GIB:.2f} GiB are free, 1 GiB is the least; free some disk space"
        )
    found = [name for name in ("metrics.jsonl", "checkpoints", "summary.json") if _holds(folder / name)]
    if found and not resume:
        faults.append(
            f"output_dir: {folder}: holds a run already ({', '.join(found)}); continue it with --resume latest, or choose "
            "another folder with --output-dir"
        )
    return faults


def _dataset(path: str | None, field: str, faults: list[str]) -> Dataset | None:
    try:
        return load_records(path) if path is not None else None
    except InputError as error:
        faults += [f"{field}: {fault}" for fault in error.faults]
        return None


def _model(config: Config, faults: list[str]) -> ModelFolder | None:
    adapter = config.model.init_adapter
    if adapter is not None and not (Path(adapter).is_file() or (Path(adapter) / _ADAPTER_FILE).is_file()):
        faults.append(
            f"model.init_adapter: {adapter}: holds no adapter; give a folder with {_ADAPTER_FILE}, or the file"
        )
    try:
        folder = resolve_model(config.model.path)
    except InputError as error:
        faults += error.faults
        return None
    try:
        return load_family(folder)
    except InputError as error:
        faults += [f"model.path: {fault}" for fault in error.faults]
        return None


def _family_faults(model: ModelFolder, config: Config, datasets: list[Dataset]) -> list[str]:
    family, rollout = model.family, config.rollout
    faults = []
    if len(model.experts) > 1:
        faults.append(
            f"model.path: {model.path} is a {family.name}; training a model with two experts comes with a later version, "
            "use a wan2.2-ti2v-5b"
        )
    with_image = any(data.has_images for data in datasets)
    if fault := legal_size(rollout.width, rollout.height, family):
        faults.append(f"rollout.width, rollout.height: {fault}")
    if fault := legal_frames(rollout.num_frames, family, with_image=with_image):
        faults.append(f"rollout.num_frames: {fault}")
    return faults


def _size_warnings(model: ModelFolder, config: Config) -> list[str]:
    rollout, family = config.rollout, model.family
    smallest = min(width * height for width, height in family.trained_sizes)
    if not model.is_full_size or rollout.width * rollout.height >= smallest:
        return []
    sizes = " or ".join(f"{width}x{height}" for width, height in family.trained_sizes)
    return [
        f"rollout.width, rollout.height: {rollout.width}x{rollout.height} is below the sizes {family.name} was trained at "
        f"({sizes}); its videos look broken there"
    ]


def _reward_faults(function: RewardFunction) -> list[str]:
    if function.name not in BUILT_IN:
        try:
            user_function(function.name)
        except InputError as error:
            return [f"reward.functions: {fault}" for fault in error.faults]
        return []
    fields = {"model": "config.json", "processor": "preprocessor_config.json"}
    faults = []
    for field, file in fields.items():
        value = getattr(function, field)
        if fault := _reward_source_fault(value, is_model=field == "model", file=file):
            faults.append(f"reward.functions: {function.name}: {field} {value}: {fault}")
    return faults


def _reward_source_fault(value: str, *, is_model: bool, file: str) -> str | None:
    path = Path(os.path.expanduser(value))
    if path.is_dir():
        return _reward_folder_fault(path, is_model=is_model)
    if os.path.exists(path):
        return "is a file; give the folder that holds it"
    if not looks_like_hub_id(value):
        return "no such folder; give a CLIP folder or a hub id"
    if is_offline_mode() and not isinstance(try_to_load_from_cache(value, file), str):
        return "no such folder, and as a hub id it is not in the cache while HF_HUB_OFFLINE is set; give a folder"
    return None


def _reward_folder_fault(path: Path, *, is_model: bool) -> str | None:
    if not is_model:
        known = ("processor_config.json", "preprocessor_config.json")
        return None if any((path / name).is_file() for name in known) else f"holds none of {', '.join(known)}"
    if not (path / "config.json").is_file():
        return "holds no config.json; give a CLIP folder"
    weights = [*path.glob("*.safetensors"), *path.glob("*.bin")]
    return None if weights else "holds no weights (*.safetensors); fetch the model again"


def _device_faults(config: Config, warnings: list[str]) -> list[str]:
    cluster = config.cluster
    if cluster.device == "cpu":
        cores = len(os.sched_getaffinity(0))
        if cluster.num_gpus > cores:
            warnings.append(
                f"cluster.num_gpus: {cluster.num_gpus} worker slots share {cores} CPU core(s); it will be slow"
            )
        return []
    environment = dict(os.environ)
    if cluster.cuda_visible_devices is not None:
        environment["CUDA_VISIBLE_DEVICES"] = cluster.cuda_visible_devices
    found = count_cuda_devices(environment)
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    place = "this machine has" if listed is None else f"with CUDA_VISIBLE_DEVICES={listed} this machine shows"
    if found == 0:
        return [f"cluster.device: cuda, but {place} no CUDA device; choose --device cpu or check the driver"]
    wanted = len(listed.split(",")) if cluster.cuda_visible_devices is not None and listed else cluster.num_gpus
    if max(wanted, cluster.num_gpus) > found:
        return [f"cluster.num_gpus: {cluster.num_gpus} asked for, but {place} {found} CUDA device(s); lower --num-gpus"]
    return []


def count_cuda_devices(environment: Mapping[str, str]) -> int:
    """Devices that a process with this environment sees. Asked in a process of its own: the device list is read once per
    process, and this process must not take a device."""
    command = [sys.executable, "-c", _COUNT_DEVICES]
    answer = subprocess.run(command, env=dict(environment), capture_output=True, text=True, timeout=300, check=False)
    last = answer.stdout.strip().splitlines()[-1:]
    return int(last[0]) if answer.returncode == 0 and last and last[0].isdigit() else 0


def _write_faults(folder: Path) -> list[str]:
    created = [path for path in (folder, *folder.parents) if not os.path.exists(path)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"can this be written?")
            file.flush()
    except OSError as error:
        reason = error.strerror or str(error)
        return [f"output_dir: {folder}: cannot be written ({reason}); choose another folder with --output-dir"]
    finally:
        for path in created:  # the run makes its folder itself; a refused one leaves none behind
            with contextlib.suppress(OSError):  # never made, or somebody else put something there
                path.rmdir()
    return []


def _holds(path: Path) -> bool:
    return path.is_file() or (path.is_dir() and any(path.iterdir()))


def _nearest_existing(path: Path) -> Path:
    return next(candidate for candidate in (path, *path.absolute().parents) if os.path.exists(candidate))


def _memory_warnings(config: Config, family: WanFamily) -> list[str]:
    """Finished samples of a rollout wait in the object store, which lives in /dev/shm and spills to disk when full."""
    rollout = config.rollout
    if not _SHARED_MEMORY.is_dir():
        return [f"{_SHARED_MEMORY} does not exist: samples will pass through the disk, which is slow"]
    channels, frames, height, width = family.latent_shape(rollout.num_frames, rollout.height, rollout.width)
    kept = 4 * 2 * rollout.window_size * channels * frames * height * width
    sample = 3 * rollout.num_frames * rollout.height * rollout.width + kept
    needed = sample * rollout.prompts_per_rollout * rollout.samples_per_prompt
    free = shutil.disk_usage(_SHARED_MEMORY).free
    if needed <= free:
        return []
    return [
        f"{_SHARED_MEMORY} has {free / GIB:.1f} GiB free, the samples of one rollout take {needed / GIB:.1f} GiB: the rest "
        "spills to disk, which is slow; enlarge it (docker: --shm-size) or lower rollout.prompts_per_rollout"
    ]


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
    reports = [crop_report(data.records, *size) for data in (train, evaluation) if data is not None]
    return [report.warning for report in reports if report.warning is not None]
