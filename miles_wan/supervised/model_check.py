"""What the checkpoint says of a supervised run without its weights: are they whole, do the adapters fit, does the mesh. In:
settings and a model folder. Out: faults. It reads headers and builds on the meta device.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from miles_wan.errors import InputError
from miles_wan.supervised.config import SftConfig
from miles_wan.wan.family import ModelFolder


def model_faults(
    config: SftConfig, folder: ModelFolder, trained: Sequence[str], *, device_bytes: int | None
) -> list[str]:
    """Every fault of weights, adapters and memory.

    Args:
        device_bytes: memory of the smallest device; None where it is not known.
    """
    from miles_wan.training.mesh import estimate, mesh_faults  # these are slow to import
    from miles_wan.wan.load import other_weight_faults, weight_file_faults
    from miles_wan.wan.lora import adapter_faults, adapter_folder, inject_lora
    from miles_wan.wan.model import meta_model

    settings = config.model
    faults = [f"model.path: {fault}" for fault in other_weight_faults(folder.path)]
    full = config.training.method == "full"
    dtype = "fp32" if full else settings.dtype
    try:
        stored = meta_model(folder, dtype=dtype)
    except InputError as error:
        return [*faults, *(f"model.path: {fault}" for fault in error.faults)]
    model = stored if full else meta_model(folder, dtype=dtype, quantization=settings.quantization)
    for name, transformer in model.items():
        faults += [f"model.path: {fault}" for fault in weight_file_faults(folder.path / name, stored[name])]
        transformer.requires_grad_(full and name in trained)
        if full or name not in trained:
            continue
        try:
            inject_lora(
                transformer, rank=settings.lora_rank, alpha=settings.lora_alpha, targets=settings.lora_targets, seed=0
            )
        except InputError as error:
            return [*faults, *error.faults]
        if settings.init_adapter is not None:
            path = adapter_folder(Path(settings.init_adapter), name, model.experts)
            faults += adapter_faults(transformer, path, alpha=settings.lora_alpha)
    if device_bytes is not None:
        ranks = config.training.dp_size
        faults += mesh_faults(estimate(model, ranks=ranks), devices=ranks, device_bytes=device_bytes)
    return faults
