"""A supervised run's settings, loaded, checked and filled in. In: flags, recipes, the model folder. Out: the configuration, and
what it means for this model (``Plan``), or every fault. It starts nothing and loads no weights.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_wan.configuration import RECIPES, merged, recipe_names, validated
from miles_wan.data.video import ClipFormat
from miles_wan.errors import InputError
from miles_wan.supervised.config import SftConfig
from miles_wan.wan.experts import TIMESTEPS
from miles_wan.wan.family import ModelFolder, legal_frames, legal_size

ROOM = "sft"
# TI2V makes videos with and without a first image, so it trains both.
_IMAGE_SHARES = {"none": 0.0, "first_frame": 0.5, "channels": 1.0}


@dataclass(frozen=True)
class Plan:
    """What the settings mean for one checkpoint: the clip cut from every video, the time shift of the draws, the share of
    samples with a given first frame, and the trained components."""

    clip: ClipFormat
    shift: float
    image_share: float
    trained: tuple[str, ...]


def recipe_path(name: str) -> Path:
    """A recipe in ``configs/sft/``, or a YAML file. Raises InputError if there is none."""
    for candidate in (Path(name), RECIPES / ROOM / f"{name}.yaml"):
        if os.path.isfile(candidate):
            return candidate
    raise InputError([f"--recipe {name}: no such file and no such recipe; recipes are {', '.join(recipe_names(ROOM))}"])


def read_settings(recipes: Sequence[Path], overrides: Mapping[str, Any], extra_args: Sequence[str] = ()) -> SftConfig:
    """Merge recipes, ``overrides`` and dotted flags, the later over the earlier. Raises InputError with all faults of fields
    and of their combinations."""
    faults: list[str] = []
    config = validated(SftConfig, merged(recipes, overrides, extra_args, faults), faults)
    if faults := combination_faults(config):
        raise InputError(faults)
    return config


def combination_faults(config: SftConfig) -> list[str]:
    """Fields that contradict each other, whatever the model and the data are."""
    training, evaluation, faults = config.training, config.eval, []
    if training.batch_size % training.dp_size:
        faults.append(
            f"training.batch_size {training.batch_size} does not divide by training.dp_size {training.dp_size}: every rank takes "
            f"equally many samples; nearest is {max(1, round(training.batch_size / training.dp_size)) * training.dp_size}"
        )
    if training.method == "full" and config.model.quantization != "none":
        faults.append(
            f"training.method full with model.quantization {config.model.quantization}: a quantized base is frozen; use lora"
        )
    if training.method == "full" and config.model.init_adapter is not None:
        faults.append("training.method full trains no adapter: leave model.init_adapter out, or merge it first")
    if evaluation.interval and config.data.eval is None:
        faults.append(
            f"eval.interval is {evaluation.interval}, but data.eval is not given; pass --eval-data-jsonl, or 0"
        )
    if evaluation.interval and not (evaluation.timesteps or evaluation.quantiles):
        faults.append("eval.timesteps and eval.quantiles are both empty: there is nothing to validate at")
    wrong = [timestep for timestep in evaluation.timesteps if not 0 < timestep <= TIMESTEPS]
    if wrong:
        faults.append(f"eval.timesteps: {wrong} lie outside (0, {TIMESTEPS}]")
    wrong = [quantile for quantile in evaluation.quantiles if not 0 <= quantile <= 1]
    if wrong:
        faults.append(f"eval.quantiles: {wrong} lie outside [0, 1]")
    if config.data.buckets and (config.data.width is not None or config.data.height is not None):
        faults.append("data.buckets takes the place of data.width and data.height; give one or the other")
    return faults


def plan(config: SftConfig, folder: ModelFolder) -> Plan:
    """What the settings mean for this checkpoint. Raises InputError with every contradiction."""
    family, data, faults = folder.family, config.data, []
    width = data.width if data.width is not None else family.width
    height = data.height if data.height is not None else family.height
    sizes = data.buckets or ((width, height),)
    num_frames = data.num_frames if data.num_frames is not None else family.num_frames
    field = "data.buckets" if data.buckets else "data.width, data.height"
    faults += [f"{field}: {fault}" for size in sizes if (fault := legal_size(*size, family)) is not None]
    natural = _IMAGE_SHARES[folder.image_conditioning]
    share = data.image_share if data.image_share is not None else natural
    if folder.image_conditioning != "first_frame" and share != natural:
        always = "always takes" if natural else "never takes"
        faults.append(f"data.image_share is {share:g}, but {family.name} {always} a first image; leave it out")
    with_image = folder.image_conditioning == "first_frame" and share > 0
    if fault := legal_frames(num_frames, family, with_image=with_image):
        faults.append(f"data.num_frames: {fault}")
    trained: tuple[str, ...] = ()
    try:
        trained = folder.routing.chosen(config.model.train_experts)
    except ValueError as error:
        faults.append(f"model.train_experts: {error}")
    if config.timesteps.high_share is not None and len(trained) < 2:
        faults.append(
            f"timesteps.high_share is {config.timesteps.high_share:g}, but {len(trained)} expert is trained: it gets all draws; "
            "leave it out"
        )
    if config.eval.guidance_scale_2 is not None and len(family.experts) == 1:
        faults.append(f"eval.guidance_scale_2 is given, but {family.name} has a single transformer; leave it out")
    if faults:
        raise InputError(faults)
    clip = ClipFormat(sizes=tuple(sizes), num_frames=num_frames, fps=data.fps, stride=data.stride)
    shift = config.timesteps.shift if config.timesteps.shift is not None else family.flow_shift
    return Plan(clip, shift, share, trained)


def batch_equation(config: SftConfig) -> str:
    """The equation that ties the batch knobs together, with this run's numbers."""
    training = config.training
    per_rank = training.batch_size // training.dp_size
    return (
        f"{training.batch_size} samples per optimizer step = {training.dp_size} ranks x {per_rank} samples, in micro-batches of up "
        f"to {training.micro_batch_size} of one expert and one size"
    )
