"""The last word of a supervised run: ``summary.json``. In: facts of the run and the losses of the first and the last validation. Out:
a file with every key that readers rely on. It knows nothing of how the losses were made.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from miles_wan.supervised.draws import Draw
from miles_wan.supervised.validation import by_clip
from miles_wan.tracking.summary import mean_ci95, paired_gain
from miles_wan.tracking.writing import TrackingError, plain_number, replacing
from miles_wan.wan.experts import Experts

SUPERVISED_FIELDS: Mapping[str, str] = {
    "steps": "Optimizer steps finished, those before a resume included",
    "seconds": "Seconds in steps, before a resume included",
    "seed": "Seed of the run",
    "family": "Which released model the checkpoint is one of",
    "method": "lora or full",
    "dp_size": "FSDP2 ranks",
    "batch_size": "Samples of an optimizer step",
    "trainable_parameters": "Parameters that are trained",
    "total_parameters": "Parameters of all loaded transformers, adapters included",
    "lora_tensors": "Adapter tensors; 0 for full fine-tuning",
    "clips": "Training clips that can be used",
    "validation_clips": "Validation clips",
    "bad_records": "Records left out, by data set and kind (bad_records.jsonl names each)",
    "notes": "What is worth knowing of the others, by data set and kind",
    "cache_entries": "Cache entries of the training clips and captions",
    "cache_entries_made": "Those of them that this start had to encode",
    "exported": "Folders of the trained weights",
    "resumed_from": "Checkpoint that this run continued from; null if none",
    "validation_before": "Validation loss before training: of everything (all) and of each expert; null without validation",
    "validation_after": "The same at the end",
    "validation_change": "Mean of after minus before with the half-width of its 95 % interval, paired over the clips",
}


def loss_gain(
    draws: Sequence[Draw], before: Sequence[float] | None, after: Sequence[float] | None, experts: Experts
) -> dict[str, Any]:
    """The fields ``validation_...`` of two validations with the same draws."""
    if before is None or after is None:
        return dict.fromkeys(("validation_before", "validation_after", "validation_change"))
    parts: dict[str, list[int]] = {"all": list(range(len(draws)))}
    for name in dict.fromkeys(draw.expert for draw in draws):
        parts[experts.label(name)] = [place for place, draw in enumerate(draws) if draw.expert == name]
    fields: dict[str, dict[str, Any]] = {"validation_before": {}, "validation_after": {}, "validation_change": {}}
    for part, places in parts.items():
        chosen = [draws[place] for place in places]
        first = _clip_means(chosen, [before[place] for place in places])
        last = _clip_means(chosen, [after[place] for place in places])
        change = paired_gain(first, last)
        fields["validation_before"][part] = mean_ci95(first).mean
        fields["validation_after"][part] = mean_ci95(last).mean
        fields["validation_change"][part] = {"mean": change.mean, "ci95": change.ci95}
    return fields


def write_supervised_summary(path: Path, data: Mapping[str, Any]) -> None:
    """Write ``data`` as JSON, atomically, in the order of SUPERVISED_FIELDS. Raises TrackingError when one is missing or the
    file cannot be written."""
    missing = [key for key in SUPERVISED_FIELDS if key not in data]
    if missing:
        raise TrackingError(f"{path}: the summary lacks {', '.join(missing)}.")
    text = json.dumps({key: _finite(data[key]) for key in SUPERVISED_FIELDS}, indent=2, ensure_ascii=False)
    with replacing(path) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")


def _clip_means(draws: Sequence[Draw], losses: Sequence[float]) -> list[float]:
    return [sum(values) / len(values) for values in by_clip(draws, losses).values()]


def _finite(value: Any) -> Any:
    """JSON has no NaN: a number that is not finite becomes null."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return plain_number(value) if isinstance(value, float) else value
