"""Whether a run continues the one that saved a checkpoint. In: progress, settings and data, now and then. Out: what to save, or
the faults. A curve that changes its law in the middle is nobody's result.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_wan.cluster.checkpoints import CheckpointStore
from miles_wan.cluster.resume import config_faults, fingerprint, newest_state
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


@dataclass
class Progress:
    """How far the run is: ``finished`` optimizer steps, ``seconds`` of the loop, and the losses of the validation before
    training and of the last one."""

    finished: int = 0
    seconds: float = 0.0
    first_validation: list[float] | None = None
    last_validation: list[float] | None = None

    def validated(self, losses: list[float]) -> None:
        """Keep the losses of a validation: one that was turned on at a resume is not the one before training."""
        if self.finished == 0:
            self.first_validation = losses
        self.last_validation = losses

    def forget_validation(self) -> None:
        """A run that goes on without validation has no change to tell: its clips may be others when it is turned on again."""
        self.first_validation = self.last_validation = None


def remembered(config: SftConfig, *, weights: Sequence[Path]) -> dict[str, Any]:
    """What a checkpoint keeps of its run, as JSON, and is known before anything is encoded.

    Args:
        weights: folders of the transformers' weight files.
    """
    return {"config": config.model_dump(mode="json"), "weights": [fingerprint(path) for path in weights]}


def clips_remembered(train: Sequence[EncodedClip], evaluation: Sequence[EncodedClip]) -> dict[str, Any]:
    """What it keeps of the encoded clips: their keys say what is in them, wherever the files lie."""
    return {"train": _digest(train), "eval": _digest(evaluation)}


def checkpoints(config: SftConfig) -> CheckpointStore:
    """The checkpoints in the output folder."""
    return CheckpointStore(Path(config.output_dir) / "checkpoints", keep_last=config.checkpoint.keep_last, unit="step")


def saved_faults(config: SftConfig, *, weights: Sequence[Path]) -> list[str]:
    """Why the newest checkpoint in the output folder cannot be continued, as far as is known before the clips are encoded;
    nothing where there is none."""
    state, faults = newest_state(checkpoints(config))
    return faults if state is None else resume_faults(state, remembered(config, weights=weights))


def resume_faults(state: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Why a run with the settings ``now`` is not the continuation of the run that saved ``state``.

    Args:
        state: a checkpoint's, with ``Progress`` under "progress", ``remembered`` and ``clips_remembered`` under "settings".
        now: from ``remembered``; clips are compared if ``clips_remembered`` is in it, too.
    """
    try:
        saved, finished = state["settings"], Progress(**state["progress"]).finished
        before, after = saved["config"], now["config"]
        faults = config_faults(before, after, free=FREE, length="training.num_steps", finished=finished)
        for key, what in (("weights", "the transformers' weights"), ("train", "the training clips that can be used")):
            if key in now and saved[key] != now[key]:
                faults.append(f"--resume: {what} are not those the run was started with; give the same ones")
        validates = after["eval"]["interval"] and before["eval"]["interval"]
        if validates and "eval" in now and saved["eval"] != now["eval"]:
            faults.append("--resume: the validation clips are not those the run was started with; give the same ones")
        return faults
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        return [
            f"--resume: state.json of the newest checkpoint is damaged ({reason}); remove it to resume from the one before"
        ]


def _digest(clips: Sequence[EncodedClip]) -> str:
    return hashlib.sha256(json.dumps([[clip.clip_key, clip.text_key] for clip in clips]).encode()).hexdigest()
