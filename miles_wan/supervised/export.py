"""The trained weights as diffusers reads them. In: the trainer's model. Out: adapters, or whole transformer folders, one per
trained expert. Gathering is a collective; rank 0 writes.

    adapter/                       one transformer; with two experts adapter/transformer/ and adapter/transformer_2/
    model/transformer/, ...        full fine-tuning: good for WanTransformer3DModel.from_pretrained
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from miles_wan.config import ModelConfig
from miles_wan.training.sharding import full_tensor
from miles_wan.wan.family import ModelFolder
from miles_wan.wan.load import meta_transformer
from miles_wan.wan.lora import adapter_folder, save_adapter, trainable_parameters
from miles_wan.wan.model import WanModel


def export_adapters(directory: Path, model: WanModel, settings: ModelConfig, *, names: Sequence[str]) -> list[Path]:
    """Write the adapter of each component in ``names``; the folders."""
    places = []
    for name in names:
        tensors = {key: full_tensor(value.detach()).cpu() for key, value in trainable_parameters(model[name])}
        places.append(adapter_folder(directory, name, model.experts))
        if dist.get_rank() == 0:
            save_adapter(places[-1], tensors, rank=settings.lora_rank, alpha=settings.lora_alpha)
    dist.barrier()
    return places


def export_transformers(
    directory: Path, model: WanModel, folder: ModelFolder, settings: ModelConfig, *, names: Sequence[str]
) -> list[Path]:
    """Write each whole component in ``names`` in ``model.dtype``; the folders."""
    places = []
    for name in names:
        state: dict[str, Tensor] = {}
        for key, value in model[name].state_dict().items():
            whole = full_tensor(value.detach())
            if dist.get_rank() == 0:
                state[key] = whole.cpu()
            del whole
        places.append(directory / name)
        if dist.get_rank() == 0:
            transformer = meta_transformer(folder.transformer, dtype=settings.dtype)
            kept = transformer.state_dict()
            typed = {key: value.to(kept[key].dtype) for key, value in state.items()}
            transformer.load_state_dict(typed, strict=True, assign=True)
            transformer.save_pretrained(places[-1])
            del transformer, typed, state
        dist.barrier()
    return places
