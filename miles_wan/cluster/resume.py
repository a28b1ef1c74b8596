"""What a checkpoint remembers of the settings it was made with, and whether a run may continue it. In: configuration and
records, now and then. Out: what to save, or the faults. A curve that changes its law in the middle is nobody's result.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from miles_wan.config import Config
from miles_wan.records import PromptRecord

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
    "reward.functions.*.model",
    "reward.functions.*.processor",
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


def remembered(config: Config, train: Sequence[PromptRecord], validation: Sequence[PromptRecord]) -> dict[str, Any]:
    """What a checkpoint keeps of its run, as JSON.

    Args:
        train: training records in their order.
        validation: records that are validated; ``eval.max_records`` of them.
    """
    return {"config": config.model_dump(mode="json"), "train": _digest(train), "eval": _digest(validation)}


def resume_faults(state: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Why a run with the settings ``now`` is not the continuation of the run that saved ``state``.

    Args:
        state: a checkpoint's, with ``remembered`` under "settings".
        now: from ``remembered``.
    """
    saved = state.get("settings")
    if saved is None:
        return ["--resume: the checkpoint does not say with which settings it was made; start anew"]
    before, after = _flat(saved["config"]), _flat(now["config"])
    faults = [
        f"--resume: {key} is {after.get(key)!r}, the run was started with {before.get(key)!r}; set it back, or start anew "
        "with another --output-dir"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key) and not _is_free(key)
    ]
    if saved["train"] != now["train"]:
        faults.append("--resume: the records of data.train are not those the run was started with; give the same file")
    was_on, is_on = before["eval.interval"] > 0, after["eval.interval"] > 0
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


def _digest(records: Sequence[PromptRecord]) -> str:
    return hashlib.sha256(json.dumps([record.record_id for record in records]).encode()).hexdigest()


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted names of all leaves."""
    if isinstance(tree, Mapping):
        return {name: leaf for key, value in tree.items() for name, leaf in _flat(value, f"{prefix}{key}.").items()}
    if isinstance(tree, list) and any(isinstance(value, Mapping) for value in tree):
        return {name: leaf for key, value in enumerate(tree) for name, leaf in _flat(value, f"{prefix}{key}.").items()}
    return {prefix.removesuffix("."): tree}


def _is_free(key: str) -> bool:
    parts = key.split(".")
    return any(_starts(parts, rule.split(".")) for rule in FREE)


def _starts(parts: Sequence[str], rule: Sequence[str]) -> bool:
    return len(parts) >= len(rule) and all(part in (own, "*") for own, part in zip(parts, rule, strict=False))
