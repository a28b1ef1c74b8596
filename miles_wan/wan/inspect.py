"""Counts what a run would train, on the meta device: no weights are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from miles_wan.errors import InputError
from miles_wan.wan.family import family_named, load_family
from miles_wan.wan.load import meta_transformer
from miles_wan.wan.lora import inject_lora, report


def inspect_model(
    *, model: str | None, family: str | None, lora_rank: int, lora_targets: Sequence[str]
) -> dict[str, Any]:
    """Parameter, block and adapter counts of a checkpoint folder's transformers or of a released size: of all experts
    together, and for two in ``each_expert``, which are alike.

    Raises:
        InputError: neither or both of ``model`` and ``family``, an unknown family, a faulty folder or target.
    """
    name, config = _configuration(model, family)
    if lora_rank < 1:
        raise InputError([f"--lora-rank {lora_rank}: at least 1"])
    transformer = meta_transformer(config)
    inject_lora(transformer, rank=lora_rank, alpha=lora_rank, targets=lora_targets, seed=0)
    experts = family_named(name).experts
    counts = {"family": name, "lora_rank": lora_rank, **asdict(report(*[transformer] * len(experts)))}
    return counts if len(experts) == 1 else {**counts, "each_expert": asdict(report(transformer))}


def _configuration(model: str | None, family: str | None) -> tuple[str, Mapping[str, Any]]:
    if (model is None) == (family is None):
        raise InputError(["give either --model FOLDER or --family NAME"])
    if family is not None:
        return family, family_named(family).transformer
    folder = load_family(Path(str(model)))
    return folder.family.name, folder.transformer
