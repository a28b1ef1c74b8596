"""Whole plain weights out of a transformer. In: one with or without adapters, quantized or not, sharded or not. Out: the
weights it computes with under diffusers names, or a folder that diffusers loads. A quantized base is dequantised first and
never rounded to 8 bits again.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from diffusers import WanTransformer3DModel
from peft.tuners.lora import LoraLayer
from torch import Tensor

from miles_wan.wan.load import meta_transformer
from miles_wan.wan.lora import ADAPTER
from miles_wan.wan.quantized_linear import SCALE, QuantizedLinear, whole_tensor

_BASE = ".base_layer"


@torch.no_grad()
def merged_weights(transformer: WanTransformer3DModel) -> Iterator[tuple[str, Tensor]]:
    """(diffusers name, weight) of every parameter without the adapters, which are folded in: W + alpha / r B A, computed in
    float32 and rounded once to the type of the base. Without adapters, the base as it computes.

    Gathers one tensor at a time (a collective when sharded: every rank must run to the end).
    """
    for name, parameter in transformer.named_parameters():
        prefix, _, leaf = name.rpartition(".")
        if ".lora_" in name or leaf == SCALE:
            continue
        module = transformer.get_submodule(prefix)
        quantized = leaf == "weight" and isinstance(module, QuantizedLinear)
        weight = module.dequantised() if quantized else whole_tensor(parameter)
        if leaf == "weight" and prefix.endswith(_BASE):
            weight = _with_adapter(weight, transformer.get_submodule(prefix.removesuffix(_BASE)))
        yield name.replace(f"{_BASE}.", "."), weight


def _with_adapter(weight: Tensor, layer: torch.nn.Module) -> Tensor:
    assert isinstance(layer, LoraLayer)
    a, b = (whole_tensor(side[ADAPTER].weight).float() for side in (layer.lora_A, layer.lora_B))
    return (weight.float() + layer.scaling[ADAPTER] * (b @ a)).to(weight.dtype)


def save_merged(transformer: WanTransformer3DModel, folder: Path, *, write: bool = True) -> None:
    """Write ``merged_weights`` and the configuration as diffusers does, in one or several files.

    Args:
        transformer: not changed.
        folder: of the component, ``.../transformer``.
        write: false on all ranks but one of a sharded transformer; they help to gather.
    """
    weights = {name: weight.cpu() for name, weight in merged_weights(transformer) if write}
    if write:
        plain = meta_transformer(transformer.config)
        plain.load_state_dict(weights, assign=True)
        plain.save_pretrained(folder)
