"""Whether a run continues the one that saved a checkpoint. In: settings and data, now and then. Out: what to save, or the
faults. A curve that changes its law in the middle is nobody's result.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from miles_wan.cluster.resume import fingerprint
from miles_wan.supervised.config import SftConfig
from miles_wan.supervised.encode import EncodedClip

# What may change: where things lie and run, how much is kept and shown. Never what is computed.
FREE = (
    "output_dir",
    "resume",
    "device",
    "cuda_visible_devices",
    "model.path",
    "model.init_adapter",
    "data.train",
    "data.eval",
    "data.cache_dir",
    "training.num_steps",
    "training.dp_size",
    "training.micro_batch_size",
    "training.activation_checkpointing",
    "training.peak_tflops",
    "eval.interval",
    "eval.videos",
    "checkpoint",
)


def remembered(
    config: SftConfig, train: Sequence[EncodedClip], evaluation: Sequence[EncodedClip], *, weights: Sequence[Path]
) -> dict[str, Any]:
    """What a checkpoint keeps of its run, as JSON.

    Args:
        train, evaluation: encoded clips; their keys say what is in them, wherever the files lie.
        weights: folders of the transformers' weight files.
    """
    return {
        "config": config.model_dump(mode="json"),
        "weights": [fingerprint(path) for path in weights],
        "train": _digest(train),
        "eval": _digest(evaluation),
    }


def resume_faults(saved: Mapping[str, Any], now: Mapping[str, Any], *, finished: int) -> list[str]:
    """Why a run with the settings ``now`` is not the continuation of the one with ``saved``, both from ``remembered``.

    Args:
        finished: optimizer steps of the checkpoint.
    """
    try:
        before, after = _flat(saved["config"]), _flat(now["config"])
        faults = [
            f"--resume: {key} is {after.get(key)!r}, the run was started with {before.get(key)!r}; set it back, or start anew with "
            "another --output-dir"
            for key in sorted(before.keys() | after.keys())
            if before.get(key) != after.get(key) and not _is_free(key)
        ]
        steps, schedule = after["training.num_steps"], after["training.optimizer.schedule"]
        if steps < finished:
            faults.append(f"--resume: training.num_steps is {steps}, and {finished} steps are finished; raise it")
        if schedule != "constant" and steps != before["training.num_steps"]:
            faults.append(
                f"--resume: training.num_steps is {steps}, the run was started with {before['training.num_steps']}: the learning "
                f"rate follows a {schedule} schedule over all of them; set it back"
            )
        if after["training.dp_size"] > before["training.dp_size"]:
            faults.append(
                f"--resume: training.dp_size is {after['training.dp_size']}, the checkpoint has the random state of "
                f"{before['training.dp_size']} ranks; give at most that many"
            )
        for key, what in (("weights", "the transformers' weights"), ("train", "the training clips that can be used")):
            if saved[key] != now[key]:
                faults.append(f"--resume: {what} are not those the run was started with; give the same ones")
        if after["eval.interval"] and before["eval.interval"] and saved["eval"] != now["eval"]:
            faults.append("--resume: the validation clips are not those the run was started with; give the same ones")
        return faults
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        return [
            f"--resume: state.json of the newest checkpoint is damaged ({reason}); remove it to resume from the one before"
        ]


def _digest(clips: Sequence[EncodedClip]) -> str:
    return hashlib.sha256(json.dumps([[clip.clip_key, clip.text_key] for clip in clips]).encode()).hexdigest()


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted names of all leaves."""
    if isinstance(tree, Mapping):
        return {name: leaf for key, value in tree.items() for name, leaf in _flat(value, f"{prefix}{key}.").items()}
    return {prefix.removesuffix("."): tree}


def _is_free(key: str) -> bool:
    return any(key == rule or key.startswith(f"{rule}.") for rule in FREE)
