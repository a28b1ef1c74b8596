"""Loads the transformer of a diffusers-format checkpoint, and builds one without weights for counting."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import WanTransformer3DModel

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


def meta_transformer(config: Mapping[str, Any]) -> WanTransformer3DModel:
    """A transformer of this configuration on the meta device: names and shapes, no memory."""
    with torch.device("meta"):
        return WanTransformer3DModel.from_config({k: v for k, v in config.items() if not k.startswith("_")})
