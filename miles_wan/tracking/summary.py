"""The last word of a run: ``summary.json``, and the statistics that stand in it.

In: the rewards of the same validation records before and after, and the facts of the run. Out: a gain with its interval,
and a file with every key that readers rely on. It knows nothing of how the rewards were made.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from miles_wan.tracking.writing import TrackingError, plain_number, replacing

logger = logging.getLogger(__name__)

SUMMARY_FIELDS: Mapping[str, str] = {
    "rollouts": "Rollouts finished, those before a resume included",
    "seconds": "Wall time of the loop, before a resume included",
    "seconds_by_phase": "Exclusive phases of the driver; they add up to `seconds` but for what lies between them",
    "eval_reward_before": "Mean validation reward before training; null without validation, as all of these",
    "eval_reward_after": "Mean validation reward of the last validation, not of the best",
    "eval_gain_mean": "Mean over the records of after minus before",
    "eval_gain_ci95": "Half-width of its 95 % interval, paired over the records",
    "engine": "Who generated: sglang, or local (the training ranks)",
    "tp_size": "Tensor-parallel size of an engine; null with the local engine",
    "dp_size": "FSDP2 ranks",
    "fsdp_blocks": "Transformer blocks that are sharded",
    "trainable_parameters": "Parameters of the adapters",
    "total_parameters": "Parameters of the transformer, adapters included",
    "lora_tensors": "Adapter tensors applied by each engine at the last weight sync",
    "layer_prefixes": "Layers that they belong to",
    "unmapped": "Tensors without a place in the engine at the last weight sync; anything but 0 ends the run",
    "max_log_prob_gap": "Largest difference between engine and trainer about a log-prob before an update; null where the loss has none (nft)",
    "log_prob_pairs_compared": "(sample, kept step) pairs compared for it",
    "max_ratio_minus_one_before_update": "Largest distance of a likelihood ratio from 1 before an update",
    "sync_seconds_mean": "Mean time of a weight sync: gather, send, apply, verify",
    "videos_scored": "Videos scored, validation included",
    "dropped_samples": "Videos given up",
    "resumed_from": "Checkpoint that this run continued from; null if none",
    "eval_rewards_before": "Validation reward of every record before training, in the order of the file",
    "eval_rewards_after": "The same of the last validation",
    "eval_records": "Validation records",
    "num_engines": "SGLang servers",
    "sp_size": "Sequence-parallel size of an engine; null with the local engine",
    "overlapped_seconds": "Work beside the phases, such as scoring while videos are generated",
    "seed": "Seed of the run",
}
REQUIRED_KEYS = tuple(SUMMARY_FIELDS)


def summary_markdown() -> str:
    """The section of docs/metrics.md about the file."""
    rows = "".join(f"| `{key}` | {meaning} |\n" for key, meaning in SUMMARY_FIELDS.items())
    return f"## summary.json\n\nWritten at the end of a run. These fields are always there:\n\n| field | meaning |\n|---|---|\n{rows}"


class Interval(NamedTuple):
    """``mean`` +- ``ci95``, the half-width of the 95 % interval (NaN for fewer than two values)."""

    mean: float
    ci95: float


def mean_ci95(values: Sequence[float]) -> Interval:
    """Mean and half-width of Student's 95 % interval: t(0.975, n - 1) s / sqrt(n), s with ddof 1.

    Equal values give exactly 0 as half-width. Raises ``TrackingError`` for no values or values that are not finite.
    """
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or array.size == 0 or not np.isfinite(array).all():
        raise TrackingError(f"An interval needs a list of finite numbers, got {values!r}.")
    if array.size == 1:
        return Interval(float(array[0]), math.nan)
    if (array == array[0]).all():
        return Interval(float(array[0]), 0.0)
    quantile = stats.t.ppf(0.975, array.size - 1)
    return Interval(float(array.mean()), float(quantile * stats.sem(array)))


def paired_gain(before: Sequence[float], after: Sequence[float]) -> Interval:
    """Mean of ``after[i] - before[i]`` with its 95 % interval (paired t). Entry i is the same record in both.

    Raises:
        TrackingError: other lengths, no values, or values that are not finite.
    """
    if len(before) != len(after):
        raise TrackingError(
            f"A paired gain needs the same records twice, got {len(before)} before and {len(after)} after."
        )
    difference = np.asarray(after, dtype=np.float64) - np.asarray(before, dtype=np.float64)
    return mean_ci95(difference.tolist())


def write_summary(path: str | Path, data: Mapping[str, Any]) -> None:
    """Write ``data`` as JSON, atomically: the required keys first and in their order, then the others by name.

    A number that is not finite becomes null and is named in the log.

    Raises:
        TrackingError: a required key is missing, a value has no JSON form, or the file cannot be written.
    """
    target = Path(path)
    missing = [key for key in REQUIRED_KEYS if key not in data]
    if missing:
        raise TrackingError(f"{target}: the summary lacks {', '.join(missing)}.")
    order = [*REQUIRED_KEYS, *sorted(set(data) - set(REQUIRED_KEYS))]
    text = json.dumps({key: _plain(data[key], key) for key in order}, indent=2, ensure_ascii=False, allow_nan=False)
    with replacing(target) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")


def _plain(value: Any, where: str) -> Any:
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, Path):
        return str(value)
    try:
        number = plain_number(value)
    except TypeError as error:
        raise TrackingError(f"summary key {where}: {value!r} has no JSON form.") from error
    if number is None:
        logger.warning("summary key %s is %s: written as null", where, value)
    return number
