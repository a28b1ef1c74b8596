"""What a checkpoint remembers of the settings it was made with, and whether a run may continue it. In: configuration and
records, now and then. Out: what to save, or the faults. A curve that changes its law in the middle is nobody's result.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from miles_wan.cluster.checkpoints import CheckpointStore
from miles_wan.config import Config
from miles_wan.controller import RunState
from miles_wan.errors import CheckpointError
from miles_wan.records import PromptRecord

_SAMPLES, _SAMPLE_BYTES = 64, 1 << 16
# What may change: where things lie and run, how much is kept and shown, how long one waits. Never what is computed.
FREE = (
    "output_dir",
    "resume",
    "num_rollouts",
    "model.path",
    "model.init_adapter",
    "data.train",
    "data.eval",
    "data.crop_warning_ratio",
    "rollout.num_engines",
    "rollout.tp_size",
    "rollout.sp_size",
    "rollout.concurrency",
    "rollout.request_timeout",
    "rollout.start_timeout",
    "rollout.server_args",
    "reward.num_workers",
    "algorithm.max_log_prob_gap",
    "training.dp_size",
    "training.micro_batch_size",
    "training.activation_checkpointing",
    "eval.interval",
    "eval.max_records",
    "eval.save_videos",
    "checkpoint",
    "sync",
    "cluster",
)


def remembered(
    config: Config, train: Sequence[PromptRecord], validation: Sequence[PromptRecord], *, weights: Sequence[Path]
) -> dict[str, Any]:
    """What a checkpoint keeps of its run, as JSON.

    Args:
        weights: folders of the transformers' weight files.
        train: training records in their order.
        validation: records that are validated; ``eval.max_records`` of them.
    """
    return {
        "config": config.model_dump(mode="json"),
        "weights": fingerprint(*weights),
        "train": _digest(train),
        "eval": _digest(validation),
    }


def fingerprint(*folders: Path) -> str:
    """A digest of the sizes of all weight files and of samples of their bytes: gigabytes in a second."""
    digest = hashlib.sha256()
    for path in (path for folder in folders for path in sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")])):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for part in range(_SAMPLES):
                file.seek(size * part // _SAMPLES)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def saved_faults(
    config: Config, train: Sequence[PromptRecord], validation: Sequence[PromptRecord], *, weights: Sequence[Path]
) -> list[str]:
    """Why the newest checkpoint in the output folder cannot be continued; nothing where there is none."""
    store = CheckpointStore(Path(config.output_dir) / "checkpoints", keep_last=config.checkpoint.keep_last)
    state, faults = newest_state(store)
    if state is None:
        return faults
    now = remembered(config, train, validation[: config.eval.max_records], weights=weights)
    return resume_faults(state, now)


def newest_state(store: CheckpointStore) -> tuple[dict[str, Any] | None, list[str]]:
    """The state of the newest whole checkpoint; or none, and why there is none: no faults where nothing was saved."""
    try:
        found = store.latest()
    except CheckpointError as error:
        return None, [str(error)]
    if found is not None:
        return found[1], []
    return None, [
        f"--resume: {path} lacks its state.json and there is no whole checkpoint; remove it to start from the beginning"
        for path in store.damaged()
    ]


def resume_faults(state: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Why a run with the settings ``now`` is not the continuation of the run that saved ``state``.

    Args:
        state: a checkpoint's, with ``RunState`` under "run" and ``remembered`` under "settings".
        now: from ``remembered``.
    """
    try:
        run = RunState(**state["run"])
        if run.finished < 0 or not isinstance(state["clock"], Mapping):
            raise ValueError("run or clock make no sense")
        return _differences(state["settings"], now, finished=run.finished)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        return [
            f"--resume: state.json of the newest checkpoint is damaged ({reason}); remove it to resume from the one before"
        ]


def _differences(saved: Mapping[str, Any], now: Mapping[str, Any], *, finished: int) -> list[str]:
    faults = config_faults(saved["config"], now["config"], free=FREE, length="num_rollouts", finished=finished)
    if saved["weights"] != now["weights"]:
        faults.append(
            f"--resume: the transformer's weights in model.path = {now['config']['model']['path']} are not those the run was "
            "started with; give the same checkpoint"
        )
    if saved["train"] != now["train"]:
        faults.append("--resume: the records of data.train are not those the run was started with; give the same file")
    was_on, is_on = (one["config"]["eval"]["interval"] > 0 for one in (saved, now))
    if is_on and not was_on:
        faults.append(
            "--resume: eval.interval was 0: there is no validation before training to compare with; leave it at 0"
        )
    if is_on and was_on and saved["eval"] != now["eval"]:
        faults.append(
            "--resume: the validated records (data.eval, eval.max_records) are not those the run was started with: before "
            "and after could not be compared; give the same ones"
        )
    return faults


def config_faults(
    saved: Mapping[str, Any], now: Mapping[str, Any], *, free: Sequence[str], length: str, finished: int
) -> list[str]:
    """What keeps a run with the configuration ``now`` from continuing that of ``saved``, both as JSON.

    Args:
        free: fields and sections that may change.
        length: the field with the length of the run, ``...num_UNIT``.
        finished: units of the checkpoint.
    """
    before, after = _flat(saved), _flat(now)
    faults = [
        f"--resume: {key} is {after.get(key)!r}, the run was started with {before.get(key)!r}; set it back, or start anew "
        "with another --output-dir"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key) and not any(f"{key}.".startswith(f"{rule}.") for rule in free)
    ]
    units, unit = after[length], length.rpartition("num_")[2]
    if units < finished:
        faults.append(f"--resume: {length} is {units}, and {finished} {unit} are finished; raise it")
    schedule = after["training.optimizer.schedule"]
    if schedule != "constant" and units != before[length]:
        faults.append(
            f"--resume: {length} is {units}, the run was started with {before[length]}: the learning rate follows a "
            f"{schedule} schedule over all of them; set it back"
        )
    if after["training.dp_size"] > before["training.dp_size"]:
        faults.append(
            f"--resume: training.dp_size is {after['training.dp_size']}, the checkpoint has the random state of "
            f"{before['training.dp_size']} ranks; give at most that many"
        )
    return faults


def _digest(records: Sequence[PromptRecord]) -> str:
    said = [
        (record.record_id, {key: value for key, value in record.metadata.items() if key != "image_path"})
        for record in records
    ]
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted names of all leaves."""
    if isinstance(tree, Mapping):
        return {name: leaf for key, value in tree.items() for name, leaf in _flat(value, f"{prefix}{key}.").items()}
    if isinstance(tree, list) and any(isinstance(value, Mapping) for value in tree):
        return {name: leaf for key, value in enumerate(tree) for name, leaf in _flat(value, f"{prefix}{key}.").items()}
    return {prefix.removesuffix("."): tree}
