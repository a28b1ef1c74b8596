"""Checks the model folder against the configuration: family, video size, weights, adapters and mesh. Reads headers, no
weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from miles_wan.config import Config, ModelConfig
from miles_wan.data import Dataset
from miles_wan.doctor.experts import expert_faults, image_faults
from miles_wan.errors import InputError
from miles_wan.wan.family import ModelFolder, legal_frames, legal_size, load_family, resolve_model

if TYPE_CHECKING:
    from miles_wan.wan.model import WanModel


def find_model(config: Config, faults: list[str]) -> ModelFolder | None:
    """The model folder, fetched where it is a hub id; None and added ``faults`` where it cannot be used."""
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


def family_faults(model: ModelFolder, config: Config, datasets: list[Dataset]) -> list[str]:
    """Faults of the video size and of what this family allows."""
    family, rollout = model.family, config.rollout
    faults = []
    faults += expert_faults(model, config)
    heads, split = model.transformer.get("num_attention_heads"), rollout.tp_size * rollout.sp_size
    if rollout.engine == "sglang" and isinstance(heads, int) and heads > 0 and heads % split:
        sizes = ", ".join(str(size) for size in range(1, heads + 1) if heads % size == 0)
        faults.append(
            f"rollout.tp_size x rollout.sp_size = {rollout.tp_size} x {rollout.sp_size}: the {heads} attention heads do not "
            f"divide by {split}; it can be {sizes} (more devices: more rollout.num_engines)"
        )
    faults += image_faults(model, datasets)
    with_image = family.image_conditioning == "first_frame" and any(data.has_images for data in datasets)
    if fault := legal_size(rollout.width, rollout.height, family):
        faults.append(f"rollout.width, rollout.height: {fault}")
    if fault := legal_frames(rollout.num_frames, family, with_image=with_image):
        faults.append(f"rollout.num_frames: {fault}")
    return faults


def transformer_faults(model: ModelFolder, config: Config, device_bytes: int | None) -> list[str]:
    """What the transformer says without its weights: do they fit, do the adapters, and does the mesh make sense."""
    from miles_wan.training.mesh import estimate, mesh_faults  # these are slow to import
    from miles_wan.wan.load import other_weight_faults, weight_file_faults
    from miles_wan.wan.lora import add_adapters
    from miles_wan.wan.model import meta_model

    faults = [f"model.path: {fault}" for fault in other_weight_faults(model.path)]
    try:
        trained = model.routing.chosen(config.model.train_experts)
    except ValueError:
        return faults  # told by expert_faults
    try:
        whole = meta_model(model, dtype=config.model.dtype)
    except InputError as error:
        return [*faults, *(f"model.path: {model.path / model.experts[0]}: {fault}" for fault in error.faults)]
    for name, transformer in whole.items():
        faults += [f"model.path: {fault}" for fault in weight_file_faults(model.path / name, transformer)]
    # A training rank loads the experts it trains, and all where it generates, too.
    names = model.experts if config.rollout.engine == "local" else trained
    held = meta_model(model, dtype=config.model.dtype, names=names, quantization=config.model.quantization)
    try:
        add_adapters(held, config.model.model_copy(update={"init_adapter": None}), names=trained, seed=0)
    except InputError as error:
        return [*faults, *error.faults]
    faults += _adapter_faults(held, config.model, trained)
    if device_bytes is not None:
        memory = estimate(held, ranks=config.training.dp_size)
        faults += mesh_faults(memory, devices=config.cluster.num_gpus, device_bytes=device_bytes)
    return faults


def _adapter_faults(held: WanModel, settings: ModelConfig, trained: Sequence[str]) -> list[str]:
    from miles_wan.wan.lora import adapter_faults, adapter_folder

    if settings.init_adapter is None:
        return []
    root = Path(settings.init_adapter)
    return [
        fault
        for name in trained
        for fault in adapter_faults(held[name], adapter_folder(root, name, held.experts), alpha=settings.lora_alpha)
    ]


def size_warnings(model: ModelFolder, config: Config) -> list[str]:
    """A warning where full-size weights are asked for a size that they were not trained at."""
    rollout, family = config.rollout, model.family
    smallest = min(width * height for width, height in family.trained_sizes)
    if not model.is_full_size or rollout.width * rollout.height >= smallest:
        return []
    sizes = " or ".join(f"{width}x{height}" for width, height in family.trained_sizes)
    return [
        f"rollout.width, rollout.height: {rollout.width}x{rollout.height} is below the sizes {family.name} was trained at "
        f"({sizes}); its videos look broken there"
    ]
