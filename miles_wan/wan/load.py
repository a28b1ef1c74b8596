"""Loads the transformer of a diffusers-format checkpoint, and builds one without weights for counting."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from diffusers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFETENSORS_WEIGHTS_NAME
from safetensors import safe_open

from miles_wan.errors import InputError

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def load_transformer(model_path: Path, *, dtype: str, subfolder: str = "transformer") -> WanTransformer3DModel:
    """The transformer in evaluation mode on the CPU. ``from_pretrained`` keeps the parts that must stay float32 (rope
    tables, time embedder, modulation tables, norm2) in float32 under bf16; ``.to(bfloat16)`` would not.

    Raises:
        InputError: the weight files lack tensors or hold others than the configuration says; diffusers would fill the
            gaps with random numbers.
    """
    transformer, info = WanTransformer3DModel.from_pretrained(
        str(model_path),
        subfolder=subfolder,
        torch_dtype=DTYPES[dtype],
        local_files_only=True,
        output_loading_info=True,
    )
    strange = {kind: names for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") if (names := info[kind])}
    if strange:
        found = "; ".join(
            f"{len(names)} {kind.replace('_', ' ')}, e.g. {next(iter(names))}" for kind, names in strange.items()
        )
        raise InputError(
            [f"{model_path / subfolder}: the weights do not fit config.json ({found}); download the folder again"]
        )
    return transformer.eval()


def meta_transformer(config: Mapping[str, Any], *, dtype: str = "fp32") -> WanTransformer3DModel:
    """A transformer of this configuration on the meta device: names, shapes and types as ``load_transformer`` gives
    them, no memory."""
    with torch.device("meta"):
        transformer = WanTransformer3DModel.from_config({k: v for k, v in config.items() if not k.startswith("_")})
    stay = WanTransformer3DModel._keep_in_fp32_modules
    for name, parameter in transformer.named_parameters():
        if not any(part in name.split(".") for part in stay):
            parameter.data = parameter.data.to(DTYPES[dtype])
    return transformer


def weight_file_faults(folder: Path, transformer: WanTransformer3DModel) -> list[str]:
    """Compare the headers of a component's weight files with the names and shapes of ``transformer``; reads no weights.
    Files in another layout than safetensors are left to the loader."""
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    shards = (
        set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else {SAFETENSORS_WEIGHTS_NAME}
    )
    files = [folder / str(shard) for shard in sorted(shards)]
    if not all(file.is_file() for file in files):
        return []
    stored = {name: shape for file in files for name, shape in stored_shapes(file).items()}
    wanted = {name: tuple(tensor.shape) for name, tensor in transformer.state_dict().items()}
    found = {
        "missing": sorted(wanted.keys() - stored.keys()),
        "unexpected": sorted(stored.keys() - wanted.keys()),
        "of another shape": sorted(name for name in wanted.keys() & stored.keys() if wanted[name] != stored[name]),
    }
    told = [f"{len(names)} {kind}, first {names[0]}" for kind, names in found.items() if names]
    return (
        [f"{folder}: the weights do not fit config.json ({'; '.join(told)}); download the folder again"] if told else []
    )


def stored_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor in a safetensors file, from its header."""
    with safe_open(file, framework="pt") as handle:
        return {name: tuple(handle.get_slice(name).get_shape()) for name in handle.keys()}  # noqa: SIM118 - no mapping
